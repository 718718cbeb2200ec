"""Cells onto cards: starts one actor per card, asks the scheduler, streams what happens, commits each attempt.

Everything measured comes here and is committed by this one writer: a node
needs no way to the results, and an actor that dies leaves what it had
already sent.  The scheduler alone decides what runs again, so Ray's own
restarts and retries stay at 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farm.bench import Card
from farm.errors import FarmError, UsageError
from farm.evidence import Evidence, RunInfo
from farm.plan import Cell
from farm.records import Outcome, Reason, Verdict
from farm.scheduler import Assignment, Scheduler, Task
from farm.store import Store
from farm.worker import Ended, Progress, Rows, Seat, Worker

START_S = 120.0  # an actor on a fresh node imports Ray, pyarrow and the farm first
OBJECT_STORE_BYTES = 200 * 2**20  # only small values travel; vLLM's CPU tier needs /dev/shm more


class Watcher(Protocol):
    """Whoever is told: farm.report.live."""

    def event(self, card: str, cell: str, text: str) -> None: ...
    def finished(self, cell: str, outcome: Outcome) -> None: ...


@dataclass
class _Desk:
    """A seat with its actor, and the attempt it is on."""

    seat: Seat
    actor: Any
    card: Card
    assignment: Assignment | None = None
    stream: Any = None
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


@contextlib.contextmanager
def attached(address: str | None) -> Iterator[None]:
    """Ray: the cluster at `address` (or RAY_ADDRESS), else one of our own in this process's care."""
    address = address or os.environ.get("RAY_ADDRESS")
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        # Ray gives its workers niceness 15, which servers and tests would inherit.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(address="local", include_dashboard=False, log_to_driver=False, configure_logging=True,
                 logging_level="ERROR", object_store_memory=OBJECT_STORE_BYTES)
    try:
        yield
    finally:
        ray.shutdown()


def probe(address: str | None) -> None:
    """Raise UsageError where a cluster is named and nothing answers there: Ray itself would wait for minutes."""
    address = address or os.environ.get("RAY_ADDRESS")
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]/]+?)\]?:(\d+)", address or "")
    if match is None:  # none, or a word like `auto`
        return
    try:
        socket.create_connection((match[1], int(match[2])), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no Ray cluster answers at {address} ({error}); start one with ray start --head, or leave "
                         "--address and RAY_ADDRESS away for one of the farm's own") from error


def seats(cpu_slots: int) -> list[Seat]:
    """One seat per GPU of each node; on a node without any, `cpu_slots` CPU slots."""
    found = []
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        gpus = int(node["Resources"].get("GPU", 0))
        kind, count = ("cuda", gpus) if gpus else ("cpu", cpu_slots)
        found += [Seat(node["NodeID"], kind, index, count) for index in range(count)]
    return found


def run_cells(cells: Sequence[Cell], info: RunInfo, store: Store, watcher: Watcher, *, cpu_slots: int, attempts: int,
              cache: str | None, opened: Callable[[Sequence[Card]], None],
              decided: Mapping[str, Outcome] | None = None) -> dict[str, Outcome]:
    """Run every cell to its final outcome: {cell id: outcome}.  Raises KeyboardInterrupt as it comes.

    Attempts are numbered on from those that the run has committed already (a resumed run).  Cells that are `decided`
    before any card was asked (their tree cannot be built) are committed as they are.
    """
    return _Dispatch(cells, info, store, watcher, attempts, cache, decided or {}).run(seats(cpu_slots), opened)


