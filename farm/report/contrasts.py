"""What a run measured, arm beside arm: one contrast for each metric and kind of request of a cell.  Pure.

Boots with the probe stand apart from the others: they count in no mean and in no pair of the A/B.  Where one boot
served prompts of one length both fresh and after a cached prefix, those stand apart too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.records import Verdict
from farm.report import expected
from farm.stats import noise_floor, percent, words

Row = Mapping[str, Any]
EVIDENCE = (Verdict.PASS.value, Verdict.FAIL.value)
SPREAD = "spread"  # what the values of an A/A have: no change, and no effect


@dataclass(frozen=True)
class ArmValues:
    """A metric's values on the boots of one arm, in boot order: one a boot, or more where it repeated the request."""

    arm: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)


@dataclass(frozen=True)
class Contrast:
    """One metric of one kind of request (tokens) on every arm, the baseline first."""

    cell: str
    metric: str
    unit: str
    prompt_tokens: int | None
    scenario: str  # "name: parameters"
    arms: tuple[ArmValues, ...]
    evidence: bool  # False where the cell ended INVALID or ERROR: figures to look at, not to quote
    judged: bool = True  # whether a rule of the matrix looked at it
    cached_tokens: int = 0  # of the prompt, where its boot served others of its length with more or fewer
    probe: bool = False  # of boots with the probe
    twice: bool = False  # an A/A: one tree on both arms

    @property
    def words(self) -> str:
        """The second arm against the first, or the spread of an A/A; empty where there is neither, or no evidence."""
        if not self.evidence:
            return "no evidence: see the cell's verdict"
        if self.twice:
            return self.spread and f"{SPREAD} {self.spread} between boots of one tree"
        first, second, *_ = (*self.arms, None, None)
        return words(first.mean, second.mean, (first.arm, second.arm)) if second else ""

    @property
    def spread(self) -> str:
        """(max - min) / mean over all boots of all arms, as a percentage; empty for fewer than two values."""
        found = noise_floor([[value for arm in self.arms for value in arm.values]])
        return "" if found is None else percent(found)

    @property
    def tokens(self) -> str:
        cached = f" ({self.cached_tokens:,} cached)" if self.cached_tokens else ""
        return "" if self.prompt_tokens is None else f"{self.prompt_tokens:,}{cached}"

    @property
    def length(self) -> str:
        """Prompt length, the scenario's name (its parameters are in `RunView.scenarios`), and whether the probe was on."""
        return " ".join(filter(None, (self.tokens, self.scenario.partition(": ")[0], "with the probe" if self.probe else "")))


@dataclass(frozen=True)
class _Key:
    """What the rows of one contrast have in common."""

    cell: str
    metric: str
    tokens: int | None
    scenario: str
    probe: bool
    cached: int

    @property
    def order(self) -> tuple[object, ...]:
        return (self.cell, self.metric, self.tokens is not None, self.tokens or 0, self.scenario, self.probe, self.cached)


def contrasts(rows: Sequence[Row], shown: Mapping[str, Row]) -> tuple[Contrast, ...]:
    """Of rows of `measurements`, and the row of each cell that is shown."""
    valued = [row for row in rows if row["value"] is not None]
    apart = _cached_apart(valued)
    groups: dict[_Key, dict[str, list[Row]]] = {}
    for row in valued:
        key = _key(row, apart)
        groups.setdefault(key, {}).setdefault(row["arm"] or "", []).append(row)
    return tuple(_contrast(key, groups[key], shown[key.cell]) for key in sorted(groups, key=lambda key: key.order))


def same_tree_twice(cell: Row) -> bool:
    """Whether all arms of a cell, two or more, are one: the same patches (and tree), environment and arguments."""
    arms = [(arm["tree"], tuple(p["sha256"] for p in arm["patches"] or ()), tuple(sorted(arm["env"] or ())),
             tuple(arm["args"] or ())) for arm in cell["arms"] or ()]
    return len(arms) > 1 and len(set(arms)) == 1


def _key(row: Row, apart: frozenset[tuple[object, ...]]) -> _Key:
    # A served measurement's note is about its scrapes; any other's says which scenario it is.
    scenario = (row["note"] or "") if row["boot"] is None else ""
    cached = (row["cached_tokens"] or 0) if _kind(row) in apart else 0
    return _Key(row["cell"], row["metric"], row["prompt_tokens"], scenario, bool(row["probe"]), cached)


def _cached_apart(rows: Iterable[Row]) -> frozenset[tuple[object, ...]]:
    """Metrics and lengths at which one boot has values with different counts of cached tokens."""
    seen: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for row in rows:
        if row["boot"] is not None:
            seen[(*_kind(row), row["arm"], row["boot"])].add(row["cached_tokens"] or 0)
    return frozenset(key[:3] for key, counts in seen.items() if len(counts) > 1)


def _kind(row: Row) -> tuple[object, ...]:
    return (row["cell"], row["metric"], row["prompt_tokens"])


def _contrast(key: _Key, by_arm: Mapping[str, Sequence[Row]], cell: Row) -> Contrast:
    declared = [a["arm"] for a in cell["arms"] or ()]
    names = sorted(by_arm, key=lambda a: (declared.index(a) if a in declared else len(declared), a))
    in_order = {a: sorted(by_arm[a], key=lambda r: (r["boot"] or 0, r["order"] or 0)) for a in names}
    arms = tuple(ArmValues(a, tuple(r["value"] for r in in_order[a])) for a in names)
    cached = max(row["cached_tokens"] or 0 for rows in by_arm.values() for row in rows)
    judged = expected.judged(cell["expect"], key.metric, key.tokens, key.scenario.partition(": ")[0], cached=cached,
                             probe=key.probe)
    unit = next(iter(by_arm.values()))[0]["unit"] or ""
    return Contrast(key.cell, key.metric, unit, key.tokens, key.scenario, arms, cell["verdict"] in EVIDENCE, judged,
                    key.cached, key.probe, same_tree_twice(cell))
