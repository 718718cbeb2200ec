"""Which cell next on which card.  Pure: no Ray, no clock, no randomness.

Cells are taken in the matrix's order, past those for which their host's memory
has no room beside what runs there (farm.hostmemory).  A cell that ended ERROR is tried
again, on a card that has not had it if there is one, until its attempts are
used up; every other verdict is final, since it is evidence or a rule broken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from farm.bench import Card, Needs
from farm.hostmemory import Host, Ledger, Shortage
from farm.records import Reason, Verdict
from farm.tiers import NOTHING, Claim

GONE_SHOWN = 4  # cards, and reasons, that a sentence names
Kind = tuple[Needs, Claim]
NOT_AGAIN = frozenset({Reason.BAD_CONFIG})  # another attempt would say the same


@dataclass(frozen=True)
class Task:
    """A cell as the scheduler sees it.  `tried`: the card of each attempt that an earlier life of the run committed."""

    id: str
    needs: Needs
    tried: tuple[str, ...] = ()
    claim: Claim = NOTHING  # of its host's memory

    @property
    def kind(self) -> Kind:
        """What tells which cards can run it."""
        return self.needs, self.claim


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

    SKIP: no card of this run ever could.  ERROR: one could have, and has left, never answered, or is on a machine that
    can make no sandbox.
    """

    cell: str
    attempt: int  # its own, though no card had it
    verdict: Verdict
    reason: Reason
    why: str


@dataclass
class _State:
    task: Task
    place: int  # in the order in which cells are taken: the matrix's, unless that is arranged anew
    tried: list[str] = field(default_factory=list)  # cards, one entry an attempt
    final: Verdict | None = None


