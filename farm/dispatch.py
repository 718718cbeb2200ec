"""Cells onto cards: starts one actor per card, asks the scheduler, streams what happens, commits each attempt.

Everything measured comes here and is committed by this one writer: a node
needs no way to the results, and an actor that dies leaves what it had
already sent.  The scheduler alone decides what runs again, so Ray's own
restarts and retries stay at 0.  Seats, actors and nodes are farm.seats' and
farm.nodes' matter: here is what their comings and goings mean for cells.
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
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from farm.attempts import earlier, is_last_word, together
from farm.bench import Card
from farm.cardlog import CardEvent, CardLog
from farm.errors import FarmError, ResultsUnwritable, UsageError
from farm.evidence import Evidence, Policy, RunInfo
from farm.nodes import Node, NodeWatch
from farm.plan import Cell
from farm.quarantine import Quarantine
from farm.records import Outcome, Reason, Verdict
from farm.scheduler import Assignment, Gone, Scheduler, Task
from farm.seats import Closed, Desk, Heard, Lost, Opened, Patience, Seats
from farm.store import Store
from farm.tiers import Claim, claim
from farm.worker import Progress, Rows, Seat, Worker

OBJECT_STORE_BYTES = 200 * 2**20  # only small values travel; vLLM's CPU tier needs /dev/shm more


class Watcher(Protocol):
    """Whoever is told: farm.report.live."""

    def event(self, card: str, cell: str, text: str) -> None: ...
    def finished(self, cell: str, outcome: Outcome) -> None: ...


@dataclass
class _Attempt:
    """What a desk is on, and the rows that have come of it."""

    assignment: Assignment
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


def run_cells(cells: Sequence[Cell], info: RunInfo, store: Store, watcher: Watcher, *, cpu_slots: int, attempts: int,
              cache: str | None, opened: Callable[[], None],
              decided: Mapping[str, Outcome] | None = None, policy: Policy = Policy(),
              patience: Patience = Patience(), foresee: Callable[[Scheduler], None] = lambda _: None) -> dict[str, Outcome]:
    """Run every cell to its final outcome: {cell id: outcome}.  Raises KeyboardInterrupt as it comes.

    `attempts` is how often a cell is tried at most, whatever its ERRORs were: also where a node died under the last one.
    `foresee` is given the schedule when its cards are known and before it begins: to be played through, or arranged anew.
    Attempts are numbered on from those that the run has committed already (a resumed run), which count.  Cells that are
    `decided` before any card was asked (their tree cannot be built) are committed as they are.
    """
    hire = _Hire(Worker, info, cache, policy)
    with NodeWatch(ray.get_runtime_context().get_node_id(), patience.nodes_every_s) as watch:
        watch.look(patience.start_s)  # where Ray does not answer at all, no card is found, and every cell ends so
        seats = Seats(hire, watch, cpu_slots, patience)
        claims = {cell.id: claim(cell, sandboxed=policy.isolation == "bwrap") for cell in cells}
        return _Dispatch(cells, claims, decided or {}, info, store, watcher, attempts, seats).run(opened, foresee)


@dataclass(frozen=True)
class _Hire:
    """Starts the actor of a seat."""

    worker: type[Worker]
    info: RunInfo
    cache: str | None
    policy: Policy

    def __call__(self, seat: Seat, node: Node) -> Any:
        resources = {"num_gpus": 1} if seat.kind == "cuda" else {"num_cpus": min(1.0, max(1.0, node.cpus) / seat.of)}
        return ray.remote(self.worker).options(
            max_restarts=0, max_task_retries=0, max_concurrency=2,  # the second thread says that the actor is alive
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=seat.node, soft=False), **resources,
        ).remote(seat, self.info, self.cache, self.policy)


class _Dispatch:
    def __init__(self, cells: Sequence[Cell], claims: Mapping[str, Claim], decided: Mapping[str, Outcome], info: RunInfo,
                 store: Store, watcher: Watcher, attempts: int, seats: Seats) -> None:
        self._cells: Mapping[str, Cell] = {cell.id: cell for cell in cells}
        self._decided, self._info, self._store, self._watcher, self._seats = decided, info, store, watcher, seats
        self._before = earlier(store.read("cells", info.run).to_pylist())
        self._scheduler = Scheduler(
            [Task(id, cell.needs, tuple(before.card for before in self._before.get(id, ())), claims[id])
             for id, cell in self._cells.items() if id not in decided], attempts)
        self._log = CardLog(store, info.run, lambda card, text: watcher.event(card, "-", text))
        self._attempts: dict[Desk, _Attempt] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._begun = False

    def run(self, opened: Callable[[], None], foresee: Callable[[Scheduler], None]) -> dict[str, Outcome]:
        try:
            self._take(0.0)
            while self._seats.hopeful:
                self._take(1.0)
            foresee(self._scheduler)
            opened()
            self._begun = True
            for cell, outcome in self._decided.items():
                self._close_cell(cell, len(self._before.get(cell, ())) + 1, outcome, final=True)
            while True:
                self._log.save()
                self._assign()
                self._drop_unplaced()
                if self._scheduler.done:
                    return self._outcomes
                self._take(1.0)
        finally:
            self._seats.close()

    def _take(self, timeout_s: float) -> None:
        for event in self._seats.step(timeout_s):
            if isinstance(event, Opened):
                self._welcome(event)
            elif isinstance(event, Heard):
                self._handle(event)
            elif isinstance(event, Lost):
                self._scheduler.remove_card(event.desk.card, Gone(label(event.desk.card), event.why))
                if event.desk in self._attempts:
                    self._end(event.desk, Outcome(Verdict.ERROR, event.reason, f"{label(event.desk.card)}: {event.why}"))
            else:
                self._part(event)

    # --- cards ------------------------------------------------------------------------------------

    def _welcome(self, event: Opened) -> None:
        card = event.desk.card
        if event.standing is not None:
            self._quarantine(event.desk, event.standing)
            return
        self._scheduler.add_card(card, event.desk.host)
        if card.unsafe is not None and any(cell.needs.sandbox for cell in self._cells.values()):  # the others may come to it
            self._note(CardEvent.LEFT_OUT, card, reason=Reason.ISOLATION_MISSING.value, detail=card.unsafe)
        elif not event.again:
            self._note(CardEvent.JOINED if self._begun else CardEvent.READY, card)

    def _quarantine(self, desk: Desk, quarantine: Quarantine) -> None:
        self._seats.rest(desk, quarantine.until_utc)
        self._scheduler.remove_card(desk.card, Gone(label(desk.card), str(quarantine)))
        self._note(CardEvent.QUARANTINED, desk.card, reason=quarantine.reason.value, detail=str(quarantine),
                   until=quarantine.until_utc)

    def _part(self, event: Closed) -> None:
        card, seat = event.card, event.seat
        if card is not None:
            self._scheduler.remove_card(card, Gone(label(card), event.why))
            self._note(CardEvent.LOST, card, detail=event.why)
            return
        name = f"{seat.kind} seat {seat.index + 1}/{seat.of}"
        self._scheduler.miss_card(Gone(f"{name} of {event.node}", event.why), cuda=seat.kind == "cuda")
        self._log.note(CardEvent.LEFT_OUT, None, name, host=event.node.host, detail=event.why)

    def _note(self, event: CardEvent, card: Card, **more: Any) -> None:
        self._log.note(event, card, label(card), host=card.host, **more)

    # --- attempts ---------------------------------------------------------------------------------

    def _assign(self) -> None:
        for desk in self._seats.desks:
            if desk not in self._attempts and (assignment := self._scheduler.next(desk.card.uuid)) is not None:
                self._attempts[desk] = _Attempt(assignment)
                self._watcher.event(label(desk.card), assignment.cell, f"attempt {assignment.attempt}")
                self._seats.give(desk, self._cells[assignment.cell], assignment.attempt)
        waits = dict(self._scheduler.waits())
        for card in [desk.card for desk in self._seats.desks if desk.card.uuid in waits]:
            self._watcher.event(label(card), "-", waits[card.uuid])

    def _handle(self, heard: Heard) -> None:
        desk, event, attempt = heard.desk, heard.event, self._attempts[heard.desk]
        if isinstance(event, Progress):
            self._watcher.event(label(desk.card), attempt.assignment.cell, event.text)
        elif isinstance(event, Rows):
            attempt.rows.setdefault(event.table, []).extend(event.rows)
        elif event is None:
            self._end(desk, Outcome(Verdict.ERROR, Reason.FARM_ERROR, heard.why))
        else:
            desk.stream = None
            if event.quarantine is not None:
                self._quarantine(desk, event.quarantine)
            self._end(desk, event.outcome, event.row)

    def _end(self, desk: Desk, outcome: Outcome, row: dict[str, Any] | None = None) -> None:
        attempt = self._attempts.pop(desk)
        cell = attempt.assignment.cell
        outcome = together(outcome, self._before.get(cell, ()))
        final = self._scheduler.finished(cell, outcome.verdict, outcome.reason)
        self._close_cell(cell, attempt.assignment.attempt, outcome, final=final, row=row, rows=attempt.rows, card=desk.card)
        if not final:
            self._watcher.event(label(desk.card), cell,
                                f"{outcome.reason.value}: {_first_line(outcome.detail)}; will be tried again")

    def _drop_unplaced(self) -> None:
        if self._seats.hopeful:  # a card may come that can run them
            return
        for end in self._scheduler.unplaced():
            self._close_cell(end.cell, end.attempt, Outcome(end.verdict, end.reason, end.why), final=True)

    def _close_cell(self, cell: str, attempt: int, outcome: Outcome, *, final: bool, row: dict[str, Any] | None = None,
                    rows: Mapping[str, list[dict[str, Any]]] | None = None, card: Card | None = None) -> None:
        """Commit an attempt with all its rows; rows that the store refuses make it an ERROR, never a lost cell.

        `final`: this run does not try again.
        """
        facts = {} if card is None else {"card": card.uuid, "card_name": card.name, "host": card.host}
        evidence = Evidence(self._info, self._cells[cell], attempt, card=facts)
        if row is None:  # the worker could not say it itself
            row = evidence.cell_row(outcome, final=final)
        row |= {"final": final and is_last_word(outcome), "verdict": outcome.verdict.value, "reason": outcome.reason.value,
                "detail": outcome.detail}
        try:
            self._store.commit(self._info.run, cell, attempt, {**(rows or {}), "cells": [row]})
        except ResultsUnwritable:
            raise  # the disk refuses, not a row: the run ends, and its resume runs this cell
        except FarmError as error:
            outcome = Outcome(Verdict.ERROR, Reason.FARM_ERROR, f"its rows were refused: {error}")
            self._store.commit(self._info.run, cell, attempt, {"cells": [evidence.cell_row(outcome, final=final)]})
        if final:
            self._outcomes[cell] = outcome
            self._watcher.finished(cell, outcome)


def label(card: Card) -> str:
    """What a line calls a card: two cards of one name must be told apart."""
    return f"{card.name} {card.uuid[-5:]}"


def _first_line(said: object) -> str:
    return next((line.strip() for line in str(said).splitlines() if line.strip()), type(said).__name__)
