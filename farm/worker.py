"""The Ray actor that owns one card: runs cells on it, one at a time, and streams what happens.

The class itself knows no Ray, so that a test (or a debugger) can drive it in
its own process.  The border of a cell is here: whatever a job raises becomes
the one Outcome of its attempt.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farm import campaign, cards, hostmemory, sweep
from farm.bench import Card
from farm.cardprobe import CardProbe, RealCard
from farm.childenv import child_environment
from farm.errors import FarmError, InvalidMeasurement
from farm.evidence import Evidence, Policy, RunInfo, Span
from farm.health import Interpreter, own_interpreter
from farm.isolation import Sandbox
from farm.keeper import Keeper
from farm.lifeline import CELL_MARK, RUN_MARK
from farm.livebench import LiveBench, Workshop
from farm.pins import Pin
from farm.places import default_cache, host_state
from farm.plan import Cell
from farm.quarantine import Quarantine
from farm.records import Outcome, Reason, Tagged, Verdict

TETHER_S = 0.5


@dataclass(frozen=True)
class Seat:
    """Where a worker sits: a GPU of a node, or one of its CPU slots."""

    node: str  # Ray node id
    kind: str  # cuda, cpu
    index: int
    of: int  # seats of this kind on the node


@dataclass(frozen=True)
class Progress:
    text: str


@dataclass(frozen=True)
class Rows:
    table: str
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Ended:
    """The attempt's end; `row` is its row of the table `cells`, `final` still to be said by the driver.

    `quarantine` says that the card is out from now on.
    """

    outcome: Outcome
    row: dict[str, Any]
    quarantine: Quarantine | None = None


Streamed = Progress | Rows | Ended


class Worker:
    """One card.  Pins, trees, models and logs are in the node's own FARM_CACHE, else in `cache`, the driver's."""

    def __init__(self, seat: Seat, info: RunInfo, cache: str | None, policy: Policy = Policy()) -> None:
        card = cards.visible_gpu() if seat.kind == "cuda" else cards.cpu_slot(seat.index, seat.of)
        self._card = replace(card, unsafe=_unsafe(policy))
        self._info = info
        self._workshop = Workshop.at(Path(cache) if cache and not os.environ.get("FARM_CACHE") else default_cache())
        self._policy, state = policy, host_state()
        self._state, self._swept = state, sweep.sweep(state)
        self._keeper = Keeper(self._asked(self._card), state, policy, info.run)

    def card(self) -> Card:
        return self._card

    def standing(self) -> Quarantine | None:
        """The quarantine that the card is in, whoever imposed it on this host."""
        return self._keeper.standing()

    def room(self) -> hostmemory.Room:
        """What memory this machine has, now."""
        return hostmemory.room()

    def tether(self) -> None:
        """Let this process end when the one that started it does: an actor outlives its raylet otherwise, card and all."""
        threading.Thread(target=_end_with, args=(os.getppid(),), name="tether", daemon=True).start()

    def alive(self) -> bool:
        """Asked now and then beside `run`: a process that is stopped, or has no memory left to think, does not answer."""
        return True

    def run(self, cell: Cell, attempt: int) -> Iterator[Streamed]:
        """One attempt of a cell.  The last event is always Ended.

        The job runs in a thread of its own, so that a line of progress is on
        its way while a boot or a prefill still lasts.
        """
        events: queue.SimpleQueue[Streamed] = queue.SimpleQueue()
        thread = threading.Thread(target=self._attempt, args=(cell, attempt, events), name=cell.id, daemon=True)
        thread.start()
        while True:
            try:
                event = events.get(timeout=1.0)
            except queue.Empty:
                if thread.is_alive() or not events.empty():
                    continue
                return  # without Ended: dispatch makes an ERROR of it
            yield event
            if isinstance(event, Ended):
                thread.join()
                return

    def _attempt(self, cell: Cell, attempt: int, events: queue.SimpleQueue[Streamed]) -> None:
        evidence = Evidence(self._info, cell, attempt, card={
            "card": self._card.uuid, "card_name": self._card.name, "host": self._card.host})
        spans: list[Span] = []
        quarantine: Quarantine | None = None
        for text in self._untold():
            events.put(Progress(text))

        def measured() -> Outcome:
            return self._measure(cell, evidence, spans, events)

        def alone() -> Outcome:
            nonlocal quarantine
            with self._keeper.held(cell.id, lambda text: events.put(Progress(text))):
                evidence.begin()  # an attempt takes time from when it has its card
                if (quarantine := self._keeper.standing()) is not None:  # imposed by another run of this host meanwhile
                    raise FarmError(f"{self._card.name} is {quarantine}; see farm cards", reason=Reason.CARD_UNHEALTHY)
                judged = self._keeper.judged(_ended(measured, events), cell.id)
                quarantine = judged.quarantine
                return judged.outcome

        outcome = _ended(alone if _needs_card(cell) else measured, events)
        if _needs_card(cell) and evidence.waited_s is None:  # it never had it
            evidence.begin()
        if cell.control is not None:
            outcome = campaign.controlled(outcome, cell.control)
        events.put(Ended(outcome, evidence.cell_row(outcome, spans, final=True), quarantine))

    def _untold(self) -> tuple[str, ...]:
        """What the sweep at the start says, told once: by each actor what it ended, by one of a host what is left alone."""
        swept, self._swept = self._swept, sweep.Swept()
        try:
            first = bool(swept.untouched) and sweep.first_to_tell(self._state, self._info.run)
        except OSError:  # a full disk: rather twice than never
            first = True
        return (*swept.ended, *(swept.untouched if first else ()))

    def _measure(self, cell: Cell, evidence: Evidence, spans: list[Span],
                 events: queue.SimpleQueue[Streamed]) -> Outcome:
        evidence.card = self._keeper.conditions()

        def tell(text: str) -> None:
            events.put(Progress(text))

        def emit(tagged: Tagged) -> None:
            table, row = evidence.row(tagged, bench.moment if bench is not None else None)
            events.put(Rows(table, [row]))

        bench: LiveBench | None = None
        bench = LiveBench.prepare(self._workshop, cell, self._card, evidence, spans, emit=emit,
                                  progress=tell, keeper=self._keeper, policy=self._policy)
        if _needs_card(cell):
            self._keeper.ready(self._interpreter(cell, tell), tell)
        outcome: Outcome | None = None
        for event in cell.job.run(bench):
            if isinstance(event, Outcome):
                outcome = event
            else:
                emit(event)
        bench.prove_trees()
        if outcome is None:
            raise InvalidMeasurement(f"job {cell.job.name} ended without an outcome", reason=Reason.MISSING_ROWS)
        return outcome

    def _asked(self, card: Card) -> CardProbe:
        return RealCard(card)

    def _interpreter(self, cell: Cell, progress: Callable[[str], None]) -> Interpreter:
        """What a health probe of this card runs in.  No tree is on its path: it tells of the card alone."""
        marks = {RUN_MARK: self._info.run, CELL_MARK: cell.id, **self._keeper.marks}
        if self._card.kind == "cpu":
            return own_interpreter(marks)
        environment = self._workshop.pins.environment(Pin.from_config(cell.pin.name, cell.pin.config), progress)
        site = environment.site
        env, _ = child_environment(marks, tree=site or self._workshop.root, site=None, caches=self._workshop.root / "health",
                                   card=self._card)
        return Interpreter(environment.python, {**env, "PYTHONPATH": str(site or "")})


def _needs_card(cell: Cell) -> bool:
    """A cell without arms starts nothing on a card, and need not wait for one."""
    return bool(cell.arms) or cell.needs.own_card


def _unsafe(policy: Policy) -> str | None:
    """Why this machine can make no sandbox, where the matrix asks for them: no cell that needs one is sent here."""
    if policy.isolation == "none":
        return None
    try:
        Sandbox.find()
    except FarmError as error:
        return str(error)
    return None


def _ended(measure: Callable[[], Outcome], events: queue.SimpleQueue[Streamed]) -> Outcome:
    """The border of a cell: whatever is raised becomes an outcome."""
    try:
        return measure()
    except FarmError as error:
        return Outcome(error.verdict, error.reason, _with_tail(error))
    except Exception as error:  # a fault of the farm is an ERROR row, never a lost cell
        last = traceback.extract_tb(error.__traceback__)[-1]
        events.put(Progress("".join(traceback.format_exception(error))))
        return Outcome(
            Verdict.ERROR, Reason.FARM_ERROR,
            f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno}); this is a fault of "
            "the farm, please report it with the run's log")


def _end_with(parent: int) -> None:
    """Lifelines are cut with this process, so the supervisors end what it has started."""
    while os.getppid() == parent:
        time.sleep(TETHER_S)
    os._exit(1)


def _with_tail(error: FarmError) -> str:
    tail = getattr(error, "log_tail", "")
    return f"{error}\n{tail}" if tail else str(error)
