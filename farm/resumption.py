"""Where a run begins: anew, or where an earlier life of it was cut off."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from farm.drivers import Driver, Standing, standing
from farm.errors import UsageError
from farm.evidence import covered_s
from farm.promised import differences, listed, promised_cells
from farm.records import Verdict, utc_now
from farm.store import Store


@dataclass(frozen=True)
class Beginning:
    """A run's id, and what it has already."""

    run: str
    done: Mapping[str, Verdict] = field(default_factory=dict)  # final verdicts by cell
    opened: datetime = field(default_factory=utc_now)
    before_s: float = 0.0  # wall time of earlier lives
    finished: bool = False
    note: str | None = None  # what a reader of its rows should know


def new_id(name: str) -> str:
    """Of a run of a matrix of this name."""
    return f"{name}-{utc_now():%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"


def refuse(store: Store, run: str, *, take_over: bool = False) -> None:
    """Raise UsageError where a process drives the run, or where one that cannot be seen from here may; `take_over`: it was
    looked at, and is gone."""
    row = _row(store, run)
    driver = Driver.parse(row.get("process"))
    where = "driven by another process" if driver is None else f"running on {driver.host}, pid {driver.pid}"
    seen = standing(store, run, row)
    if seen is Standing.ALIVE:
        raise UsageError(f"--resume {run}: it is still {where}; wait for its end, or interrupt it there with Ctrl-C")
    if seen is Standing.ELSEWHERE and not take_over:
        raise UsageError(f"--resume {run}: by its row it is {where}, and that cannot be seen from this machine. Look there; "
                         "where that process or its machine is gone for good, add --take-over")


def unchanged(store: Store, run: str, promise: str) -> None:
    """Raise UsageError where `promise` is not what the run promised, naming the difference."""
    row = _row(store, run)
    if row.get("plan") and (changed := differences(row["plan"], promise)):
        raise UsageError(f"--resume {run}: this is not what the run has promised: {listed(changed)}. Put it back as it was "
                         "and resume, or start a new run (without --resume)")


def resumed(store: Store, run: str, promise: str, commit: str | None) -> Beginning:
    """What is committed of a run that goes on.

    Raises UsageError where `promise` is not what it promised.
    A run whose own row is lost goes on as far as its cells are of this matrix.
    """
    unchanged(store, run, promise)
    row, attempts = _row(store, run), store.read("cells", run).to_pylist()
    final = {r["cell"]: _verdict(run, r) for r in attempts if r["final"]}
    if strange := sorted(set(final) - promised_cells(promise)):
        raise UsageError(f"--resume {run}: the configuration or a patch has changed since, cell {strange[0]} is not in this "
                         "matrix any more; start a new run")
    note = None
    if row.get("project_commit") not in (None, commit):
        note = f"note: the run began with the project at {row['project_commit'][:24]}, it goes on at {(commit or '?')[:24]}"
    # A life that was killed could not write how long it was: at least as long as what it committed.
    ran_s = covered_s([(r["started_utc"], r["ended_utc"]) for r in attempts if r["started_utc"] and r["ended_utc"]])
    return Beginning(run, final, row.get("started_utc") or utc_now(), max(row.get("wall_s") or 0.0, ran_s),
                     row.get("status") == "finished", note)


def _verdict(run: str, row: Mapping[str, Any]) -> Verdict:
    try:
        return Verdict(row["verdict"])
    except ValueError as error:
        raise UsageError(f"--resume {run}: cell {row['cell']} has the verdict {row['verdict']!r}, which this version of the "
                         "farm does not know; resume it with the version that wrote it") from error


def _row(store: Store, run: str) -> dict[str, Any]:
    return next(iter(store.read("runs", run).to_pylist()), {})
