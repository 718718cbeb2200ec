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
import re
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console

from farm import campaign, config, dispatch, plan
from farm.bench import Card
from farm.errors import INTERRUPTED_EXIT, USAGE_EXIT, EnvironmentBuildError, SeriesError, UsageError
from farm.evidence import RunInfo, covered_s
from farm.lifeline import processes_of_run
from farm.pins import Pin, PinStore
from farm.places import default_results, usable_cache
from farm.project import project_state
from farm.records import Outcome, Reason, Verdict, exit_code, utc_now
from farm.report.live import Progress
from farm.report.terminal import render_terminal
from farm.schemas import SCHEMA_VERSION
from farm.series import Series, load_series, require_gnu_patch, series_directory
from farm.store import Store
from farm.trees import TreeStore

GONE_S = 9.0  # how long our processes may take to end after an interrupt


@dataclass(frozen=True)
class Request:
    """What was asked on the command line."""

    config: Path
    only: tuple[str, ...] = ()
    results: str | None = None
    resume: str | None = None
    address: str | None = None

    def resumption(self, run: str) -> str:
        """The command that goes on with `run`, what it was asked included."""
        given = {"--only": ",".join(self.only), "--results": self.results, "--address": self.address, "--resume": run}
        called = [sys.argv[0]] if sys.argv[0].endswith("matrix.py") else [sys.argv[0], "matrix"]
        return shlex.join([*called, str(self.config), *(w for k, v in given.items() if v for w in (k, v))])


def main(request: Request, console: Console) -> int:
    """Run a matrix; the return value is the exit code."""
    with _interruptible():
        return _main(request, console)


