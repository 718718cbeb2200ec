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

NOT_AGAIN = frozenset({Reason.BAD_CONFIG})  # another attempt would say the same


@dataclass(frozen=True)
class Task:
    """A cell as the scheduler sees it."""

    id: str
    needs: Needs


@dataclass(frozen=True)
class Assignment:
    """One attempt (from 1) of a cell on a card."""

    cell: str
    card: str
    attempt: int


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
        self._cells = {task.id: _State(task, place) for place, task in enumerate(tasks)}
        self._attempts = attempts
        self._cards: dict[str, Card] = {}
        self._fresh: dict[Needs, deque[_State]] = {}
        self._again: list[_State] = []  # ended ERROR and has attempts left
        self._open = len(self._cells)
        for state in self._cells.values():
            self._fresh.setdefault(state.task.needs, deque()).append(state)

    def add_card(self, card: Card) -> None:
        self._cards[card.uuid] = card

    def remove_card(self, uuid: str) -> None:
        self._cards.pop(uuid, None)

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
        if verdict is Verdict.ERROR and reason not in NOT_AGAIN and len(state.tried) < self._attempts:
            self._again.append(state)
            return False
        self._close(state, verdict)
        return True

    def unrunnable(self) -> list[tuple[str, str]]:
        """Cells that wait and that no present card can run, each with why; they get their final SKIP here."""
        found = []
        for state in self._waiting():
            reasons = [unmet(state.task.needs, card) for card in self._cards.values()]
            if self._cards and all(reasons):
                found.append((state.task.id, "; ".join(sorted({r for r in reasons if r}))))
                self._drop(state, Verdict.SKIP)
        return found

    def stranded(self) -> list[str]:
        """Cells that wait although no card is left at all; they get their final ERROR here."""
        if self._cards:
            return []
        states = self._waiting()
        for state in states:
            self._drop(state, Verdict.ERROR)
        return [state.task.id for state in states]

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
