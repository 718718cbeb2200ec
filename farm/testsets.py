"""Deciding by tests: which changed sides between two arms, and whether the failing sets are the expected ones.

Pure: what farm/stats.py is for figures.  Most of vLLM's own suite fails without
a network, whatever the tree, so outcomes are compared test by test.  A failing
file or conftest takes its tests along; an arm on which nothing passes is never
evidence for it; a test that disagrees with itself is flaky.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from farm.bench import Bench, Suite, TestRun
from farm.records import Outcome, Reason, TestRow, Verdict

GOOD = ("passed", "xpassed", "xfailed", "skipped")
BAD = ("failed", "error", "crashed", "timeout")
PASSED = ("passed", "xpassed")
STOPPED = ("error", "crashed")  # before the test's own words ran, or instead of them
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
class Seen:
    """What one round showed on one arm.  `wholes`: files and conftests that failed, with all their tests."""

    rows: Mapping[str, TestRow]
    wholes: tuple[TestRow, ...]
    vllm_path: str | None
    note: str | None
    cut: Reason | None = None  # as in TestRun

    @classmethod
    def of(cls, runs: Sequence[TestRun]) -> Seen:
        rows = {row.nodeid: row for run in runs for row in run.outcomes}
        wholes = tuple(row for row in rows.values() if row.outcome in BAD and "::" not in row.nodeid)
        return cls(rows, wholes, next((r.vllm_path for r in runs if r.vllm_path), None),
                   next((r.note for r in runs if r.note), None),
                   next((r.cut for r in runs if r.cut), None))

    def above(self, nodeid: str) -> TestRow | None:
        """The file or conftest that failed as a whole and took this test with it."""
        path = nodeid.partition("::")[0]
        return next((row for row in self.wholes if row.nodeid != nodeid and takes(row.nodeid, path)), None)

    def get(self, nodeid: str) -> TestRow | None:
        return self.rows.get(nodeid) or self.above(nodeid)

    def takes(self, whole: str) -> list[str]:
        """The tests of this arm that lie in a file or below a conftest."""
        return [n for n in self.rows if "::" in n and takes(whole, n.partition("::")[0])]

    def passes(self) -> bool:
        return any(row.outcome in PASSED for row in self.rows.values())


def takes(whole: str, path: str) -> bool:
    where = whole.removesuffix("conftest.py").rstrip("/")
    return where in ("", ".", path) or path.startswith(where + "/")


Rounds = Sequence[Mapping[str, Seen]]  # arm -> what the round showed; the first round holds all tests


def broken(rounds: Rounds, baseline: str, arm: str) -> dict[str, TestRow]:
    """Tests that fail on `arm` in every round that tells, and on the baseline in none; with the failing row.

    A test that the arm could not collect, because its file fails there, counts as failing; one that the
    baseline did not report at all has nothing to excuse it.  A file or conftest that only the arm cannot
    collect is broken itself, unless a test that it takes is.  Where nothing passes on the arm, a test that
    failed by its own words on the baseline and no longer gets to them is broken too.
    """
    ours, theirs = rounds[0][baseline], rounds[0][arm]
    idle = not any(views[arm].passes() for views in rounds)
    found: dict[str, TestRow] = {}
    wholes = {row.nodeid for row in theirs.wholes}
    nodeids = dict.fromkeys([*ours.rows, *theirs.rows])
    for nodeid in sorted(nodeids, key=wholes.__contains__):  # stable: tests first
        before, after = ours.rows.get(nodeid), theirs.get(nodeid)
        if after is None or after.outcome not in BAD:
            continue
        if before is not None and before.outcome not in GOOD and not (idle and _stopped(rounds, nodeid, baseline, arm)):
            continue
        if nodeid in wholes and any("::" in n and takes(nodeid, n.partition("::")[0]) for n in found):
            continue  # counted, test by test
        if not flaky(rounds, nodeid, baseline) and not flaky(rounds, nodeid, arm):
            found[nodeid] = after
    return found


def _stopped(rounds: Rounds, nodeid: str, baseline: str, arm: str) -> bool:
    """Whether a test always fails by its own words on the baseline, and on the arm never gets to them."""
    def all_in(name: str, outcomes: Sequence[str]) -> bool:
        rows = [views[name].rows.get(nodeid) for views in rounds]
        return rows[0] is not None and all(r.outcome in outcomes for r in rows if r is not None)

    return all_in(baseline, ("failed",)) and all_in(arm, STOPPED)


def flaky(rounds: Rounds, nodeid: str, arm: str) -> tuple[str, ...]:
    """The outcomes of a test that disagreed with itself on one arm; empty where it did not.

    A file or conftest has a row only where it fails: that its tests have rows says that it was collected.
    """
    seen = []
    for views in rounds:
        row = views[arm].get(nodeid)
        if row is not None:
            seen.append(row.outcome)
        elif "::" not in nodeid and views[arm].takes(nodeid):
            seen.append("passed")
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
    cut: tuple[tuple[str, Reason], ...] = ()  # arms whose missing tests are those that something cut off from outside


def examine(suite: Suite, rounds: Rounds, arms: Sequence[str], expected: Mapping[str, Failing]) -> Finding:
    """Compare the other arms of one suite with the first, and each arm with its expectation."""
    at, first, baseline = f"suite {suite.name}", rounds[0], arms[0]
    differs, missing, broke, unproven = [], [], [], []
    suspects = dict.fromkeys(t for arm in arms[1:] for t in broken(rounds[:1], baseline, arm))
    unsure = {(arm, t): seen for t in suspects for arm in arms if (seen := flaky(rounds, t, arm))}
    shaky = tuple(f"{_short(t)} on {arm} ({', '.join(seen)})" for (arm, t), seen in unsure.items())
    tests = dict.fromkeys(n for arm in arms for n in first[arm].rows if "::" in n)
    counts = [_count(tests)]
    for arm in arms:
        failing = [n for n in dict.fromkeys([*tests, *first[arm].rows]) if _fails(first[arm], n)]
        counts.append(f"{arm} {_number(failing)} failing")
    for arm in arms[1:]:
        ours, theirs = first[baseline], first[arm]
        excused = expected[arm].failing if arm in expected else ()
        lost = {n: r for n, r in broken(rounds, baseline, arm).items() if not _named(n, excused)}
        if single := {n: r for n, r in lost.items() if "::" in n}:
            broke.append(f"{at}: {len(single)} broken on {arm}: {_list(single)} (the first: {_cause(single)})")
        if whole := {n: r for n, r in lost.items() if "::" not in n}:
            taken = dict.fromkeys(t for n in whole for t in ours.takes(n))
            broke.append(f"{at}: {_list(whole, str)} cannot be collected on {arm}, and with it "
                         f"{_count(taken)} of {baseline} (the first: {_cause(whole)})")
        pairs = [(row.outcome, theirs.rows[n].outcome) for n, row in ours.rows.items() if n in theirs.rows]
        fixed = sum(a in BAD and b in GOOD and b != "skipped" for a, b in pairs)
        still = [n for n, row in ours.rows.items() if row.outcome in BAD and n not in lost and _fails(theirs, n)]
        counts.append(f"{arm} against {baseline}: fixed {fixed}, broken {_number(lost)}, still failing {_number(still)}")
        if still:
            unproven.append(f"{at}: {_count(still)} fail on {baseline} and {arm} alike and show nothing")
        if hidden := sum(a in ("passed", "xpassed") and b == "skipped" for a, b in pairs):
            unproven.append(f"{at}: {hidden} tests that pass on {baseline} are skipped on {arm}")
        if gone := [n for n, row in first[baseline].rows.items()
                    if row.outcome in GOOD and "::" in n and first[arm].get(n) is None]:
            missing.append(f"{at}: {len(gone)} tests of {baseline} do not exist on {arm}: {_list(gone)}")
        if not lost and not excused and not any(views[arm].passes() for views in rounds):
            missing.append(_idle(at, arm, theirs))
    if baseline in expected and not expected[baseline].failing and not any(v[baseline].passes() for v in rounds):
        missing.append(_idle(at, baseline, first[baseline]))
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
    untold = tuple(arm for arm in arms if first[arm].vllm_path is None and first[arm].passes())
    return Finding(f"{suite.name}: {', '.join(counts)}", tuple(broke), tuple(differs), tuple(missing), untold,
                   shaky, tuple(unproven), bool(expected), tuple((arm, cut) for arm in arms if (cut := first[arm].cut)))


def _fails(seen: Seen, nodeid: str) -> bool:
    row = seen.get(nodeid)
    return row is not None and row.outcome in BAD


def _idle(at: str, arm: str, seen: Seen) -> str:
    fates = Counter(row.outcome for row in seen.rows.values())
    told = ", ".join(f"{number} {outcome}" for outcome, number in fates.items()) or "no test at all"
    return (f"{at}: nothing passes on {arm} ({told}), so nothing shows that its tree works; "
            "select tests that pass there too, or name in `expect` what should fail")


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
    elif every("missing") and (cut := [pair for finding in findings for pair in finding.cut]):
        # As a server that hangs or is killed: it may be the machine's doing, so it is tried again.
        verdict, reason = Verdict.ERROR, cut[0][1]
        if reason is Reason.TESTS_STALLED:
            texts.append(f"give deadline_s more time, or look for what hangs on {cut[0][0]}")
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


def _number(nodeids: Collection[str]) -> str:
    """Tests by number alone; files and conftests, which are no tests, by name."""
    return str(len(nodeids)) if all("::" in n for n in nodeids) else _count(nodeids)


def _count(nodeids: Collection[str]) -> str:
    wholes = sum("::" not in n for n in nodeids)
    tests = len(nodeids) - wholes
    parts = [f"{n} {word}{'s' * (n != 1)}" for n, word in ((tests, "test"), (wholes, "file")) if n]
    return " and ".join(parts) or "0 tests"


def _list(nodeids: Sequence[str] | Mapping[str, Any], short: Callable[[str], str] = _short) -> str:
    names = [short(n) for n in nodeids]
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
