"""A run as a report shows it: digested from the store's rows, for every renderer the same.

Effect-free apart from reading the store.  A cell is shown by its final
attempt, else by its last; what other attempts measured is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from farm import campaign
from farm.errors import UsageError
from farm.records import Reason, Verdict
from farm.report import mishaps, pins, suites
from farm.report.conditions import conditions
from farm.report.contrasts import EVIDENCE, Contrast, contrasts
from farm.report.pins import PinTable
from farm.report.schedule import Schedule, schedule
from farm.report.suites import SuiteView, plain
from farm.report.times import Times, times
from farm.runs import status as stands
from farm.store import Store

Row = Mapping[str, Any]
VERDICTS = tuple(v.value for v in Verdict)
NOT_RUN = "not run yet"
UNREADABLE = "unreadable"  # its row may be in a file that is damaged
_UNENDED = ("running", "interrupted")  # of a run: a cell without a row is still to run, or to resume
_SIGN_TEST_PAIRS = 6  # fewer cannot reach 5 %, two-sided, however well they agree
_SHA1 = re.compile(r"[0-9a-f]{40}")
_CELL_HASH = re.compile(r"-([0-9a-f]{8})$")


@dataclass(frozen=True)
class CellView:
    """One cell's end.  `detail` is its sentences, `tail` what followed them (a log's last lines)."""

    cell: str
    job: str
    profile: str
    pin: str
    card: str
    verdict: str
    reason: str
    detail: str
    tail: str
    wall_s: float
    vllm_s: float
    attempt: int
    attempts: int
    final: bool
    conditions: tuple[tuple[str, str], ...]  # what is said of it, and how it was

    @property
    def short(self) -> str:
        """The id without what it repeats of job, profile and pin: the cell's name, else its job, and its hash."""
        found = _CELL_HASH.search(self.cell)
        if not found:
            return self.cell
        return f"{self.column}-{found[1]}"

    @property
    def column(self) -> str:
        """Its name, else its job: what cells of several pins have in common."""
        found = _CELL_HASH.search(self.cell)
        name = self.cell[:found.start() if found else None].removesuffix(f"-{self.pin}")
        name = name.removesuffix(f"-{self.profile.replace('/', '-')}")
        return name.removeprefix(f"{self.job}-") or self.job


@dataclass(frozen=True)
class PatchView:
    """How a patch applied to a pin: hunks, of them placed with an offset, the largest offset in lines."""

    pin: str
    patch: str
    sha256: str
    hunks: int | None
    offset_hunks: int | None
    max_offset: int | None
    files: tuple[str, ...]
    status: str = ""  # of a triage, and what it found
    detail: str = ""

    @property
    def words(self) -> str:
        if self.status not in ("", "clean", "offset"):
            return f"{self.status}: {self.detail}" if self.detail else self.status
        if self.hunks is None:
            return "not applied"
        offsets = f"{self.offset_hunks} with an offset, at most {_count(self.max_offset or 0, 'line')}" \
            if self.offset_hunks else "none with an offset"
        return f"{_count(self.hunks, 'hunk')}, {offsets}"


@dataclass(frozen=True)
class RunView:
    """All that a report says."""

    run: str
    name: str
    status: str
    exit_code: int | None
    command: str
    started: datetime | None
    project: str
    cells: tuple[CellView, ...]
    missing: int  # cells that were promised and have no row
    missing_words: str  # what these count as: INVALID once the run has ended and every file of its cells could be read
    contrasts: tuple[Contrast, ...]
    suites: tuple[SuiteView, ...]
    patches: tuple[PatchView, ...]
    pins: PinTable | None
    campaign: str  # why no verdict here is evidence; empty where there is no such reason
    times: Times
    unproven: tuple[str, ...]
    problems: tuple[str, ...]
    retried: tuple[str, ...] = ()  # a line for each attempt that was made again
    cards: tuple[str, ...] = ()  # a line for each card that left or joined
    schedule: Schedule | None = None

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Each scenario's "name: parameters", once."""
        return tuple(dict.fromkeys(c.scenario for c in self.contrasts if ": " in c.scenario))

    @property
    def tally(self) -> dict[str, int]:
        """Cells by verdict, in the order of `Verdict`, those that are none left out."""
        found = Counter(c.verdict for c in self.cells) + Counter({self.missing_words: self.missing})
        return {v: found[v] for v in (*VERDICTS, NOT_RUN, UNREADABLE) if found[v]}

    @property
    def summary(self) -> str:
        return ", ".join(f"{n} {v}" for v, n in self.tally.items()) or "no cell has ended"


