"""Unit suites on every arm, judged by which tests changed sides.

Most of vLLM's own suite fails without a network, whatever the tree, so a count
says nothing: outcomes are compared test by test between the first arm (the
baseline) and each other arm.  A test that only the other arm fails is run
again on all arms before it counts; one that then disagrees with itself is
flaky, and no evidence.  An expectation may name the exact failing set of an arm.
A test that the baseline fails too excuses nothing but itself: a file that only
the other arm cannot collect is broken, and an arm on which no test passes is
never praised, unless its expectation names what fails there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, ClassVar

from packaging.version import InvalidVersion, Version

from farm.bench import Bench, Event, Needs, Suite, TestRun
from farm.errors import InvalidMeasurement
from farm.graft import test_path
from farm.records import Reason, Tagged
from farm.testsets import Failing, Seen, broken, examine, judge, takes
from jobs.armwise import each

SOURCES = ("pin", "newer", "series")
MAX_WORKERS = 64


@dataclass(frozen=True)
class Unit:
    """`expect` maps suite to arm to its failing set: a list of tests, or `failing:` with `messages:`.

    The regression tests of the series need none: they must pass on every arm but the first.
    """

    name: ClassVar[str] = "unit"
    needs: ClassVar[Needs] = Needs(own_card=False)
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    suites: tuple[Suite, ...]
    reruns: int = 1
    expect: Mapping[str, Mapping[str, tuple[str, ...] | Failing]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [s.name for s in self.suites]
        if not names:
            raise ValueError("suites is empty: name at least one")
        if len(set(names)) < len(names):
            raise ValueError("two suites have the same name")
        if self.reruns < 0:
            raise ValueError("reruns counts from 0")
        for suite in self.suites:
            _check(suite)
        if unknown := sorted(set(self.expect) - set(names)):
            raise ValueError(f"expect names suite {unknown[0]}; there are: {', '.join(names)}")

    @property
    def arms_named(self) -> set[str]:
        """Arms that `expect` names."""
        return {arm for arms in self.expect.values() for arm in arms}

    def run(self, bench: Bench) -> Iterator[Event]:
        """One TestRow per test, arm and round, then the verdict.

        Raises what `bench.pytest` raises, and InvalidMeasurement for an expectation of an arm that is not there.
        """
        arms = tuple(bench.arms)
        for suite, wanted in self.expect.items():
            if unknown := sorted(set(wanted) - set(arms)):
                raise InvalidMeasurement(f"expect.{suite} names arm {unknown[0]}; the cell has: {', '.join(arms)}",
                                         reason=Reason.BAD_CONFIG)
        findings = []
        for suite in self.suites:
            rounds = [(yield from _run(bench, suite.name, [suite], 0))]
            for number in range(1, 1 + self.reruns):
                suspects = sorted({t for arm in arms[1:] for t in broken(rounds, arms[0], arm)})
                if not suspects:
                    break
                rounds.append((yield from _run(bench, suite.name, _narrowed(suite, suspects), number)))
            findings.append(examine(suite, rounds, arms, self._expected(suite, arms)))
        yield judge(bench, findings)

    def _expected(self, suite: Suite, arms: Sequence[str]) -> dict[str, Failing]:
        given = {arm: e if isinstance(e, Failing) else Failing(tuple(e))
                 for arm, e in self.expect.get(suite.name, {}).items()}
        implied = {arm: Failing() for arm in arms[1:]} if suite.source == "series" else {}
        return {**implied, **given}


def _check(suite: Suite) -> None:
    if suite.source not in SOURCES:
        raise ValueError(f"suite {suite.name}: source {suite.source!r} is none of {', '.join(SOURCES)}")
    if suite.source != "series" and not suite.select:
        raise ValueError(f"suite {suite.name}: select is empty; name paths or node ids, e.g. tests/v1/core")
    if suite.source == "newer" and not (suite.version and any("::" in entry for entry in suite.select)):
        raise ValueError(f"suite {suite.name}: source newer needs a version and node ids (path::test) to take from it")
    for entry in suite.select:
        path = PurePosixPath(test_path(entry)[0])
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"suite {suite.name}: select entry {entry!r} leaves the tests' root; give a path relative to it")
    if suite.version is not None and not _is_version(suite.version):
        raise ValueError(f"suite {suite.name}: {suite.version!r} is no version; give one of PyPI's, e.g. 0.30.0")
    if suite.workers > MAX_WORKERS:
        raise ValueError(f"suite {suite.name}: workers is at most {MAX_WORKERS}")
    if suite.workers < 0 or not 0 < suite.timeout_s < math.inf or not 0 < suite.deadline_s < math.inf:
        raise ValueError(f"suite {suite.name}: workers is 0 or more, timeout_s and deadline_s are above 0")


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return text == text.strip()


def _run(bench: Bench, name: str, parts: Sequence[Suite], number: int) -> Iterator[Event]:
    """Run the parts on every arm and yield their rows.  Returns arm -> Seen."""
    def on(arm: str) -> list[TestRun]:
        bench.progress(f"suite {name} on {arm}" + (f", again ({number})" if number else ""))
        runs = [bench.pytest(arm, part) for part in parts]
        return [replace(run, outcomes=tuple(replace(row, suite=name, round=number) for row in run.outcomes)) for run in runs]

    seen = {}
    side_by_side = all(part.side_by_side for part in parts)
    for arm, runs in each(tuple(bench.arms), on, at_once=len(bench.arms) if side_by_side else 1):
        yield from (Tagged(row, {"arm": arm}) for run in runs for row in run.outcomes)
        seen[arm] = Seen.of(runs)
    return seen


def _narrowed(suite: Suite, tests: Sequence[str]) -> list[Suite]:
    """Suites that run just these tests.  Where newer tests sit in the pin's file, the pin's own need no graft."""
    if wholes := [t for t in tests if "::" not in t]:
        if suite.source == "newer":
            return [suite]  # the pin may lack that file, and what the graft brings is few tests
        again = [e for whole in wholes for e in _entries(suite, whole)]
        tests = list(dict.fromkeys([*again, *(t for t in tests if "::" in t)]))
    named = {e.partition("[")[0] for e in suite.select if "::" in e}
    grafted = [t for t in tests if suite.source != "newer" or t.partition("[")[0] in named]
    own = [t for t in tests if t not in grafted]
    parts = [replace(suite, select=tuple(grafted))] if grafted else []
    return parts + ([replace(suite, source="pin", select=tuple(own))] if own else [])


def _entries(suite: Suite, whole: str) -> list[str]:
    """What to select so that a file or conftest is collected again."""
    taken = [e for e in suite.select if takes(whole, test_path(e)[0])]
    return taken or [whole.removesuffix("conftest.py").rstrip("/") or "."]
