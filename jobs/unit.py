"""Unit suites on every arm, judged by which tests changed sides.

Most of vLLM's own suite fails without a network, whatever the tree, so a count
says nothing: outcomes are compared test by test between the first arm (the
baseline) and each other arm.  A test that only the other arm fails is run
again on all arms before it counts; one that then disagrees with itself is
flaky, and no evidence.  An expectation may name the exact failing set of an arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from farm.bench import Bench, Event, Needs, Suite, TestRun
from farm.errors import InvalidMeasurement
from farm.records import Outcome, Reason, Tagged, TestRow, Verdict

SOURCES = ("pin", "newer", "series")
GOOD = ("passed", "xpassed", "xfailed", "skipped")
BAD = ("failed", "error", "crashed", "timeout")
NAMES = 5  # that a sentence lists


@dataclass(frozen=True)
class Failing:
    """Exactly these tests fail, each with its message's part where `messages` gives one.

    A test is named by its node id or by the end of it after a `::`.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    failing: tuple[str, ...] = ()
    messages: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if stray := sorted(set(self.messages) - set(self.failing)):
            raise ValueError(f"messages names {stray[0]}, which failing does not list")


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
    if suite.workers < 0 or suite.timeout_s <= 0 or suite.deadline_s <= 0:
        raise ValueError(f"suite {suite.name}: workers is 0 or more, timeout_s and deadline_s are above 0")


def _run(bench: Bench, name: str, parts: Sequence[Suite], number: int) -> Iterator[Event]:
    """Run the parts on every arm and yield their rows.  Returns arm -> Seen."""
    seen = {}
    for arm in bench.arms:
        bench.progress(f"suite {name} on {arm}" + (f", again ({number})" if number else ""))
        runs = []
        for part in parts:
            run = bench.pytest(arm, part)
            rows = tuple(replace(row, suite=name, round=number) for row in run.outcomes)
            runs.append(replace(run, outcomes=rows))
            yield from (Tagged(row, {"arm": arm}) for row in rows)
        seen[arm] = Seen.of(runs)
    return seen


def _narrowed(suite: Suite, tests: Sequence[str]) -> list[Suite]:
    """Suites that run just these tests.  Where newer tests sit in the pin's file, the pin's own need no graft."""
    named = {e.partition("[")[0] for e in suite.select if "::" in e}
    grafted = [t for t in tests if suite.source != "newer" or t.partition("[")[0] in named]
    own = [t for t in tests if t not in grafted]
    parts = [replace(suite, select=tuple(grafted))] if grafted else []
    return parts + ([replace(suite, source="pin", select=tuple(own))] if own else [])


# --- comparing: pure --------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What one round showed on one arm.  `wholes`: files and conftests that failed, with all their tests."""

    rows: Mapping[str, TestRow]
    wholes: tuple[TestRow, ...]
    vllm_path: str | None
    note: str | None

    @classmethod
    def of(cls, runs: Sequence[TestRun]) -> Seen:
        rows = {row.nodeid: row for run in runs for row in run.outcomes}
        wholes = tuple(row for row in rows.values() if row.outcome in BAD and "::" not in row.nodeid)
        return cls(rows, wholes, next((r.vllm_path for r in runs if r.vllm_path), None),
                   next((r.note for r in runs if r.note), None))

    def above(self, nodeid: str) -> TestRow | None:
        """The file or conftest that failed as a whole and took this test with it."""
        path = nodeid.partition("::")[0]
        return next((row for row in self.wholes if row.nodeid != nodeid and _takes(row.nodeid, path)), None)

    def get(self, nodeid: str) -> TestRow | None:
        return self.rows.get(nodeid) or self.above(nodeid)


def _takes(whole: str, path: str) -> bool:
    where = whole.removesuffix("conftest.py").rstrip("/")
    return where in ("", ".", path) or path.startswith(where + "/")


Rounds = Sequence[Mapping[str, Seen]]  # arm -> what the round showed; the first round holds all tests


