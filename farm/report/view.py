"""A run as a report shows it: digested from the store's rows, for every renderer the same.

Effect-free apart from reading the store.  A cell is shown by its final
attempt, else by its last; what other attempts measured is left out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from farm import campaign
from farm.errors import UsageError
from farm.records import Reason, Verdict
from farm.report import expected, pins, suites
from farm.report.conditions import conditions
from farm.report.pins import PinTable
from farm.report.suites import SuiteView, plain
from farm.stats import words
from farm.store import Store

Row = Mapping[str, Any]
VERDICTS = tuple(v.value for v in Verdict)
EVIDENCE = (Verdict.PASS.value, Verdict.FAIL.value)
NOT_RUN = "not run yet"
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
class ArmValues:
    """A metric's value on each boot of one arm, in boot order."""

    arm: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


@dataclass(frozen=True)
class Contrast:
    """One metric at one prompt length (tokens) on every arm, the baseline first."""

    cell: str
    metric: str
    unit: str
    prompt_tokens: int | None
    scenario: str  # "name: parameters"
    arms: tuple[ArmValues, ...]
    evidence: bool  # False where the cell ended INVALID or ERROR: figures to look at, not to quote
    judged: bool = True  # whether a rule of the matrix looked at it

    @property
    def words(self) -> str:
        """The second arm against the first; empty where there is none, or no evidence."""
        if not self.evidence:
            return "no evidence: see the cell's verdict"
        first, second, *_ = (*self.arms, None, None)
        return words(first.mean, second.mean, (first.arm, second.arm)) if second else ""

    @property
    def tokens(self) -> str:
        return "" if self.prompt_tokens is None else f"{self.prompt_tokens:,}"

    @property
    def length(self) -> str:
        """Prompt length and the scenario's name; its parameters are in `RunView.scenarios`."""
        return " ".join(filter(None, (self.tokens, self.scenario.partition(": ")[0])))


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
class Times:
    """Seconds of the run and, of those, with vLLM at work (boots, requests, tests).

    Where cells ran side by side, or a run was resumed, vLLM's seconds exceed
    the run's: `of` then says that both are sums over the cells.
    """

    total_s: float
    vllm_s: float
    of: str

    @property
    def words(self) -> str:
        if not self.total_s:
            return "no time was recorded"
        if not self.vllm_s:
            return f"{self.of} {self.total_s:.1f} s, none with vLLM at work yet"
        ours = max(0.0, self.total_s - self.vllm_s)
        return (f"{self.of} {self.total_s:.1f} s: vLLM {self.vllm_s:.1f} s, ours {ours:.1f} s "
                f"({100 * ours / self.total_s:.1f} %)")


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
    contrasts: tuple[Contrast, ...]
    suites: tuple[SuiteView, ...]
    patches: tuple[PatchView, ...]
    pins: PinTable | None
    campaign: str  # why no verdict here is evidence; empty where there is no such reason
    times: Times
    unproven: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def missing_words(self) -> str:
        """What cells without a row count as: INVALID once the run has ended."""
        return NOT_RUN if self.status in _UNENDED else Verdict.INVALID.value

    @property
    def scenarios(self) -> tuple[str, ...]:
        """Each scenario's "name: parameters", once."""
        return tuple(dict.fromkeys(c.scenario for c in self.contrasts if ": " in c.scenario))

    @property
    def tally(self) -> dict[str, int]:
        """Cells by verdict, in the order of `Verdict`, those that are none left out."""
        found = Counter(c.verdict for c in self.cells) + Counter({self.missing_words: self.missing})
        return {v: found[v] for v in (*VERDICTS, NOT_RUN) if found[v]}

    @property
    def summary(self) -> str:
        return ", ".join(f"{n} {v}" for v, n in self.tally.items()) or "no cell has ended"


