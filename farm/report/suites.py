"""Test outcomes of a cell's suites, arm against arm: what changed sides.

Pure.  The first arm is the baseline.  A test that disagrees with itself
between rounds is flaky and counts for no side.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_PYTEST_ERROR = re.compile(r"^E\s+")  # what pytest puts before the lines of a failure
FAILING = ("failed", "error", "crashed", "timeout")
GOOD = ("passed", "xfailed", "xpassed", "skipped")


@dataclass(frozen=True)
class TestView:
    """A test by node id, with the first line of what it said where it failed."""

    __test__ = False

    nodeid: str
    message: str = ""


@dataclass(frozen=True)
class SuiteView:
    """One suite of one cell, an arm against the baseline (or one arm alone: then only its counts)."""

    cell: str
    suite: str
    arms: tuple[str, ...]  # baseline, arm
    counts: tuple[str, ...]  # per arm: "4 passed, 3 failed", of the first round
    fixed: tuple[TestView, ...] = ()
    broken: tuple[TestView, ...] = ()
    still_failing: tuple[TestView, ...] = ()
    flaky: tuple[TestView, ...] = ()
    one_sided: tuple[TestView, ...] = ()  # an outcome on one arm only

    @property
    def groups(self) -> tuple[tuple[str, tuple[TestView, ...]], ...]:
        return (("broken", self.broken), ("fixed", self.fixed), ("still failing", self.still_failing),
                ("flaky", self.flaky), ("on one arm only", self.one_sided))

    @property
    def words(self) -> str:
        if len(self.arms) < 2:
            return ""
        told = [f"{len(tests)} {name}" for name, tests in self.groups if tests]
        return ", ".join(told) or "no difference, none failing"


def plain(text: str | None) -> str:
    """Text without terminal sequences and control characters, whoever wrote it (a log, a test's message)."""
    return _CONTROLS.sub("", text or "")


def digest(rows: Iterable[Row], declared: Mapping[str, Sequence[str]]) -> tuple[SuiteView, ...]:
    """Rows of the table `tests`; `declared` is each cell's arms in order, the baseline first."""
    suites: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        suites.setdefault((row["cell"], row["suite"] or ""), {}).setdefault(row["arm"] or "", []).append(row)
    views = []
    for (cell, suite), by_arm in sorted(suites.items()):
        order = list(declared.get(cell, ()))
        first, *others = sorted(by_arm, key=lambda a: (order.index(a) if a in order else len(order), a))
        if not others:
            views.append(SuiteView(cell, suite, (first,), (_counts(by_arm[first]),)))
        views.extend(_compare(cell, suite, (first, arm), by_arm) for arm in others)
    return tuple(views)


def _compare(cell: str, suite: str, arms: tuple[str, str], by_arm: Mapping[str, Sequence[Row]]) -> SuiteView:
    ours = [_states(by_arm[arm]) for arm in arms]
    messages = {**_messages(by_arm[arms[0]]), **_messages(by_arm[arms[1]])}
    groups: dict[str, list[TestView]] = {"fixed": [], "broken": [], "still_failing": [], "flaky": [], "one_sided": []}
    for nodeid in sorted({*ours[0], *ours[1]}):
        before, after = (states.get(nodeid, frozenset()) for states in ours)
        if len(before) > 1 or len(after) > 1:
            side = "flaky"
        elif not before or not after:
            side = "one_sided"
        else:
            side = {(True, False): "fixed", (False, True): "broken", (True, True): "still_failing"}.get(
                (True in before, True in after), "")
        if side:
            groups[side].append(TestView(nodeid, messages.get(nodeid, "")))
    return SuiteView(cell, suite, arms, tuple(_counts(by_arm[arm]) for arm in arms),
                     **{side: tuple(tests) for side, tests in groups.items()})


def _states(rows: Sequence[Row]) -> dict[str, frozenset[bool]]:
    """Per test whether it failed, over its rounds; a test that is missing said neither."""
    states: dict[str, frozenset[bool]] = {}
    for row in rows:
        if row["outcome"] in FAILING or row["outcome"] in GOOD:
            states[row["nodeid"]] = states.get(row["nodeid"], frozenset()) | {row["outcome"] in FAILING}
    return states


def _counts(rows: Sequence[Row]) -> str:
    found = Counter(r["outcome"] for r in rows if not r["round"])
    return ", ".join(f"{n} {outcome}" for outcome, n in found.most_common())


def _messages(rows: Sequence[Row]) -> dict[str, str]:
    """Per test the first line of what it said where it failed, from its first round that says something."""
    said = ((r["nodeid"], plain(r["message"]).strip()) for r in reversed(rows) if r["outcome"] in FAILING)
    return {nodeid: _PYTEST_ERROR.sub("", message.splitlines()[0]) for nodeid, message in said if message}