class _Dispatch:
    def __init__(self, cells: Sequence[Cell], info: RunInfo, store: Store, watcher: Watcher, attempts: int,
                 cache: str | None, decided: Mapping[str, Outcome]) -> None:
        self._decided = decided
        self._cells: Mapping[str, Cell] = {cell.id: cell for cell in cells}
        self._scheduler = Scheduler([Task(cell.id, cell.needs) for cell in cells if cell.id not in decided], attempts)
        self._info, self._store, self._watcher, self._cache = info, store, watcher, cache
        self._desks: list[_Desk] = []
        self._outcomes: dict[str, Outcome] = {}
        self._committed: dict[str, int] = {}  # highest attempt of an earlier life of this run
        for cell, attempt in store.committed(info.run):
            self._committed[cell] = max(attempt, self._committed.get(cell, 0))

    def run(self, seats: Sequence[Seat], opened: Callable[[Sequence[Card]], None]) -> dict[str, Outcome]:
        try:
            self._open(seats)
            opened([desk.card for desk in self._desks])
            for cell, outcome in self._decided.items():
                self._close_cell(cell, 1, outcome, final=True)
            for cell, why in self._scheduler.unrunnable():
                self._close_cell(cell, 1, Outcome(Verdict.SKIP, Reason.NEEDS_UNMET, why), final=True)
            while not self._scheduler.done:
                self._assign()
                self._abandon_stranded()
                self._take(timeout_s=1.0)
            return self._outcomes
        finally:
            for desk in self._desks:
                ray.kill(desk.actor)

    # --- cards ------------------------------------------------------------------------------------

    def _open(self, seats: Sequence[Seat]) -> None:
        """Start an actor per seat; a seat that does not answer is told and left out."""
        started = [(seat, self._start(seat)) for seat in seats]
        for seat, actor in started:
            try:
                card = ray.get(actor.card.remote(), timeout=START_S)
            except (RayError, GetTimeoutError) as error:
                self._watcher.event(f"{seat.kind}{seat.index}", "-", f"seat left out: {_first_line(error)}")
                ray.kill(actor)
                continue
            self._desks.append(_Desk(seat, actor, card))
            self._scheduler.add_card(card)

    def _start(self, seat: Seat) -> Any:
        cpus = max(1.0, _cpus(seat.node))
        resources = {"num_gpus": 1} if seat.kind == "cuda" else {"num_cpus": min(1.0, cpus / seat.of)}
        return ray.remote(Worker).options(
            max_restarts=0, max_task_retries=0, max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=seat.node, soft=False), **resources,
        ).remote(seat, self._info, self._cache)

    def _replace(self, desk: _Desk) -> None:
        """A new actor for a seat whose actor died; the card is the same."""
        self._scheduler.remove_card(desk.card.uuid)
        self._desks.remove(desk)
        self._open([desk.seat])

    # --- attempts ---------------------------------------------------------------------------------

    def _assign(self) -> None:
        for desk in self._desks:
            if desk.assignment is None and (assignment := self._scheduler.next(desk.card.uuid)) is not None:
                desk.assignment, desk.rows = assignment, {}
                attempt = self._number(assignment.cell, assignment.attempt)
                self._watcher.event(label(desk.card), assignment.cell, f"attempt {attempt}")
                desk.stream = desk.actor.run.options(num_returns="streaming").remote(
                    self._cells[assignment.cell], attempt)

    def _take(self, timeout_s: float) -> None:
        """Wait for the next event of any card, and take what has come."""
        busy = {desk.stream: desk for desk in self._desks if desk.stream is not None}
        if not busy:
            return
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=timeout_s, fetch_local=True)
        for stream in ready:
            desk = busy[stream]
            try:
                self._handle(desk, ray.get(next(stream)))
            except StopIteration:  # the generator ended without Ended: the worker broke its own contract
                self._end(desk, Outcome(Verdict.ERROR, Reason.FARM_ERROR, "the worker ended without an outcome"))
            except RayActorError as error:
                self._end(desk, Outcome(
                    Verdict.ERROR, Reason.ACTOR_DIED,
                    f"the actor on {label(desk.card)} died: {_first_line(error)}"))
                self._replace(desk)
            except RayError as error:
                self._end(desk, Outcome(Verdict.ERROR, Reason.FARM_ERROR, _first_line(error)))

    def _handle(self, desk: _Desk, event: Progress | Rows | Ended) -> None:
        assert desk.assignment is not None
        if isinstance(event, Progress):
            self._watcher.event(label(desk.card), desk.assignment.cell, event.text)
        elif isinstance(event, Rows):
            desk.rows.setdefault(event.table, []).extend(event.rows)
        else:
            self._end(desk, event.outcome, event.row)

    def _end(self, desk: _Desk, outcome: Outcome, row: dict[str, Any] | None = None) -> None:
        assignment, desk.assignment, desk.stream = desk.assignment, None, None
        assert assignment is not None
        final = self._scheduler.finished(assignment.cell, outcome.verdict, outcome.reason)
        self._close_cell(assignment.cell, assignment.attempt, outcome, final=final, row=row, rows=desk.rows, desk=desk)
        if not final:
            self._watcher.event(label(desk.card), assignment.cell,
                                f"{outcome.reason.value}: {_first_line(outcome.detail)}; will be tried again")
        desk.rows = {}

    def _abandon_stranded(self) -> None:
        for cell in self._scheduler.stranded():
            self._close_cell(cell, 1, Outcome(Verdict.ERROR, Reason.NO_CARD, "no card is left to run it on"),
                             final=True)

    def _close_cell(self, cell: str, attempt: int, outcome: Outcome, *, final: bool, row: dict[str, Any] | None = None,
                    rows: Mapping[str, list[dict[str, Any]]] | None = None, desk: _Desk | None = None) -> None:
        """Commit an attempt with all its rows; rows that the store refuses make it an ERROR, never a lost cell."""
        number = self._number(cell, attempt)
        card = {} if desk is None else {"card": desk.card.uuid, "card_name": desk.card.name, "host": desk.card.host}
        evidence = Evidence(self._info, self._cells[cell], number, card=card)
        if row is None:  # the worker could not say it itself
            row = evidence.cell_row(outcome, final=final)
        try:
            self._store.commit(self._info.run, cell, number, {**(rows or {}), "cells": [row | {"final": final}]})
        except FarmError as error:
            outcome = Outcome(Verdict.ERROR, Reason.FARM_ERROR, f"its rows were refused: {error}")
            self._store.commit(self._info.run, cell, number, {"cells": [evidence.cell_row(outcome, final=final)]})
        if final:
            self._outcomes[cell] = outcome
            self._watcher.finished(cell, outcome)

    def _number(self, cell: str, attempt: int) -> int:
        return self._committed.get(cell, 0) + attempt


def label(card: Card) -> str:
    """What a line calls a card: two cards of one name must be told apart."""
    return f"{card.name} {card.uuid[-5:]}"


def _cpus(node: str) -> float:
    return next((float(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["NodeID"] == node), 0.0)


def _first_line(said: object) -> str:
    return next((line.strip() for line in str(said).splitlines() if line.strip()), type(said).__name__)