def view(store: Store, run: str) -> RunView:
    """Digest a run.  Raises UsageError where the store has no such run."""
    if run not in store.runs():
        raise UsageError(f"no run {run!r} in {store.root}; see: farm runs")
    tables, problems = {}, []
    for table in ("runs", "cells", "boots", "measurements", "tests", "patches"):
        reading = store.reading(table, run)
        tables[table] = reading.table.to_pylist()
        problems.extend(reading.problems)
    shown = _shown(tables["cells"])
    kept = {table: [r for r in tables[table] if shown.get(r["cell"], {}).get("attempt") == r["attempt"]]
            for table in ("boots", "measurements", "tests", "patches")}
    head = tables["runs"][0] if tables["runs"] else {}
    attempts = Counter(r["cell"] for r in tables["cells"])
    cells = tuple(_cell(row, attempts[row["cell"]], kept) for row in shown.values())
    missing = max(0, (head.get("cells") or 0) - len(cells))
    return RunView(
        run=run, name=head.get("name") or "", status=head.get("status") or "no row of its own: killed before it ended",
        exit_code=head.get("exit_code"), command=" ".join(head.get("command") or ()), started=head.get("started_utc"),
        project=_project(head, shown.values()), cells=cells, missing=missing,
        contrasts=_contrasts(kept["measurements"], shown), suites=suites.digest(kept["tests"], _arm_names(shown)),
        patches=_patches(kept["patches"], shown.values()), pins=pins.digest(cells, kept["boots"]),
        campaign="" if head.get("campaign") in (None, campaign.VALID) else head["campaign"], times=_times(head, shown.values()),
        unproven=_unproven(shown.values(), head, missing, kept["boots"]), problems=tuple(dict.fromkeys(problems)))


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


def _contrasts(rows: Sequence[Row], shown: Mapping[str, Row]) -> tuple[Contrast, ...]:
    groups: dict[tuple[str, str, int | None, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row["value"] is not None:
            # A served measurement's note is about its scrapes; any other's says which scenario it is.
            scenario = (row["note"] or "") if row["boot"] is None else ""
            key = (row["cell"], row["metric"], row["prompt_tokens"], scenario)
            groups.setdefault(key, {}).setdefault(row["arm"] or "", []).append(row)
    return tuple(_contrast(key, groups[key], shown[key[0]]) for key in sorted(
        groups, key=lambda k: (k[0], k[1], k[2] is not None, k[2] or 0, k[3])))


def _contrast(key: tuple[str, str, int | None, str], by_arm: Mapping[str, Sequence[Row]], cell: Row) -> Contrast:
    _, metric, tokens, scenario = key
    declared = [a["arm"] for a in cell["arms"] or ()]
    names = sorted(by_arm, key=lambda a: (declared.index(a) if a in declared else len(declared), a))
    in_order = {a: sorted(by_arm[a], key=lambda r: (r["boot"] or 0, r["order"] or 0)) for a in names}
    arms = tuple(ArmValues(a, tuple(r["value"] for r in in_order[a])) for a in names)
    judged = expected.judged(cell["expect"], metric, tokens, scenario.partition(": ")[0])
    unit = next(iter(by_arm.values()))[0]["unit"] or ""
    return Contrast(cell["cell"], metric, unit, tokens, scenario, arms, cell["verdict"] in EVIDENCE, judged)


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


def _times(head: Row, cells: Iterable[Row]) -> Times:
    wall, vllm = head.get("wall_s") or 0.0, head.get("vllm_s") or 0.0
    if wall and vllm <= wall:
        return Times(wall, vllm, "wall")
    rows = list(cells)
    return Times(math.fsum(r["wall_s"] or 0.0 for r in rows), math.fsum(r["vllm_s"] or 0.0 for r in rows),
                 "all cells together")


def _unproven(cells: Iterable[Row], head: Row, missing: int, boots: Sequence[Row]) -> tuple[str, ...]:
    lines: dict[str, list[str]] = {}
    rows = list(cells)
    for row in rows:
        for line in row["unproven"] or ():
            lines.setdefault(line, []).append(row["cell"])
    told = [f"{', '.join(found)}: {line}" for line, found in lines.items()]
    told += [f"{r['cell']}: {'skipped' if r['verdict'] == Verdict.SKIP.value else 'no evidence either way'} "
             f"({r['reason']})" for r in rows if r["verdict"] not in EVIDENCE]
    if missing and head.get("status") in _UNENDED:
        told.append(f"{_count(missing, 'cell')} of the matrix {NOT_RUN}")
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
            if boot["cell"] == row["cell"] and boot["pair"] is not None:
                arms.setdefault(boot["pair"], set()).add(boot["arm"])
        pairs = sum(len(found) > 1 for found in arms.values())
        if 0 < pairs < _SIGN_TEST_PAIRS:
            by_count.setdefault(pairs, []).append(row["cell"])
    for pairs, found in by_count.items():
        yield (f"{', '.join(found)}: {_count(pairs, 'pair')} of boots: too few for a statistical claim "
               f"(a sign test at 5 % needs {_SIGN_TEST_PAIRS})")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