def view(store: Store, run: str) -> RunView:
    """Digest a run.  Raises UsageError where the store has no such run."""
    if run not in store.runs():
        raise UsageError(f"no run {run!r} in {store.root}; see: farm runs")
    tables, problems, damaged = {}, [], False
    for table in ("runs", "cells", "cards", "boots", "measurements", "tests", "patches"):
        reading = store.reading(table, run)
        tables[table] = reading.table.to_pylist()
        problems.extend(reading.problems)
        damaged |= table == "cells" and bool(reading.problems)
    shown = _shown(tables["cells"])
    kept = {table: [r for r in tables[table] if shown.get(r["cell"], {}).get("attempt") == r["attempt"]]
            for table in ("boots", "measurements", "tests", "patches")}
    head = tables["runs"][0] if tables["runs"] else {}
    attempts = Counter(r["cell"] for r in tables["cells"])
    cells = tuple(_cell(row, attempts[row["cell"]], kept) for row in shown.values())
    missing = max(0, (head.get("cells") or 0) - len(cells))
    status = stands(store, run, head) if head else "no row of its own: killed before it ended"
    words = UNREADABLE if damaged else NOT_RUN if status in _UNENDED else Verdict.INVALID.value
    return RunView(
        run=run, name=head.get("name") or "",
        status=status,
        exit_code=head.get("exit_code"), command=" ".join(head.get("command") or ()), started=head.get("started_utc"),
        project=_project(head, shown.values()), cells=cells, missing=missing, missing_words=words,
        contrasts=contrasts(kept["measurements"], shown), suites=suites.digest(kept["tests"], _arm_names(shown)),
        patches=_patches(kept["patches"], shown.values()), pins=pins.digest(cells, kept["boots"]),
        campaign="" if head.get("campaign") in (None, campaign.VALID) else head["campaign"],
        times=times(head, shown.values(), tables["cells"]),
        unproven=_unproven(shown.values(), missing, words, kept["boots"]), problems=tuple(dict.fromkeys(problems)),
        retried=mishaps.attempts(tables["cells"]), cards=mishaps.cards(tables["cards"]),
        schedule=schedule(head, shown.values(), tables["cells"], tables["cards"]))


def _shown(rows: Iterable[Row]) -> dict[str, Row]:
    best: dict[str, Row] = {}
    for row in rows:
        seen = best.get(row["cell"])
        if seen is None or (bool(row["final"]), row["attempt"]) > (bool(seen["final"]), seen["attempt"]):
            best[row["cell"]] = row
    return dict(sorted(best.items()))


def _cell(row: Row, attempts: int, kept: Mapping[str, Sequence[Row]]) -> CellView:
    detail, _, tail = plain(row["detail"]).partition("\n")
    rows = {table: [r for r in found if r["cell"] == row["cell"]] for table, found in kept.items()}
    return CellView(
        cell=row["cell"], job=row["job"] or "", profile=row["profile"] or "", pin=row["pin"] or "",
        card=row["card_name"] or row["card"] or "", verdict=row["verdict"] or Verdict.INVALID.value,
        reason=row["reason"] or Reason.MISSING_ROWS.value, detail=detail, tail=tail, wall_s=row["wall_s"] or 0.0,
        vllm_s=row["vllm_s"] or 0.0, attempt=row["attempt"], attempts=attempts, final=bool(row["final"]),
        conditions=tuple(conditions(row, rows)))


# --- measurements ---------------------------------------------------------------------------


def _arm_names(shown: Mapping[str, Row]) -> dict[str, list[str]]:
    return {cell: [a["arm"] for a in row["arms"] or ()] for cell, row in shown.items()}


