"""From a record to a row: the conditions that make it evidence, and the row of a cell's end.

Pure.  Both sides use it: the worker for all that it measured, the driver for
cells that never reached a card or whose actor died.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from farm.childenv import redact
from farm.plan import ArmSpec, Cell
from farm.records import Outcome, PatchRow, Tagged, utc_now
from farm.schemas import stamp

IDENTITY_OF_JOB = ("arm", "pair", "order", "boot", "started_utc", "ended_utc")


@dataclass(frozen=True)
class Policy:
    """What a matrix says about cards that are busy or faulty, and about patches that are not trusted; times in seconds."""

    busy_wait_s: float = 600.0
    quarantine_after: int = 2
    quarantine_s: float = 3600.0
    isolation: str = "none"  # or bwrap


@dataclass(frozen=True)
class RunInfo:
    """What is the same in every row of a run."""

    run: str
    project_commit: str | None  # or content-<hash>, see farm.project
    project_dirty: bool | None
    series: str | None = None  # directory


@dataclass(frozen=True)
class Span:
    """A stretch of time that vLLM itself used: kind is boot, request, teardown, tests or script."""

    kind: str
    arm: str
    started_utc: datetime
    ended_utc: datetime


@dataclass(frozen=True)
class BuiltArm:
    """An arm whose tree stands: its hash and how each patch applied."""

    name: str
    tree: str
    patches: tuple[PatchRow, ...]

    def patch_structs(self) -> list[dict[str, Any]]:
        return [{"name": p.patch, "sha256": p.sha256, "hunks": p.hunks, "offset_hunks": p.offset_hunks,
                 "max_offset": p.max_offset} for p in self.patches]


@dataclass
class Evidence:
    """Stamps the records of one cell attempt on one card."""

    info: RunInfo
    cell: Cell
    attempt: int
    card: Mapping[str, Any] = field(default_factory=dict)  # columns of schemas.CARD
    arms: dict[str, BuiltArm] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)  # vllm, torch, triton, transformers, python
    model_sha256: str | None = None
    drafter_sha256: str | None = None
    launcher_sha256: str | None = None  # of the start script
    started: datetime = field(default_factory=utc_now)
    waited_s: float | None = None  # before that, for its card

    def begin(self) -> None:
        """The attempt has its card now; until now it has waited for it."""
        asked, self.started = self.started, utc_now()
        self.waited_s = (self.started - asked).total_seconds()

    def row(self, tagged: Tagged, started: datetime | None = None) -> tuple[str, dict[str, Any]]:
        """(table, row) of a record; `started` is when the span that it belongs to began.  Raises KeyError."""
        own = dict(tagged.conditions)
        identity = self._identity(started) | {k: own.pop(k) for k in IDENTITY_OF_JOB if k in own}
        return stamp(tagged.record, identity, self._conditions(identity.get("arm")) | own)

    def cell_row(self, outcome: Outcome, spans: Sequence[Span] = (), *, final: bool) -> dict[str, Any]:
        """The row of the table `cells`: what this attempt ended with, and what time went where."""
        _, row = stamp(outcome, self._identity(None), self._conditions(None))
        ended = row["ended_utc"]
        return row | {
            "arms": [self._arm(arm) for arm in self.cell.arms],
            "options": json.dumps({k: v for k, v in self.cell.options.items() if k != "expect"}, sort_keys=True,
                                  default=str),
            "expect": json.dumps(self.cell.options.get("expect"), sort_keys=True, default=str),
            "wall_s": (ended - self.started).total_seconds(), "waited_s": self.waited_s,
            "vllm_s": covered_s([(s.started_utc, s.ended_utc) for s in spans]),
            "spans": [{"kind": s.kind, "arm": s.arm, "started_utc": s.started_utc, "ended_utc": s.ended_utc}
                      for s in spans],
            "final": final, "control": self.cell.control and self.cell.control.value,
        }

    def _identity(self, started: datetime | None) -> dict[str, Any]:
        return {"run": self.info.run, "cell": self.cell.id, "attempt": self.attempt, "job": self.cell.job.name,
                "started_utc": started or self.started, "ended_utc": utc_now()}

    def _conditions(self, arm: str | None) -> dict[str, Any]:
        row: dict[str, Any] = {
            "pin": self.cell.pin.name, "flavour": self.cell.pin.config.flavour, "series": self.info.series,
            "seed": self.cell.seed, "series_sha256": self.cell.series_sha256, "project_commit": self.info.project_commit,
            "project_dirty": self.info.project_dirty, "profile": self.cell.profile,
            "model_sha256": self.model_sha256, "drafter_sha256": self.drafter_sha256,
            "launcher_sha256": self.launcher_sha256, **self.versions, **self.card,
        }
        if arm is not None and arm in self.arms:
            row |= {"tree": self.arms[arm].tree, "patches": self.arms[arm].patch_structs()}
        row["env"] = next((redact(a.env) for a in self.cell.arms if a.name == arm), None)
        return row

    def _arm(self, spec: ArmSpec) -> dict[str, Any]:
        built = self.arms.get(spec.name)
        return {"arm": spec.name, "tree": built and built.tree, "env": redact(spec.env), "args": list(spec.args),
                "patches": built.patch_structs() if built else _unbuilt(spec)}


def _unbuilt(arm: ArmSpec) -> list[dict[str, Any]]:
    return [{"name": p.name, "sha256": p.sha256} for p in arm.patches]


def covered_s(intervals: Sequence[tuple[datetime, datetime]]) -> float:
    """Seconds that at least one of the intervals covers (side by side counts once)."""
    total, end = 0.0, None
    for start, stop in sorted(intervals):
        if end is None or start > end:
            total += (stop - start).total_seconds()
            end = stop
        elif stop > end:
            total += (stop - end).total_seconds()
            end = stop
    return total
