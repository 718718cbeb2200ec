"""The Ray actor that owns one card: runs cells on it, one at a time, and streams what happens.

The class itself knows no Ray, so that a test (or a debugger) can drive it in
its own process.  The border of a cell is here: whatever a job raises becomes
the one Outcome of its attempt.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm import campaign, cards
from farm.bench import Card
from farm.errors import FarmError, InvalidMeasurement
from farm.evidence import Evidence, RunInfo, Span
from farm.livebench import LiveBench, Workshop
from farm.places import default_cache
from farm.plan import Cell
from farm.records import Outcome, Reason, Tagged, Verdict


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
    """The attempt's end; `row` is its row of the table `cells`, `final` still to be said by the driver."""

    outcome: Outcome
    row: dict[str, Any]


Streamed = Progress | Rows | Ended


class Worker:
    """One card.  `cache` is the node's folder for pins, trees, models and logs."""

    def __init__(self, seat: Seat, info: RunInfo, cache: str | None) -> None:
        self._card = cards.visible_gpu() if seat.kind == "cuda" else cards.cpu_slot(seat.index, seat.of)
        self._info = info
        self._workshop = Workshop.at(Path(cache) if cache else default_cache())

    def card(self) -> Card:
        return self._card

    def run(self, cell: Cell, attempt: int) -> Iterator[Streamed]:
        """One attempt of a cell.  The last event is always Ended.

        The job runs in a thread of its own, so that a line of progress is on
        its way while a boot or a prefill still lasts.
        """
        events: queue.SimpleQueue[Streamed] = queue.SimpleQueue()
        thread = threading.Thread(target=self._attempt, args=(cell, attempt, events), name=cell.id, daemon=True)
        thread.start()
        while True:
            event = events.get()
            yield event
            if isinstance(event, Ended):
                thread.join()
                return

    def _attempt(self, cell: Cell, attempt: int, events: queue.SimpleQueue[Streamed]) -> None:
        evidence = Evidence(self._info, cell, attempt)
        spans: list[Span] = []
        try:
            outcome = self._measure(cell, evidence, spans, events)
        except FarmError as error:
            outcome = Outcome(error.verdict, error.reason, _with_tail(error))
        except Exception as error:  # the border of a cell: a fault of the farm is an ERROR row, never a lost cell
            last = traceback.extract_tb(error.__traceback__)[-1]
            outcome = Outcome(
                Verdict.ERROR, Reason.FARM_ERROR,
                f"{type(error).__name__}: {error} ({os.path.basename(last.filename)}:{last.lineno}); this is a fault of "
                "the farm, please report it with the run's log")
            events.put(Progress("".join(traceback.format_exception(error))))
        if cell.control is not None:
            outcome = campaign.controlled(outcome, cell.control)
        events.put(Ended(outcome, evidence.cell_row(outcome, spans, final=True)))

    def _measure(self, cell: Cell, evidence: Evidence, spans: list[Span],
                 events: queue.SimpleQueue[Streamed]) -> Outcome:
        evidence.card = cards.conditions(self._card)

        def emit(tagged: Tagged) -> None:
            table, row = evidence.row(tagged, bench.moment if bench is not None else None)
            events.put(Rows(table, [row]))

        bench: LiveBench | None = None
        bench = LiveBench.prepare(self._workshop, cell, self._card, evidence, spans, emit=emit,
                                  progress=lambda text: events.put(Progress(text)))
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


def _with_tail(error: FarmError) -> str:
    tail = getattr(error, "log_tail", "")
    return f"{error}\n{tail}" if tail else str(error)