def broken(rounds: Rounds, baseline: str, arm: str) -> dict[str, TestRow]:
    """Tests that fail on `arm` in every round that tells, and on the baseline in none; with the failing row.

    A test that the arm could not collect, because its file fails there, counts as failing; one that the
    baseline did not report at all has nothing to excuse it.
    """
    ours, theirs = rounds[0][baseline], rounds[0][arm]
    found = {}
    for nodeid in dict.fromkeys([*ours.rows, *theirs.rows]):
        before, after = ours.rows.get(nodeid), theirs.get(nodeid)
        if after is None or after.outcome not in BAD or (before is not None and before.outcome not in GOOD):
            continue
        if before is None and after in theirs.wholes and any(_takes(nodeid, t.partition("::")[0]) for t in ours.rows):
            continue  # its tests, which the baseline has, are counted one by one
        if not flaky(rounds, nodeid, baseline) and not flaky(rounds, nodeid, arm):
            found[nodeid] = after
    return found


def flaky(rounds: Rounds, nodeid: str, arm: str) -> tuple[str, ...]:
    """The outcomes of a test that disagreed with itself on one arm; empty where it did not."""
    seen = [row.outcome for row in (views[arm].get(nodeid) for views in rounds) if row is not None]
    return tuple(seen) if set(seen) & set(GOOD) and set(seen) & set(BAD) else ()


@dataclass(frozen=True)
class Finding:
    """What one suite showed.  Sentences name tests; counts are per suite."""

    summary: str
    broken: tuple[str, ...] = ()  # sentences, one per arm
    differs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()  # arms on which tests passed without importing vllm
    flaky: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    expected: bool = False  # some expectation was judged


def examine(suite: Suite, rounds: Rounds, arms: Sequence[str], expected: Mapping[str, Failing]) -> Finding:
    """Compare the other arms of one suite with the first, and each arm with its expectation."""
    at, first, baseline = f"suite {suite.name}", rounds[0], arms[0]
    differs, missing, broke, unproven = [], [], [], []
    suspects = dict.fromkeys(t for arm in arms[1:] for t in broken(rounds[:1], baseline, arm))
    unsure = {(arm, t): seen for t in suspects for arm in arms if (seen := flaky(rounds, t, arm))}
    shaky = tuple(f"{_short(t)} on {arm} ({', '.join(seen)})" for (arm, t), seen in unsure.items())
    counts = [f"{len({n for arm in arms for n in first[arm].rows})} tests"]
    counts += [f"{arm} {sum(r.outcome in BAD for r in first[arm].rows.values())} failing" for arm in arms]
    for arm in arms[1:]:
        excused = expected[arm].failing if arm in expected else ()
        lost = {n: r for n, r in broken(rounds, baseline, arm).items() if not _named(n, excused)}
        if lost:
            broke.append(f"{at}: {len(lost)} broken on {arm}: {_list(lost)} (the first: {_cause(lost)})")
        pairs = [(row.outcome, first[arm].rows[n].outcome) for n, row in first[baseline].rows.items()
                 if n in first[arm].rows]
        fixed = sum(a in BAD and b in GOOD and b != "skipped" for a, b in pairs)
        still = sum(a in BAD and b in BAD for a, b in pairs)
        counts.append(f"{arm} against {baseline}: fixed {fixed}, broken {len(lost)}, still failing {still}")
        if still:
            unproven.append(f"{at}: {still} tests fail on {baseline} and {arm} alike and show nothing")
        if hidden := sum(a in ("passed", "xpassed") and b == "skipped" for a, b in pairs):
            unproven.append(f"{at}: {hidden} tests that pass on {baseline} are skipped on {arm}")
        if gone := [n for n, row in first[baseline].rows.items()
                    if row.outcome in GOOD and "::" in n and first[arm].get(n) is None]:
            missing.append(f"{at}: {len(gone)} tests of {baseline} do not exist on {arm}: {_list(gone)}")
    for arm in arms:
        if unmet := [n for n, row in first[arm].rows.items() if row.outcome == "missing"]:
            why = f" ({first[arm].note.splitlines()[0]})" if first[arm].note else ""
            missing.append(f"{at}: {len(unmet)} promised tests have no outcome on {arm}: {_list(unmet)}{why}")
        if arm in expected:
            difference, absent = compare(expected[arm], first[arm], [t for a, t in unsure if a == arm])
            differs += [f"{at} on {arm}: {text}" for text in difference]
            missing += [f"{at}: expected to fail on {arm} and not run: {_list(absent)}"] if absent else []
    if shaky:
        unproven.append(f"{at}: flaky, so no evidence: {', '.join(shaky[:NAMES])}")
    untold = tuple(arm for arm in arms if first[arm].vllm_path is None
                   and any(r.outcome in ("passed", "xpassed") for r in first[arm].rows.values()))
    return Finding(f"{suite.name}: {', '.join(counts)}", tuple(broke), tuple(differs), tuple(missing), untold,
                   shaky, tuple(unproven), bool(expected))