def _patches(rows: Sequence[Row], cells: Iterable[Row]) -> tuple[PatchView, ...]:
    found: dict[tuple[str, str, str], tuple[int, PatchView]] = {}
    for r in rows:
        seen = PatchView(r["pin"] or "", r["patch"], r["sha256"], r["hunks"], r["offset_hunks"], r["max_offset"],
                         tuple(r["files"] or ()), r["status"] or "", plain(r["detail"]))
        key = (seen.pin, seen.patch, seen.sha256)
        if key not in found or not found[key][1].status:  # a triage's word stands
            found[key] = (r["position"] or 0, seen)
    for cell in cells:
        for arm in cell["arms"] or ():
            for place, p in enumerate(arm["patches"] or ()):
                told = PatchView(cell["pin"] or "", p["name"], p["sha256"] or "", p["hunks"], p["offset_hunks"],
                                 p["max_offset"], ())
                key = (told.pin, told.patch, told.sha256)
                if key not in found or found[key][1].hunks is None:
                    found[key] = (place, told)
    return tuple(seen for _, seen in sorted(found.values(), key=lambda f: (f[1].pin, f[0], f[1].patch)))


# --- the run --------------------------------------------------------------------------------


def _project(head: Row, cells: Iterable[Row]) -> str:
    for row in (head, *cells):
        if row.get("project_commit"):
            commit = row["project_commit"]
            name = commit[:12] if _SHA1.fullmatch(commit) else commit
            return f"{name}{' with uncommitted changes' if row['project_dirty'] else ''}"
    return ""


def _unproven(cells: Iterable[Row], missing: int, missing_words: str, boots: Sequence[Row]) -> tuple[str, ...]:
    lines: dict[str, list[str]] = {}
    rows = list(cells)
    for row in rows:
        for line in row["unproven"] or ():
            lines.setdefault(line, []).append(row["cell"])
    told = [f"{', '.join(found)}: {line}" for line, found in lines.items()]
    told += [f"{r['cell']}: {'skipped' if r['verdict'] == Verdict.SKIP.value else 'no evidence either way'} "
             f"({r['reason']})" for r in rows if r["verdict"] not in EVIDENCE]
    if missing and missing_words == NOT_RUN:
        told.append(f"{_count(missing, 'cell')} of the matrix {NOT_RUN}")
    elif missing and missing_words == UNREADABLE:
        told.append(f"{_count(missing, 'cell')} of the matrix {UNREADABLE}: bring back the files that are named, or --resume "
                    "the run, which measures them again")
    elif missing:
        told.append(f"{_count(missing, 'cell')} of the matrix left no row: no evidence either way (missing-rows)")
    proved = [r for r in rows if r["verdict"] in EVIDENCE]
    told += _few_pairs(proved, boots)
    on_gpu = any(r["compute_capability"] for r in proved)
    if proved and not on_gpu:
        told.append("nothing ran on a GPU: what needs one (speculative decoding, offload, timing) is not shown here")
    for what, column in (*([("card", "card_name")] if on_gpu else []), ("profile", "profile")):
        names = sorted({r[column] for r in proved if r[column]})
        if names:
            told.append(f"no {what} other than {', '.join(names)} was run")
    return tuple(told)


def _few_pairs(proved: Sequence[Row], boots: Sequence[Row]) -> Iterable[str]:
    """DOMAIN.md 5 wants it said where the pairs are too few."""
    by_count: dict[int, list[str]] = {}
    for row in proved:
        arms: dict[int, set[str]] = {}
        for boot in boots:
            if boot["cell"] == row["cell"] and boot["pair"] is not None and not boot["probe"]:
                arms.setdefault(boot["pair"], set()).add(boot["arm"])
        pairs = sum(len(found) > 1 for found in arms.values())
        if 0 < pairs < _SIGN_TEST_PAIRS:
            by_count.setdefault(pairs, []).append(row["cell"])
    for pairs, found in by_count.items():
        yield (f"{', '.join(found)}: {_count(pairs, 'pair')} of boots: too few for a statistical claim "
               f"(a sign test at 5 % needs {_SIGN_TEST_PAIRS})")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
