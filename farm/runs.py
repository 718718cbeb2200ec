"""The runs of a results root as `farm runs` lists them: how each stands, how far it is, and how to go on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.text import Text

from farm.drivers import RUNNING, Driver, Standing, standing
from farm.errors import UsageError
from farm.places import default_results
from farm.store import Store
from farm.tables import print_table

COLUMNS = ("run", "status", "exit", "cells", "age", "wall s")
LISTED = 5  # commands to go on below the table: of the newest runs that want one
UNKNOWN = "row unreadable"


@dataclass(frozen=True)
class RunLine:
    """One run.  `status`: running, running (on HOST), interrupted, finished, failed, or that its row cannot be read."""

    run: str
    status: str
    exit_code: int | None
    done: int  # cells with a committed attempt that is final; of a finished run the others wanted a card
    promised: int | None
    started: datetime | None
    age_s: float | None  # since it was started first
    wall_s: float | None  # of all its lives so far
    go_on: str | None  # the command, where something is left to run and nobody is at it

    @property
    def cells(self) -> str:
        return f"{self.done} of {'?' if self.promised is None else self.promised}"


def meant(store: Store, run: str) -> str:
    """The id that a user means: `last` is the newest run of the root.  Raises UsageError where there is none."""
    known = store.runs()  # also one whose own row is damaged
    if not known:
        raise UsageError(f"no run in {store.root}; start one with: farm matrix configs/matrix/smoke-cpu.yaml")
    if run == "last":
        begun = {row["run"]: row["started_utc"] for row in store.read("runs").to_pylist() if row["started_utc"]}
        return max(begun, key=begun.__getitem__) if begun else known[-1]
    if run not in known:
        raise UsageError(f"no run {run!r} in {store.root}; see: farm runs")
    return run


def lines(store: Store, now: datetime | None = None) -> list[RunLine]:
    """Every run of a root, the oldest first; those whose row is damaged stand before them."""
    now = now or datetime.now(timezone.utc)
    rows = {row["run"]: row for row in store.read("runs").to_pylist()}
    found = [_line(store, run, rows.get(run, {}), now) for run in store.runs()]
    return sorted(found, key=lambda line: (line.started is not None, line.started or now, line.run))


def status(store: Store, run: str, row: Mapping[str, Any]) -> str:
    """How a run stands: a row that says `running` is as true as its process is alive."""
    if not row or row.get("status") is None:
        return UNKNOWN
    if row["status"] != RUNNING:
        return row["status"]
    driver = Driver.parse(row.get("process"))
    seen = standing(store, run, row)
    if seen is Standing.ELSEWHERE and driver is not None:
        return f"{RUNNING} (on {driver.host})"
    return RUNNING if seen is Standing.ALIVE else "interrupted"


def print_runs(console: Console, found: Sequence[RunLine]) -> None:
    """A table, and below it the commands that go on; in a pipe these are a column, and when it started another."""
    rows = [(r.run, r.status, r.exit_code, r.cells, None if r.age_s is None else _age(r.age_s),
             None if r.wall_s is None else round(r.wall_s)) for r in found]
    if not console.is_terminal:
        more = [(r.started and f"{r.started:%FT%TZ}", r.go_on) for r in found]
        print_table(console, (*COLUMNS, "started", "go on with"), [a + b for a, b in zip(rows, more, strict=True)])
        return
    print_table(console, COLUMNS, rows)
    for line in [r for r in found if r.go_on][-LISTED:]:
        console.print(Text(f"go on with: {line.go_on}"), soft_wrap=True)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _line(store: Store, run: str, row: Mapping[str, Any], now: datetime) -> RunLine:
    stands = status(store, run, row)
    final = {r["cell"] for r in store.read("cells", run).to_pylist() if r["final"]}
    started, wall_s = row.get("started_utc"), row.get("wall_s")
    age_s = None if started is None else (now - started).total_seconds()
    over = stands.startswith(RUNNING) or (stands == "finished" and len(final) >= (row.get("cells") or 0))
    command = [word for word in row.get("command") or () if word] or ["farm", "matrix", "CONFIG"]
    return RunLine(run, stands, row.get("exit_code"), len(final), row.get("cells"), started, age_s, wall_s,
                   None if over else resumption(command, run, store.root))


def resumption(command: Sequence[str], run: str, root: str) -> str:
    """The command line that goes on with a run, from the one that it was started or last resumed with.

    It names the results' `root` where that is not the default here: the run may have had another environment.
    """
    words, kept = list(command), []
    words[:1] = [words[0]] if words[0].endswith("matrix.py") else ["farm"]
    rest = iter(words)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith("--resume=") and word != "--take-over":
            kept.append(word)
    named = any(word.partition("=")[0] == "--results" for word in kept)
    kept += [] if named or root == default_results() else ["--results", root]
    return shlex.join([*kept, "--resume", run])