def _main(request: Request, console: Console) -> int:
    began = time.monotonic()
    try:
        loaded = config.load(request.config, request.only)
        store = Store.open(request.results or default_results())
        planned = preflight(loaded, lambda text: console.print(
            f"{datetime.now():%H:%M:%S} [preflight] {text}", highlight=False, markup=False, soft_wrap=True))
        dispatch.probe(request.address)
        run, done = _run_id(loaded.matrix.name, request.resume, store, planned.cells)
    except UsageError as error:
        console.print(f"farm: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return USAGE_EXIT
    except EnvironmentBuildError as error:
        console.print(f"farm: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return exit_code([error.verdict])
    info = RunInfo(run, *project_state(loaded.series_root), series=str(loaded.series_root))
    return _Run(request, loaded, store, info, console, began).execute(planned, done)


@dataclass(frozen=True)
class Planned:
    """The cells of a run, and the outcomes of those that are decided before any card is asked."""

    cells: list[plan.Cell]
    decided: Mapping[str, Outcome]


def preflight(loaded: config.Loaded, say: Callable[[str], None]) -> Planned:
    """All that can be known wrong before a card is touched; what comes back are the cells to run.

    The pristine package of each pin is fetched (its environment is not), and the tree of every arm is built here once.
    A tree that cannot be built refuses the run, or with `on_series_error: fail` makes its cells FAIL.
    Raises UsageError (series, patch, pin, GNU patch), EnvironmentBuildError (network).
    """
    require_gnu_patch()
    cache = usable_cache()
    pins, trees = PinStore(cache), TreeStore(cache)
    wanted = {pin for cell in loaded.cells for pin in (cell.config.pins or loaded.matrix.pins)}
    series: dict[str, Series] = {
        name: load_series(series_directory(loaded.series_root, loaded.pins[name].version)) for name in sorted(wanted)
    }
    cells = plan.cells(loaded, series, read_tests(loaded.series_root))
    decided: dict[str, Outcome] = {}
    for name in sorted(wanted):
        pin = Pin.from_config(name, loaded.pins[name], file=loaded.pin_files[name])
        pristine = pins.pristine(pin, say)
        for version in _test_versions(cells, name):
            pins.sdist(version, pin, say)
        mine = [cell for cell in cells if cell.pin.name == name]
        for patches in {arm.patches for cell in mine for arm in cell.arms}:
            try:
                trees.build(pristine, patches)
            except SeriesError as error:
                if loaded.matrix.on_series_error == "refuse":
                    raise
                say(f"{name}: {error}")
                broken = Outcome(Verdict.FAIL, Reason.SERIES_BROKEN, f"its tree cannot be built: {error}")
                decided |= {cell.id: campaign.controlled(broken, cell.control) if cell.control else broken
                            for cell in mine if any(arm.patches == patches for arm in cell.arms)}
    return Planned(cells, decided)


def _test_versions(cells: Sequence[plan.Cell], pin: str) -> set[str]:
    """Releases whose own tests the cells of a pin want: from their sdists, which a registry may not have."""
    suites = [(cell, suite) for cell in cells if cell.pin.name == pin for suite in getattr(cell.job, "suites", ())]
    wanted = {cell.pin.config.version for cell, suite in suites if suite.source != "series"}
    return wanted | {suite.version for _, suite in suites if suite.source == "newer" and suite.version}


def read_tests(series_root: Path) -> dict[str, bytes]:
    """The regression tests beside a series (`tests/`), by path relative to that folder."""
    root = series_root / "tests"
    return {str(f.relative_to(root)): f.read_bytes() for f in sorted(root.rglob("*")) if f.is_file()
            and "__pycache__" not in f.parts}


class _Run:
    """One execution: opens its row in `runs`, dispatches, and closes the row whatever happens."""

    def __init__(self, request: Request, loaded: config.Loaded, store: Store, info: RunInfo, console: Console,
                 began: float) -> None:
        self._request, self._loaded, self._store, self._info = request, loaded, store, info
        self._console, self._began, self._opened, self._before_s = console, began, utc_now(), 0.0
        for row in store.read("runs", info.run).to_pylist():  # a resumed run goes on where it was
            self._opened, self._before_s = row["started_utc"], row["wall_s"] or 0.0

    def execute(self, planned: Planned, done: Mapping[str, Verdict]) -> int:
        cells = [cell for cell in planned.cells if cell.id not in done]
        self._console.print(f"run {self._info.run}: {len(cells)} cells, series {self._info.series}, results in "
                            f"{self._store.root}", highlight=False, markup=False, soft_wrap=True)
        promised = len(planned.cells)
        self._write("running", None, promised)
        watcher = Progress(self._console)
        try:
            with _closing(watcher):
                outcomes = self._dispatch(cells, planned.decided, watcher) if cells else {}
        except (KeyboardInterrupt, SystemExit):  # SystemExit: Ray's own handler of SIGTERM while it starts
            return self._interrupted(promised)
        except BaseException:
            self._write("failed", exit_code([Verdict.ERROR]), promised)
            raise
        code = exit_code([*(o.verdict for o in outcomes.values()), *done.values()])
        standing = self._campaign(planned.cells)
        if standing not in (None, campaign.VALID):
            code = exit_code([Verdict.INVALID])  # a FAIL is no evidence either
        self._write("finished", code, promised, standing)
        self._store.compact(self._info.run)
        render_terminal(self._store, self._info.run, self._console)
        return code

    def _campaign(self, cells: Sequence[plan.Cell]) -> str | None:
        ended = {row["cell"]: Reason(row["reason"]) for row in self._store.read("cells", self._info.run).to_pylist()
                 if row["final"]}
        return campaign.verdict([(cell.id, ended.get(cell.id)) for cell in cells if cell.control is not None],
                                wanted=self._loaded.matrix.campaign)

    def _dispatch(self, cells: Sequence[plan.Cell], decided: Mapping[str, Outcome], watcher: Progress) -> dict[str, Outcome]:
        matrix = self._loaded.matrix
        with dispatch.attached(self._request.address), _interruptible():  # again: Ray sets a handler of its own

            def opened(cards: Sequence[Card]) -> None:
                watcher.start([cell.id for cell in cells])
                for card in cards:
                    watcher.event(dispatch.label(card), "-", f"ready on {card.host} ({card.uuid})")

            return dispatch.run_cells(cells, self._info, self._store, watcher, cpu_slots=matrix.cards.cpu_slots,
                                      attempts=matrix.attempts, cache=os.environ.get("FARM_CACHE"), opened=opened,
                                      decided={cell.id: decided[cell.id] for cell in cells if cell.id in decided})

    def _interrupted(self, cells: int) -> int:
        left = _wait_gone(self._info.run)
        self._write("interrupted", INTERRUPTED_EXIT, cells)
        self._console.print(
            f"interrupted; finished cells are in {self._store.root}. Go on with: {self._request.resumption(self._info.run)}",
            highlight=False, markup=False, soft_wrap=True)
        if left:
            self._console.print(f"still running and ours: processes {', '.join(map(str, left))}", style="red")
        return INTERRUPTED_EXIT

    def _write(self, status: str, code: int | None, cells: int, standing: str | None = None) -> None:
        spans = [(s["started_utc"], s["ended_utc"]) for row in self._store.read("cells", self._info.run).to_pylist()
                 for s in row["spans"] or []]
        self._store.commit_run(self._info.run, {
            "schema_version": SCHEMA_VERSION, "run": self._info.run, "cell": "", "attempt": 0,
            "started_utc": self._opened, "ended_utc": None if code is None else utc_now(),
            "project_commit": self._info.project_commit, "project_dirty": self._info.project_dirty,
            "name": self._loaded.matrix.name, "status": status, "exit_code": code, "command": list(sys.argv),
            "config": self._loaded.source.path.read_text(encoding="utf-8"), "cells": cells,
            "campaign": standing,
            "wall_s": self._before_s + time.monotonic() - self._began, "vllm_s": covered_s(spans),
        })


def _run_id(name: str, resume: str | None, store: Store, cells: Sequence[plan.Cell]) -> tuple[str, dict[str, Verdict]]:
    """A new run's id, or the resumed one's with the final verdicts that it has already."""
    if resume is None:
        return f"{name}-{utc_now():%Y%m%dT%H%M%S}-{secrets.token_hex(2)}", {}
    if not re.fullmatch(r"[A-Za-z0-9._-]+", resume) or resume not in store.runs():
        raise UsageError(f"--resume {resume}: no such run in {store.root}; see: farm runs")
    final = {row["cell"]: Verdict(row["verdict"]) for row in store.read("cells", resume).to_pylist() if row["final"]}
    if strange := sorted(set(final) - {cell.id for cell in cells}):
        raise UsageError(
            f"--resume {resume}: the configuration or a patch has changed since, cell {strange[0]} is not in this "
            "matrix any more; start a new run")
    return resume, final


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM (`ray job stop`) ends a run as Ctrl-C does.  Ray sets its own handler in between: entered twice."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _closing(watcher: Progress) -> Iterator[None]:
    try:
        yield
    finally:
        watcher.close()


def _wait_gone(run: str) -> list[int]:
    """Wait until nothing that carries the run's mark is left on this machine; the pids that are left after all."""
    deadline = time.monotonic() + GONE_S
    while (left := processes_of_run(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


if __name__ == "__main__":
    from farm.cli import matrix_entry

    matrix_entry()
