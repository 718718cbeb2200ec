"""Which cell next on which card.  Pure: no Ray, no clock, no randomness.

Cells are taken in the matrix's order.  A cell that ended ERROR is tried
again, on a card that has not had it if there is one, until its attempts are
used up; every other verdict is final, since it is evidence or a rule broken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from farm.bench import Card, Needs
from farm.records import Reason, Verdict

GONE_SHOWN = 4  # cards, and reasons, that a sentence names
NOT_AGAIN = frozenset({Reason.BAD_CONFIG})  # another attempt would say the same


@dataclass(frozen=True)
class Task:
    """A cell as the scheduler sees it.  `tried`: the card of each attempt that an earlier life of the run committed."""

    id: str
    needs: Needs
    tried: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """One attempt (from 1) of a cell on a card."""

    cell: str
    card: str
    attempt: int


@dataclass(frozen=True)
class Gone:
    """What a card is called, and why it is not there."""

    name: str
    why: str


@dataclass(frozen=True)
class Unplaced:
    """A cell that no card here can run, with its final verdict.

    SKIP: no card of this run ever could.  ERROR: one could have, and has left or never answered.
    """

    cell: str
    attempt: int  # its own, though no card had it
    verdict: Verdict
    why: str


@dataclass
class _State:
    task: Task
    place: int  # in the matrix
    tried: list[str] = field(default_factory=list)  # cards, one entry an attempt
    final: Verdict | None = None


def unmet(needs: Needs, card: Card) -> str | None:
    """Why a card cannot run a cell, in words; None where it can."""
    if needs.cuda and card.kind != "cuda":
        return "needs a CUDA card"
    if needs.min_capability is not None:
        wanted = ".".join(map(str, needs.min_capability))
        if card.capability is None:
            return f"needs compute capability {wanted}"
        if card.capability < needs.min_capability:
            return f"needs compute capability {wanted}, {card.name} has {'.'.join(map(str, card.capability))}"
    if needs.min_memory_bytes is not None and (card.memory_bytes or 0) < needs.min_memory_bytes:
        has = "unknown" if card.memory_bytes is None else f"{card.memory_bytes / 2**30:.1f} GiB"
        return f"needs {needs.min_memory_bytes / 2**30:.1f} GiB of memory, {card.name} has {has}"
    return None


class Scheduler:
    """Holds what is left to do.  Every cell gets exactly one final verdict.

    Cells that wait for their first attempt are queued by their needs, so that
    a choice costs as many steps as there are distinct needs, not cells.
    """

    def __init__(self, tasks: Sequence[Task], attempts: int) -> None:
        """`attempts` of a cell are the most that it gets, whoever's fault their ERRORs were, and one at least."""
        self._cells = {task.id: _State(task, place, list(task.tried)) for place, task in enumerate(tasks)}
        self._attempts = attempts
        self._cards: dict[str, Card] = {}
        self._left: dict[str, tuple[Card, Gone]] = {}
        self._missing: list[tuple[bool, Gone]] = []
        self._fresh: dict[Needs, deque[_State]] = {}
        self._again: list[_State] = []  # ended ERROR and has attempts left
        self._open = len(self._cells)
        for state in self._cells.values():
            if state.tried:
                self._again.append(state)
            else:
                self._fresh.setdefault(state.task.needs, deque()).append(state)

    def add_card(self, card: Card) -> None:
        self._cards[card.uuid] = card
        self._left.pop(card.uuid, None)

    def remove_card(self, card: Card, gone: Gone) -> None:
        """A card that has left, or that must not be used; `gone` is told of cells that it could run and none is left to."""
        self._cards.pop(card.uuid, None)
        self._left[card.uuid] = (card, gone)

    def miss_card(self, gone: Gone, *, cuda: bool) -> None:
        """A card that never said what it is: no cell that it may have run is skipped."""
        self._missing.append((cuda, gone))

    def next(self, uuid: str) -> Assignment | None:
        """The next attempt for an idle card, or None: nothing for it now."""
        card = self._cards[uuid]
        heads = [queue[0] for needs, queue in self._fresh.items() if queue and unmet(needs, card) is None]
        waiting = [s for s in self._again if unmet(s.task.needs, card) is None
                   and (uuid not in s.tried or not self._has_untried_card(s))]
        if not heads and not waiting:
            return None
        state = min([*heads, *waiting], key=lambda s: s.place)
        if state.tried:
            self._again.remove(state)
        else:
            self._fresh[state.task.needs].popleft()
        state.tried.append(uuid)
        return Assignment(state.task.id, uuid, len(state.tried))

    def finished(self, cell: str, verdict: Verdict, reason: Reason | None = None) -> bool:
        """Take the end of an attempt; True where the verdict is the cell's final one."""
        state = self._cells[cell]
        most = max(self._attempts, len(state.task.tried) + 1)
        if verdict is Verdict.ERROR and reason not in NOT_AGAIN and len(state.tried) < most:
            self._again.append(state)
            return False
        self._close(state, verdict)
        return True

    def unplaced(self) -> list[Unplaced]:
        """Cells that wait and that no present card can run, in the matrix's order; they get their final verdict here."""
        asked = {needs for needs, queue in self._fresh.items() if queue} | {state.task.needs for state in self._again}
        ends = {needs: end for needs in asked if (end := self._end_of(needs)) is not None}
        found = []
        for state in self._waiting() if ends else ():
            if (end := ends.get(state.task.needs)) is not None:
                found.append(Unplaced(state.task.id, len(state.tried) + 1, *end))
                self._drop(state, end[0])
        return found

    def _end_of(self, needs: Needs) -> tuple[Verdict, str] | None:
        if any(unmet(needs, card) is None for card in self._cards.values()):
            return None
        gone = [gone for card, gone in self._left.values() if unmet(needs, card) is None]
        gone += [gone for cuda, gone in self._missing if cuda or not (needs.cuda or needs.min_capability)]
        known = [*self._cards.values(), *(card for card, _ in self._left.values())]
        if gone or not known:
            return Verdict.ERROR, f"no card is left that can run it: {_told(gone) or 'there was none'}"
        return Verdict.SKIP, "; ".join(sorted({reason for card in known if (reason := unmet(needs, card))}))

    @property
    def done(self) -> bool:
        return self._open == 0

    def _waiting(self) -> list[_State]:
        waiting = [state for queue in self._fresh.values() for state in queue] + self._again
        return sorted(waiting, key=lambda s: s.place)

    def _drop(self, state: _State, verdict: Verdict) -> None:
        if state.tried:
            self._again.remove(state)
        else:
            self._fresh[state.task.needs].remove(state)
        self._close(state, verdict)

    def _close(self, state: _State, verdict: Verdict) -> None:
        state.final = verdict
        self._open -= 1

    def _has_untried_card(self, state: _State) -> bool:
        return any(
            uuid not in state.tried and unmet(state.task.needs, card) is None for uuid, card in self._cards.items())


def _told(gone: Sequence[Gone]) -> str:
    """Each reason once, with the cards that it is of."""
    by_why: dict[str, list[str]] = {}
    for one in gone:
        by_why.setdefault(one.why, []).append(one.name)
    said = []
    for why, names in list(by_why.items())[:GONE_SHOWN]:
        more = f" and {len(names) - GONE_SHOWN} more" if len(names) > GONE_SHOWN else ""
        said.append(f"{', '.join(names[:GONE_SHOWN])}{more}: {why}")
    return "; ".join([*said, *(["and others"] if len(by_why) > GONE_SHOWN else [])])