def _cause(lost: Mapping[str, TestRow]) -> str:
    row = next(iter(lost.values()))
    words = (row.message or "").splitlines()[:1]
    return ", ".join([row.outcome, *(w.removeprefix("E").strip()[:120] for w in words)])


def compare(wanted: Failing, seen: Seen, unsure: Sequence[str]) -> tuple[list[str], list[str]]:
    """How the failing set differs, in sentences, and which expected tests did not run.

    Flaky tests, `unsure`, may be in the failing set or not.
    """
    texts, absent, passing, other = [], [], [], []
    for name in wanted.failing:
        ran = [r for n, r in seen.rows.items() if _named(n, (name,)) and r.outcome != "missing"]
        absent += [] if ran or seen.above(name) else [name]
        passing += [r.nodeid for r in ran if r.outcome in GOOD and r.nodeid not in unsure]
        part = wanted.messages.get(name)
        other += [f"{_short(r.nodeid)} says {(r.message or 'nothing')[:100]!r}, not {part!r}"
                  for r in ran if part and r.outcome in BAD and part not in (r.message or "")]
    failing = [n for n, r in seen.rows.items() if r.outcome in BAD]
    if extra := [n for n in failing if not _named(n, wanted.failing) and n not in unsure]:
        texts.append(f"{len(extra)} fail and should not: {_list(extra)}")
    if passing:
        texts.append(f"{len(passing)} should fail and do not: {_list(passing)}")
    if other:
        texts.append(f"another message: {'; '.join(other[:NAMES])}")
    if passing and not failing:
        texts.append("0 failures where some are expected: the wrong tree was tested")
    return texts, absent


def judge(bench: Bench, findings: Sequence[Finding]) -> Outcome:
    """The verdict of all suites.  Evidence against the tree goes before what is missing, that before praise."""
    def every(name: str) -> list[str]:
        return [text for finding in findings for text in getattr(finding, name)]

    arms = list(bench.arms.values())
    same = [a.name for a in arms[1:] if (a.tree, dict(a.env)) == (arms[0].tree, dict(arms[0].env))]
    texts = every("broken") + every("differs") + every("missing")
    texts.append("; ".join(f.summary for f in findings))
    if same:
        texts.append(f"{arms[0].name} and {', '.join(same)} are the same tree {arms[0].tree}: nothing was compared")
    if untold := every("untold"):
        blind = ", ".join(dict.fromkeys(untold))
        texts.insert(0, f"tests passed on {blind} without importing vllm, so they say nothing about the tree")
    expected = any(f.expected for f in findings)
    if untold:
        verdict, reason = Verdict.INVALID, Reason.WRONG_TREE
    elif every("broken"):
        verdict, reason = Verdict.FAIL, Reason.TESTS_BROKEN
    elif every("differs"):
        verdict, reason = Verdict.FAIL, Reason.FAILING_SET_DIFFERS
    elif every("missing"):
        verdict, reason = Verdict.INVALID, Reason.MISSING_ROWS
    elif len(arms) == 1 and not expected:
        verdict, reason = Verdict.INVALID, Reason.BAD_CONFIG
        texts.append("one arm and no expectation: nothing to judge; give `expect` or a second arm")
    elif same and not expected:
        verdict, reason = Verdict.INVALID, Reason.NO_CHANGE
    elif every("flaky"):
        verdict, reason = Verdict.PASS, Reason.FLAKY
    else:
        verdict, reason = Verdict.PASS, Reason.AS_EXPECTED if expected else Reason.NO_REGRESSION
    query = f"select arm, suite, nodeid, outcome, message from tests where cell = '{bench.cell}'"
    texts.append(f'All tests: farm sql "{query}"')
    return Outcome(verdict, reason, ". ".join(texts), tuple(every("unproven")))


def _named(nodeid: str, names: Sequence[str]) -> bool:
    return any(nodeid == name or nodeid.endswith("::" + name) for name in names)


def _short(nodeid: str) -> str:
    path, colons, test = nodeid.partition("::")
    return path.rpartition("/")[2] + colons + test


def _list(nodeids: Sequence[str] | Mapping[str, Any]) -> str:
    names = [_short(n) for n in nodeids]
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
