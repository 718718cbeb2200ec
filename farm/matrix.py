#!/usr/bin/env python3
"""The entry point: load → preflight → plan → dispatch → report → exit code.

    farm matrix configs/matrix/premerge.yaml
    ray job submit --working-dir . -- farm/matrix.py configs/matrix/premerge.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run by path: this folder must not shadow other modules, its parent holds the packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rich.console import Console

from farm import campaign, config, dispatch, estimate, plan, rearm, resumption, runs
from farm.attempts import is_last_word
from farm.cards import local_cards
from farm.drivers import Driver, driving
from farm.errors import INTERRUPTED_EXIT, USAGE_EXIT, EnvironmentBuildError, ResultsUnwritable, UsageError
from farm.evidence import Policy, RunInfo, covered_s
from farm.guard import guarded
from farm.interrupts import Interrupts
from farm.lifeline import processes_of_run
from farm.places import default_results
from farm.preflight import Planned, preflight
from farm.project import project_state
from farm.promised import promise
from farm.records import Outcome, Reason, Verdict, exit_code, utc_now
from farm.report.live import Progress
from farm.report.terminal import render_terminal
from farm.resumption import Beginning
from farm.scheduler import Scheduler
from farm.schemas import SCHEMA_VERSION
from farm.store import Store

GONE_S = 9.0  # how long our processes may take to end after an interrupt
RULES = {"campaign", "isolation", "on_series_error"}  # keys of a matrix that bear on every verdict and on no cell's id


@dataclass(frozen=True)
class Request:
    """What was asked on the command line."""

    config: Path
    only: tuple[str, ...] = ()
    results: str | None = None
    resume: str | None = None
    address: str | None = None
    take_over: bool = False
    arms: tuple[str, ...] = ()  # instead of the matrix's own (farm.rearm)

    def resumption(self, run: str) -> str:
        """The command that goes on with `run`, what it was asked included."""
        given = {"--only": ",".join(self.only), "--arms": ",".join(self.arms), "--results": self.results,
                 "--address": self.address, "--resume": run}
        called = [sys.argv[0]] if sys.argv[0].endswith("matrix.py") else ["farm", "matrix"]
        return shlex.join([*called, str(self.config), *(w for k, v in given.items() if v for w in (k, v))])


def main(request: Request, console: Console) -> int:
    """Run a matrix; the return value is the exit code."""
    with Interrupts() as interrupts:
        try:
            return _main(request, console, interrupts)
        except UsageError as error:
            _say(console, f"farm: {error}", "red")
            return USAGE_EXIT
        except EnvironmentBuildError as error:
            _say(console, f"farm: {error}", "red")
            return exit_code([error.verdict])


def _main(request: Request, console: Console, interrupts: Interrupts) -> int:
    began = time.monotonic()
    if request.take_over and request.resume is None:
        raise UsageError("--take-over goes with --resume RUN: it is a run that is taken over; see farm runs")
    loaded = config.load(request.config, request.only, request.arms)
    if request.arms:
        _say(console, rearm.words(request.arms))
    store = Store.open(request.results or default_results())
    if request.resume is not None:
        request = replace(request, resume=runs.meant(store, request.resume))
        resumption.refuse(store, request.resume, take_over=request.take_over)

    def promised(cells: Sequence[plan.Cell]) -> str:
        return promise(cells, request.only, loaded.matrix.model_dump(include=RULES))

    def refuse_changed(cells: Sequence[plan.Cell]) -> None:
        if request.resume is not None:
            resumption.unchanged(store, request.resume, promised(cells))

    planned = preflight(loaded, lambda text: _say(console, f"{datetime.now():%H:%M:%S} [preflight] {text}"),
                        None if request.address or os.environ.get("RAY_ADDRESS") else local_cards(), refuse_changed)
    dispatch.probe(request.address)
    commit, dirty = project_state(loaded.series_root)
    run = request.resume or resumption.new_id(loaded.matrix.name)
    with driving(store, run):
        promises = promised(planned.cells)
        beginning = resumption.resumed(store, run, promises, commit) if request.resume else Beginning(run)
        info = RunInfo(run, commit, dirty, series=str(loaded.series_root))
        return _Run(request, loaded, store, info, console, began, beginning, promises, interrupts).execute(planned)


class _Run:
    """One execution: opens its row in `runs`, dispatches, and closes the row whatever happens."""

    def __init__(self, request: Request, loaded: config.Loaded, store: Store, info: RunInfo, console: Console,
                 began: float, beginning: Beginning, promised: str, interrupts: Interrupts) -> None:
        self._request, self._loaded, self._store, self._info = request, loaded, store, info
        self._console, self._began, self._beginning, self._promised = console, began, beginning, promised
        self._interrupts, self._estimate_s = interrupts, None
        self._config = loaded.source.path.read_text(encoding="utf-8")  # now: it may be edited while the run lasts

    def execute(self, planned: Planned) -> int:
        done = self._beginning.done
        cells = [cell for cell in planned.cells if cell.id not in done]
        if self._beginning.finished and not cells:
            return self._again(planned.cells)
        self._say(f"run {self._info.run}: {len(cells)} cells, series {self._info.series}, results in {self._store.root}")
        if self._beginning.note:
            self._say(self._beginning.note)
        promised = len(planned.cells)
        watcher = Progress(self._console)
        try:
            self._write("running", None, promised)
            with _closing(watcher):
                outcomes = self._dispatch(cells, planned.decided, watcher) if cells else {}
            code = exit_code([*(o.verdict for o in outcomes.values()), *done.values()])
            standing = self._campaign(planned.cells)
            if standing not in (None, campaign.VALID):
                code = exit_code([Verdict.INVALID])  # a FAIL is no evidence either
            self._write("finished", code, promised, standing)
        except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's own handler of SIGTERM while it starts
            return self._interrupted(promised)
        except ResultsUnwritable as error:
            return self._unwritable(error, promised)
        except BaseException:
            with contextlib.suppress(ResultsUnwritable):
                self._write("failed", exit_code([Verdict.ERROR]), promised)
            raise
        try:
            self._render()
        except KeyboardInterrupt:
            self._say(f"interrupted; the run itself is finished: farm report {self._info.run}")
            return INTERRUPTED_EXIT
        if wanting := sum(not is_last_word(outcome) for outcome in outcomes.values()):
            self._say(f"{wanting} of {promised} cells found no card that can be used, and have no final verdict. When one is "
                      f"there, go on with: {self._request.resumption(self._info.run)}")
        return code

    def _again(self, cells: Sequence[plan.Cell]) -> int:
        """A resume of a run that has all that it promised."""
        self._say(f"run {self._info.run} is finished, all {len(cells)} cells are committed; nothing is run")
        self._render()
        return next((row["exit_code"] for row in self._store.read("runs", self._info.run).to_pylist()), None) or 0

    def _render(self) -> None:
        try:
            self._store.compact(self._info.run)
        except ResultsUnwritable as error:  # its files are as good as one file
            self._say(f"note: not compacted: {error}")
        render_terminal(self._store, self._info.run, self._console)

    def _campaign(self, cells: Sequence[plan.Cell]) -> str | None:
        rows = self._store.read("cells", self._info.run).to_pylist()
        ended = {row["cell"]: Reason(row["reason"]) for row in sorted(rows, key=lambda row: row["attempt"]) if row["reason"]}
        if set(ended.values()) == {Reason.NEEDS_UNMET}:
            return None  # all skipped: there is no verdict that a control would have to hold up
        return campaign.verdict([(cell.id, ended.get(cell.id)) for cell in cells if cell.control is not None],
                                wanted=self._loaded.matrix.campaign)

    def _dispatch(self, cells: Sequence[plan.Cell], decided: Mapping[str, Outcome], watcher: Progress) -> dict[str, Outcome]:
        matrix = self._loaded.matrix
        own = not (self._request.address or os.environ.get("RAY_ADDRESS"))
        guard = guarded() if own else contextlib.nullcontext()
        ours = self._interrupts  # twice: Ray sets handlers of its own when it starts and when it ends
        with ours.kept(), guard, dispatch.attached(self._request.address), ours:
            return dispatch.run_cells(cells, self._info, self._store, watcher, cpu_slots=matrix.cards.cpu_slots,
                                      attempts=matrix.attempts, cache=os.environ.get("FARM_CACHE"),
                                      opened=lambda: watcher.start([cell.id for cell in cells]), policy=_policy(matrix),
                                      decided={cell.id: decided[cell.id] for cell in cells if cell.id in decided},
                                      foresee=lambda scheduler: self._foresee(scheduler, cells))

    def _foresee(self, scheduler: Scheduler, cells: Sequence[plan.Cell]) -> None:
        recalled = estimate.recalled(self._store, [cell.id for cell in cells])
        took = {cell.id: recalled.seconds(cell.id, cell.job.name, cell.profile) for cell in cells}
        forecast = estimate.forecast(scheduler, {cell: seconds for cell, seconds in took.items() if seconds is not None})
        if forecast.order is not None:
            scheduler.arrange(forecast.order)
        self._say(forecast.words)
        self._estimate_s = forecast.estimate_s

    def _interrupted(self, cells: int) -> int:
        with contextlib.suppress(ResultsUnwritable):
            self._write("interrupted", INTERRUPTED_EXIT, cells)  # first: `ray job stop` kills after 3 s
        self._say(f"interrupted; finished cells are in {self._store.root}. Go on with: "
                  f"{self._request.resumption(self._info.run)}")
        if left := _wait_gone(self._info.run):
            self._say(f"still running and ours: processes {', '.join(map(str, left))}", "red")
        return INTERRUPTED_EXIT

    def _unwritable(self, error: ResultsUnwritable, cells: int) -> int:
        with contextlib.suppress(ResultsUnwritable):  # a row that cannot be closed is found to have lost its driver
            self._write("failed", exit_code([Verdict.ERROR]), cells)
        self._say(f"farm: {error}. Then go on with: {self._request.resumption(self._info.run)}", "red")
        return exit_code([Verdict.ERROR])

    def _say(self, text: str, style: str = "") -> None:
        _say(self._console, text, style)

    def _write(self, status: str, code: int | None, cells: int, standing: str | None = None) -> None:
        spans = [(s["started_utc"], s["ended_utc"]) for row in self._store.read("cells", self._info.run).to_pylist()
                 for s in row["spans"] or []]
        self._store.commit_run(self._info.run, {
            "schema_version": SCHEMA_VERSION, "run": self._info.run, "cell": "", "attempt": 0,
            "started_utc": self._beginning.opened, "ended_utc": None if code is None else utc_now(),
            "project_commit": self._info.project_commit, "project_dirty": self._info.project_dirty,
            "name": self._loaded.matrix.name, "status": status, "exit_code": code, "command": list(sys.argv),
            "config": self._config, "cells": cells,
            "campaign": standing, "process": str(Driver.here()), "host": Driver.here().host, "plan": self._promised,
            "estimate_s": self._estimate_s,
            "wall_s": self._beginning.before_s + time.monotonic() - self._began, "vllm_s": covered_s(spans),
        })


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _closing(watcher: Progress) -> Iterator[None]:
    try:
        yield
    finally:
        watcher.close()


def _policy(matrix: config.MatrixConfig) -> Policy:
    cards = matrix.cards
    return Policy(cards.busy_wait_s, cards.quarantine_after, cards.quarantine_s, matrix.isolation)


def _wait_gone(run: str) -> list[int]:
    """Wait until nothing that carries the run's mark is left on this machine; the pids that are left after all."""
    deadline = time.monotonic() + GONE_S
    while (left := processes_of_run(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


if __name__ == "__main__":
    from farm.cli import matrix_entry

    matrix_entry()