def unmet(needs: Needs, card: Card) -> str | None:
    """Why a card cannot run a cell, in words; None where it can."""
    if needs.sandbox and card.unsafe is not None:
        return card.unsafe
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

    Cells that wait for their first attempt are queued by their kind, so that
    a choice costs as many steps as there are distinct kinds, not cells.
    """

    def __init__(self, tasks: Sequence[Task], attempts: int) -> None:
        """`attempts` of a cell are the most that it gets, whoever's fault their ERRORs were, and one at least."""
        self._cells = {task.id: _State(task, place, list(task.tried)) for place, task in enumerate(tasks)}
        self._attempts = attempts
        self._cards: dict[str, Card] = {}
        self._left: dict[str, tuple[Card, Gone]] = {}
        self._missing: list[tuple[bool, Gone]] = []
        self._fresh: dict[Kind, deque[_State]] = {}
        self._again: list[_State] = []  # ended ERROR and has attempts left
        self._memory = Ledger()
        self._waits: dict[str, tuple[str, str]] = {}  # by machine: card, sentence; empty once they were told
        self._open = len(self._cells)
        for state in self._cells.values():
            if state.tried:
                self._again.append(state)
            else:
                self._fresh.setdefault(state.task.kind, deque()).append(state)

    def add_card(self, card: Card, host: Host | None = None) -> None:
        """A card that can be used; of one without a `host` no memory is accounted for."""
        self._cards[card.uuid] = card
        self._left.pop(card.uuid, None)
        if host is not None:
            self._memory.join(card.uuid, host)

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
        heads = [queue[0] for kind, queue in self._fresh.items() if queue and self._unmet(kind, card) is None]
        waiting = [s for s in self._again if self._unmet(s.task.kind, card) is None
                   and (uuid not in s.tried or not self._has_untried_card(s))]
        ready = [s for s in (*heads, *waiting) if self._memory.admits(uuid, s.task.claim)]
        if len(ready) < len(heads) + len(waiting):
            self._note_waits(uuid)
        if not ready:
            return None
        state = min(ready, key=lambda s: s.place)
        if state.tried:
            self._again.remove(state)
        else:
            self._fresh[state.task.kind].popleft()
        state.tried.append(uuid)
        self._memory.admit(uuid, state.task.id, state.task.claim)
        return Assignment(state.task.id, uuid, len(state.tried))

    def waits(self) -> list[tuple[str, str]]:
        """(UUID of a card, sentence), once for each machine: which cells wait for its memory, and for which others to end."""
        told = [wait for wait in self._waits.values() if all(wait)]
        self._waits = dict.fromkeys(self._waits, ("", ""))
        return told

    def finished(self, cell: str, verdict: Verdict, reason: Reason | None = None) -> bool:
        """Take the end of an attempt; True where the verdict is the cell's final one."""
        state = self._cells[cell]
        self._memory.release(cell)
        most = max(self._attempts, len(state.task.tried) + 1)
        if verdict is Verdict.ERROR and reason not in NOT_AGAIN and len(state.tried) < most:
            self._again.append(state)
            return False
        self._close(state, verdict)
        return True

    def unplaced(self) -> list[Unplaced]:
        """Cells that wait and that no present card can run, in the matrix's order; they get their final verdict here."""
        asked = {kind for kind, queue in self._fresh.items() if queue} | {state.task.kind for state in self._again}
        ends = {kind: end for kind in asked if (end := self._end_of(kind)) is not None}
        found = []
        for state in self._waiting() if ends else ():
            if (end := ends.get(state.task.kind)) is not None:
                found.append(Unplaced(state.task.id, len(state.tried) + 1, *end))
                self._drop(state, end[0])
        return found

    def _end_of(self, kind: Kind) -> tuple[Verdict, Reason, str] | None:
        if any(self._unmet(kind, card) is None for card in self._cards.values()):
            return None
        needs, claim = kind
        gone = [gone for card, gone in self._left.values() if self._unmet(kind, card) is None]
        gone += [gone for cuda, gone in self._missing if cuda or not (needs.cuda or needs.min_capability)]
        known = [*self._cards.values(), *(card for card, _ in self._left.values())]
        short = [(card, short) for card in known if unmet(needs, card) is None and (short := self._short(claim, card))]
        gone += [Gone(card.name, short.words) for card, short in short if short.passing]
        if gone or not known:
            return Verdict.ERROR, Reason.NO_CARD, f"no card is left that can run it: {_told(gone) or 'there was none'}"
        trusting = (replace(needs, sandbox=False), claim)
        if unsafe := [Gone(card.name, card.unsafe) for card in known if card.unsafe and self._unmet(trusting, card) is None]:
            return Verdict.ERROR, Reason.ISOLATION_MISSING, _told(unsafe)
        why = sorted({reason for card in known if (reason := self._unmet(kind, card))})
        return Verdict.SKIP, Reason.NEEDS_UNMET, "; ".join(why)

    def _unmet(self, kind: Kind, card: Card) -> str | None:
        needs, claim = kind
        if (reason := unmet(needs, card)) is not None:
            return reason
        short = self._short(claim, card)
        return None if short is None else short.words

    def _short(self, claim: Claim, card: Card) -> Shortage | None:
        return self._memory.never(card.uuid, claim)

    def _note_waits(self, uuid: str) -> None:
        if (machine := self._memory.machine(uuid)) not in self._waits:
            waiting = {s.task.id: s.task.claim for s in self._waiting() if s.task.claim != NOTHING
                       and self._unmet(s.task.kind, self._cards[uuid]) is None and not self._memory.admits(uuid, s.task.claim)}
            self._waits[machine] = uuid, self._memory.waits(uuid, waiting)

    @property
    def cards(self) -> tuple[str, ...]:
        """UUIDs of those that can be used."""
        return tuple(self._cards)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the cells that wait for an attempt, in the order in which they are taken."""
        return tuple(state.task.id for state in self._waiting())

    def task(self, cell: str) -> Task:
        return self._cells[cell].task

    def anew(self) -> Scheduler:
        """Another one for the same cells and cards, in the same order, of which nothing has begun."""
        other = Scheduler([state.task for state in sorted(self._cells.values(), key=lambda s: s.place)], self._attempts)
        other._cards, other._left, other._missing = dict(self._cards), dict(self._left), list(self._missing)
        other._memory = self._memory.anew()
        return other

    def arrange(self, order: Sequence[str]) -> None:
        """Take cells in this order from now on; those that it does not name come after, as they were."""
        places = {cell: place for place, cell in enumerate(order)}
        for cell, state in self._cells.items():
            state.place = places.get(cell, len(order) + state.place)
        self._fresh = {kind: deque(sorted(queue, key=lambda s: s.place)) for kind, queue in self._fresh.items()}

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
            self._fresh[state.task.kind].remove(state)
        self._close(state, verdict)

    def _close(self, state: _State, verdict: Verdict) -> None:
        state.final = verdict
        self._open -= 1

    def _has_untried_card(self, state: _State) -> bool:
        return any(
            uuid not in state.tried and self._unmet(state.task.kind, card) is None for uuid, card in self._cards.items())


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
