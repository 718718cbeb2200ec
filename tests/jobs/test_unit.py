"""The unit job on a bench that plays back outcomes: what changed sides, and what that makes of the verdict."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field, replace

import pytest
from pydantic import TypeAdapter, ValidationError

from farm.bench import Arm, Card, Suite, TestRun
from farm.errors import InvalidMeasurement
from farm.outcomes import covers
from farm.records import Outcome, Reason, Tagged, TestRow, Verdict
from farm.schemas import stamp
from jobs.unit import Failing, Unit

A, B, C = "tests/x.py::test_a[1-3584]", "tests/x.py::test_b", "tests/y.py::TestC::test_c"
SUITE = Suite("core", "pin", ("tests",))


@dataclass
class FakeBench:
    """`script`: arm -> test -> outcomes by round (the last one repeats); "absent" gives no row."""

    script: dict[str, dict[str, str | list[str]]]
    messages: dict[str, str] = field(default_factory=dict)
    same_tree: bool = False
    vllm_path: str | None = "/tree/vllm/__init__.py"
    note: str | None = None
    cut: dict[str, Reason] = field(default_factory=dict)  # arm -> what ends its tests
    asked: list[tuple[str, Suite]] = field(default_factory=list)

    card = Card("c", "cpu", "cpu", "here")
    pin, version, profile, cell = "0.29.0-cpu", "0.29.0", None, "unit-0.29.0-cpu-1"
    rng = random.Random(0)

    @property
    def arms(self):
        return {name: Arm(name, "tree" if self.same_tree else f"tree-{name}", ()) for name in self.script}

    def progress(self, text):
        pass

    def pytest(self, arm, suite):
        turn = sum(a == arm for a, _ in self.asked)
        self.asked.append((arm, suite))
        rows = []
        for nodeid, outcome in self.script[arm].items():
            now = outcome if isinstance(outcome, str) else outcome[min(turn, len(outcome) - 1)]
            wanted = turn == 0 or any(covers(e, nodeid) for e in suite.select) or "::" not in nodeid
            if wanted and now != "absent":
                rows.append(TestRow(suite.name, nodeid, now, 0.1, self.messages.get(nodeid)))
        return TestRun(tuple(rows), self.note is None, self.vllm_path, self.note, self.cut.get(arm))


def run(bench, **options):
    events = list(Unit(**{"suites": (SUITE,), **options}).run(bench))
    assert isinstance(events[-1], Outcome) and all(isinstance(e, Tagged) for e in events[:-1])
    return events[-1], events[:-1]


@pytest.mark.parametrize(
    ("baseline", "patched", "verdict", "reason", "says"),
    [
        pytest.param("passed", "passed", "PASS", "no-regression", "fixed 0, broken 0, still failing 0", id="both-pass"),
        pytest.param("failed", "passed", "PASS", "no-regression", "fixed 1, broken 0", id="fixed"),
        pytest.param("failed", "failed", "PASS", "no-regression", "still failing 1", id="still-failing"),
        pytest.param("error", "skipped", "PASS", "no-regression", "fixed 0, broken 0", id="skipped-is-not-fixed"),
        pytest.param("xfailed", "xpassed", "PASS", "no-regression", "broken 0", id="xfail"),
        pytest.param("passed", "failed", "FAIL", "tests-broken", "1 broken on patched: x.py::test_b", id="broken"),
        pytest.param("passed", "error", "FAIL", "tests-broken", "test_b (the first: error)", id="error-is-broken"),
        pytest.param("passed", "crashed", "FAIL", "tests-broken", "(the first: crashed)", id="crashed-on-patched-only"),
        pytest.param("passed", "timeout", "FAIL", "tests-broken", "(the first: timeout)", id="hangs-on-patched-only"),
        pytest.param("skipped", "failed", "FAIL", "tests-broken", "x.py::test_b", id="skipped-then-failed"),
        pytest.param("absent", "failed", "FAIL", "tests-broken", "x.py::test_b", id="nothing-excuses-it"),
        pytest.param("crashed", "passed", "PASS", "no-regression", "fixed 1", id="crashed-on-baseline-only"),
        pytest.param("passed", "missing", "INVALID", "missing-rows", "no outcome on patched: x.py::test_b", id="lost"),
        pytest.param("missing", "passed", "INVALID", "missing-rows", "no outcome on baseline", id="lost-on-baseline"),
        pytest.param("passed", "absent", "INVALID", "missing-rows", "do not exist on patched", id="ids-differ"),
    ],
)
def test_verdict_by_sides(baseline, patched, verdict, reason, says):
    bench = FakeBench({"baseline": {A: "passed", B: baseline}, "patched": {A: "passed", B: patched}})
    outcome, _ = run(bench)
    assert (outcome.verdict.value, outcome.reason.value) == (verdict, reason)
    assert says in outcome.detail


def test_rows_are_tagged_with_arm_suite_and_round_and_fit_the_table():
    bench = FakeBench({"baseline": {A: "passed"}, "patched": {A: ["failed", "failed"]}})
    _, rows = run(bench)
    assert [(t.conditions["arm"], t.record.outcome, t.record.round) for t in rows] == [
        ("baseline", "passed", 0), ("patched", "failed", 0), ("baseline", "passed", 1), ("patched", "failed", 1)]
    assert {stamp(t.record, {"run": "r", "cell": "c", "attempt": 0, **t.conditions}, {})[0] for t in rows} == {"tests"}


def test_only_broken_tests_run_again_on_both_arms():
    bench = FakeBench({"baseline": {A: "passed", B: "failed", C: "failed"},
                       "patched": {A: "failed", B: "passed", C: "failed"}})
    run(bench, reruns=2)
    assert [(arm, suite.select) for arm, suite in bench.asked] == [
        ("baseline", ("tests",)), ("patched", ("tests",)),
        ("baseline", (A,)), ("patched", (A,)), ("baseline", (A,)), ("patched", (A,))]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param({"baseline": {A: "passed"}, "patched": {A: ["failed", "passed"]}}, id="on-patched"),
        pytest.param({"baseline": {A: ["passed", "failed"], B: "passed"}, "patched": {A: "failed", B: "passed"}},
                     id="on-baseline"),
        pytest.param({"baseline": {A: "passed"}, "patched": {A: ["crashed", "passed"]}}, id="crash-once"),
    ],
)
def test_a_test_that_disagrees_with_itself_is_flaky_and_no_evidence(script):
    outcome, _ = run(FakeBench(script))
    assert (outcome.verdict, outcome.reason) == (Verdict.PASS, Reason.FLAKY)
    assert "x.py::test_a[1-3584]" in outcome.unproven[-1]


def test_without_reruns_the_first_outcome_counts():
    outcome, _ = run(FakeBench({"baseline": {A: "passed"}, "patched": {A: ["failed", "passed"]}}), reruns=0)
    assert outcome.reason is Reason.TESTS_BROKEN


def test_a_real_break_is_named_beside_a_flaky_test():
    outcome, _ = run(FakeBench({"baseline": {A: "passed", B: "passed"},
                                "patched": {A: ["failed", "passed"], B: "failed"}}))
    assert outcome.reason is Reason.TESTS_BROKEN
    assert "1 broken on patched: x.py::test_b" in outcome.detail


@pytest.mark.parametrize("whole", ["tests/x.py", "tests/conftest.py", "tests"])
def test_a_file_that_fails_as_a_whole_breaks_its_tests(whole):
    bench = FakeBench({"baseline": {A: "passed", B: "passed"}, "patched": {whole: "error"}},
                      messages={whole: "E   ImportError: cannot import name 'X'"})
    outcome, _ = run(bench)
    assert outcome.reason is Reason.TESTS_BROKEN
    assert "2 broken on patched: x.py::test_a[1-3584], x.py::test_b" in outcome.detail
    assert "ImportError: cannot import name 'X'" in outcome.detail
    assert [suite.select for _, suite in bench.asked[2:]] == [(A, B)] * 2


def test_a_file_that_fails_on_both_arms_is_still_failing():
    outcome, _ = run(FakeBench({"baseline": {"tests/x.py": "error", C: "passed"},
                                "patched": {"tests/x.py": "error", C: "passed"}}))
    assert (outcome.verdict, outcome.reason) == (Verdict.PASS, Reason.NO_REGRESSION)
    assert "still failing 1 file" in outcome.detail and "core: 1 test, " in outcome.detail


CONFTEST, LOST = "tests/conftest.py", "E   ModuleNotFoundError: No module named 'vllm.nowhere'"


@pytest.mark.parametrize("source", [Suite("core", "newer", ("tests/x.py::test_a",), version="0.30.0"), SUITE],
                         ids=["newer", "pin"])
@pytest.mark.parametrize("whole", ["tests/x.py", CONFTEST, "tests", "."])
@pytest.mark.parametrize("fate", ["error", "crashed", "timeout"])
@pytest.mark.parametrize("elsewhere", [{}, {C: "passed"}], ids=["alone", "beside-a-test-that-passes"])
def test_a_file_that_only_the_patched_arm_cannot_collect_is_broken_though_its_test_failed_before(
        source, whole, fate, elsewhere):
    bench = FakeBench({"baseline": {A: "failed", **elsewhere}, "patched": {whole: fate, **elsewhere}},
                      messages={whole: LOST})
    outcome, _ = run(bench, suites=(source,))
    assert (outcome.verdict, outcome.reason) == (Verdict.FAIL, Reason.TESTS_BROKEN)
    assert "cannot be collected on patched" in outcome.detail or elsewhere
    assert LOST.removeprefix("E   ") in outcome.detail


def test_a_tree_that_cannot_be_imported_is_told_in_numbers_of_tests():
    bench = FakeBench({"baseline": {A: "failed"}, "patched": {CONFTEST: "error"}}, messages={CONFTEST: LOST})
    detail = run(bench)[0].detail
    assert ("suite core: tests/conftest.py cannot be collected on patched, and with it 1 test of baseline "
            "(the first: error, ModuleNotFoundError: No module named 'vllm.nowhere')") in detail
    assert ("core: 1 test, baseline 1 failing, patched 1 test and 1 file failing, "
            "patched against baseline: fixed 0, broken 1 file, still failing 1") in detail


def test_where_a_test_of_the_file_counts_the_file_does_not_count_again():
    bench = FakeBench({"baseline": {A: "failed", B: "passed"}, "patched": {CONFTEST: "error"}})
    detail = run(bench)[0].detail
    assert "1 broken on patched: x.py::test_b" in detail and "broken 1, still failing 1" in detail
    assert "cannot be collected" not in detail


def test_a_file_counts_where_its_only_good_test_is_flaky_on_the_baseline():
    bench = FakeBench({"baseline": {A: ["passed", "failed"]}, "patched": {CONFTEST: "error"}})
    assert run(bench)[0].reason is Reason.TESTS_BROKEN


@pytest.mark.parametrize(("arm", "script"), [
    ("patched", {"baseline": {A: "failed", C: "passed"},
                 "patched": {"tests/x.py": ["error", "absent"], A: ["absent", "failed"], C: "passed"}}),
    ("baseline", {"baseline": {"tests/x.py": ["absent", "error"], A: ["failed", "absent"], C: "passed"},
                  "patched": {"tests/x.py": "error", C: "passed"}}),
])
def test_a_file_that_is_collected_the_second_time_is_flaky(arm, script):
    outcome, _ = run(FakeBench(script))
    assert (outcome.verdict, outcome.reason) == (Verdict.PASS, Reason.FLAKY)
    assert f"x.py on {arm}" in outcome.unproven[-1]


@pytest.mark.parametrize(
    ("suite", "whole", "again"),
    [
        (Suite("s", "pin", ("tests",)), "tests/v1/conftest.py", ("tests/v1",)),
        (Suite("s", "pin", ("tests/v1", "tests/x.py::test_a")), CONFTEST, ("tests/v1", "tests/x.py::test_a")),
        (Suite("s", "pin", ("tests/y.py", "tests/x.py::test_a")), "tests/x.py", ("tests/x.py::test_a",)),
        (Suite("s", "series"), "conftest.py", (".",)),
        (Suite("s", "newer", ("tests/x.py::test_a",), version="0.30.0"), CONFTEST, ("tests/x.py::test_a",)),
    ],
)
def test_what_runs_again_for_a_file_that_fails(suite, whole, again):
    bench = FakeBench({"baseline": {}, "patched": {whole: "error"}})
    run(bench, suites=(suite,))
    assert [(s.source, s.select) for _, s in bench.asked[2:]] == [(suite.source, again)] * 2


@pytest.mark.parametrize(
    ("baseline", "patched", "verdict", "reason", "says"),
    [
        pytest.param({A: "failed", B: "failed"}, {}, "INVALID", "missing-rows",
                     "nothing passes on patched (no test at all)", id="all-gone"),
        pytest.param({A: "failed"}, {A: "missing"}, "INVALID", "missing-rows", "no outcome on patched", id="all-missing"),
        pytest.param({A: "failed", B: "failed"}, {A: "crashed", B: "missing"}, "FAIL", "tests-broken",
                     "1 broken on patched", id="pytest-crashed"),
        pytest.param({A: "failed"}, {A: "crashed"}, "FAIL", "tests-broken", "(the first: crashed)", id="crashed"),
        pytest.param({A: "failed", B: "failed"}, {A: "error", B: "error"}, "FAIL", "tests-broken",
                     "2 broken on patched", id="all-in-setup"),
        pytest.param({A: "failed"}, {A: ["crashed", "failed"]}, "INVALID", "missing-rows", "(1 crashed)",
                     id="crashed-once"),
        pytest.param({A: "failed", B: "failed"}, {A: "failed", B: "failed"}, "INVALID", "missing-rows",
                     "nothing passes on patched (2 failed), so nothing shows", id="fails-alike"),
        pytest.param({A: "error"}, {A: "crashed"}, "INVALID", "missing-rows", "(1 crashed)", id="error-then-crash"),
        pytest.param({A: "failed"}, {A: "timeout"}, "INVALID", "missing-rows", "(1 timeout)", id="hangs"),
        pytest.param({CONFTEST: "error"}, {CONFTEST: "error"}, "INVALID", "missing-rows", "(1 error)",
                     id="conftest-on-both"),
        pytest.param({A: "passed"}, {A: "skipped"}, "INVALID", "missing-rows", "(1 skipped)", id="all-skipped"),
        pytest.param({A: "xfailed"}, {A: "xfailed"}, "INVALID", "missing-rows", "(1 xfailed)", id="all-xfailed"),
        pytest.param({A: ["passed", "failed"]}, {A: "failed"}, "INVALID", "missing-rows", "(1 failed)", id="flaky"),
        pytest.param({A: "failed", B: "passed"}, {A: "crashed", B: "passed"}, "PASS", "no-regression",
                     "still failing 1", id="others-pass"),
    ],
)
def test_an_arm_on_which_nothing_passes_is_not_praised(baseline, patched, verdict, reason, says):
    outcome, _ = run(FakeBench({"baseline": baseline, "patched": patched}))
    assert (outcome.verdict.value, outcome.reason.value) == (verdict, reason)
    assert says in outcome.detail


@pytest.mark.parametrize("broken", [{}, {A: "failed"}, {A: "error"}, {A: "crashed"}, {A: "timeout"}, {A: "missing"},
                                    {A: "skipped"}, {A: "xfailed"}, {CONFTEST: "error"}, {"tests/x.py": "skipped"}])
@pytest.mark.parametrize("before", ["failed", "error", "crashed", "timeout", "missing", "skipped", "xfailed", "passed",
                                    "absent"])
@pytest.mark.parametrize("reruns", [0, 1])
def test_no_baseline_makes_a_dead_tree_pass(before, broken, reruns):
    outcome, _ = run(FakeBench({"baseline": {A: before}, "patched": broken}), reruns=reruns)
    assert outcome.verdict in (Verdict.FAIL, Verdict.INVALID)


@pytest.mark.parametrize(("rows", "verdict"), [({A: "skipped"}, Verdict.INVALID), ({}, Verdict.INVALID),
                                               ({A: "skipped", B: "passed"}, Verdict.PASS)])
def test_an_expectation_of_no_failure_needs_a_test_that_passes(rows, verdict):
    for script in ({"baseline": rows}, {"baseline": {B: "passed"}, "patched": {B: "skipped", **rows}}):
        arm = list(script)[-1]
        assert run(FakeBench(script), expect={"core": {arm: ()}})[0].verdict is verdict


def test_an_expected_failure_does_not_cover_a_conftest():
    bench = FakeBench({"baseline": {A: "failed"}, "patched": {CONFTEST: "error"}})
    assert run(bench, expect={"core": {"patched": (A,)}})[0].reason is Reason.TESTS_BROKEN


def test_detail_stays_short_and_says_where_the_rest_is():
    many = {f"tests/x.py::test_{i:03}": "passed" for i in range(300)}
    outcome, _ = run(FakeBench({"baseline": many, "patched": dict.fromkeys(many, "failed")}))
    assert "test_004 and 295 more" in outcome.detail and "test_005" not in outcome.detail
    assert "farm sql" in outcome.detail and "unit-0.29.0-cpu-1" in outcome.detail
    assert len(outcome.detail) < 700


EXACT = {"core": {"baseline": ("test_a[1-3584]",), "patched": ()}}


@pytest.mark.parametrize(
    ("baseline", "patched", "verdict", "reason", "says"),
    [
        pytest.param("failed", "passed", "PASS", "as-expected", "fixed 1", id="as-expected"),
        pytest.param("failed", "failed", "FAIL", "failing-set-differs",
                     "on patched: 1 fail and should not: x.py::test_a[1-3584]", id="patch-dropped"),
        pytest.param("passed", "passed", "FAIL", "failing-set-differs",
                     "on baseline: 1 should fail and do not: x.py::test_a[1-3584]", id="baseline-passes"),
        pytest.param("passed", "passed", "FAIL", "failing-set-differs", "the wrong tree was tested", id="no-failure"),
        pytest.param("missing", "passed", "INVALID", "missing-rows", "not run: test_a[1-3584]", id="expected-missing"),
        pytest.param("absent", "passed", "INVALID", "missing-rows", "not run: test_a[1-3584]", id="expected-absent"),
    ],
)
def test_expected_failing_set_is_exact(baseline, patched, verdict, reason, says):
    outcome, _ = run(FakeBench({"baseline": {A: baseline, B: "passed"}, "patched": {A: patched, B: "passed"}}),
                     expect=EXACT)
    assert (outcome.verdict.value, outcome.reason.value) == (verdict, reason)
    assert says in outcome.detail


def test_an_extra_failure_on_the_baseline_is_named():
    outcome, _ = run(FakeBench({"baseline": {A: "failed", B: "failed"}, "patched": {A: "passed", B: "passed"}}),
                     expect=EXACT)
    assert outcome.reason is Reason.FAILING_SET_DIFFERS
    assert "suite core on baseline: 1 fail and should not: x.py::test_b" in outcome.detail


def test_a_failure_that_the_expectation_names_is_not_broken():
    outcome, _ = run(FakeBench({"baseline": {A: "passed"}, "patched": {A: "failed"}}),
                     expect={"core": {"patched": (A,)}})
    assert (outcome.verdict, outcome.reason) == (Verdict.PASS, Reason.AS_EXPECTED)


@pytest.mark.parametrize(("part", "verdict"), [("71 == (7 + 1)", Verdict.PASS), ("72 ==", Verdict.FAIL)])
def test_expected_messages(part, verdict):
    bench = FakeBench({"baseline": {A: "failed"}, "patched": {A: "passed"}}, messages={A: "E   assert 71 == (7 + 1)"})
    outcome, _ = run(bench, expect={"core": {"baseline": Failing(("test_a[1-3584]",), {"test_a[1-3584]": part})}})
    assert outcome.verdict is verdict
    assert verdict is Verdict.PASS or "says 'E   assert 71 == (7 + 1)', not '72 =='" in outcome.detail


SERIES = Suite("ours", "series")


def test_regression_tests_must_pass_on_the_patched_arm_without_being_asked_to():
    outcome, _ = run(FakeBench({"baseline": {B: "failed"}, "patched": {B: "failed"}}), suites=(SERIES,))
    assert (outcome.verdict, outcome.reason) == (Verdict.FAIL, Reason.FAILING_SET_DIFFERS)
    assert "suite ours on patched: 1 fail and should not: x.py::test_b" in outcome.detail


def test_regression_tests_may_fail_on_the_baseline():
    outcome, _ = run(FakeBench({"baseline": {B: "failed"}, "patched": {B: "passed"}}), suites=(SERIES,))
    assert outcome.verdict is Verdict.PASS


NEWER = Suite("retirement", "newer", ("tests/x.py", "tests/x.py::test_a"), version="0.30.0")


def test_the_pins_own_tests_in_a_grafted_file_run_again_from_the_pin():
    bench = FakeBench({"baseline": {A: "passed", B: "passed"}, "patched": {A: "failed", B: "failed"}})
    outcome, rows = run(bench, suites=(NEWER,))
    assert [(s.source, s.select) for arm, s in bench.asked if arm == "patched"][1:] == [("newer", (A,)), ("pin", (B,))]
    assert "2 broken" in outcome.detail
    assert {t.record.suite for t in rows} == {"retirement"}


def test_one_arm_is_judged_by_its_expectation_alone():
    bench = FakeBench({"baseline": {A: "failed", B: "passed"}})
    assert run(bench, expect={"core": {"baseline": (A,)}})[0].reason is Reason.AS_EXPECTED


def test_one_arm_without_expectation_is_no_measurement():
    outcome, _ = run(FakeBench({"baseline": {A: "failed"}}))
    assert (outcome.verdict, outcome.reason) == (Verdict.INVALID, Reason.BAD_CONFIG)


@pytest.mark.parametrize(("expect", "reason"),
                         [({}, Reason.NO_CHANGE), ({"core": {"patched": ()}}, Reason.AS_EXPECTED)])
def test_two_arms_of_one_tree_are_told(expect, reason):
    outcome, _ = run(FakeBench({"baseline": {A: "passed"}, "patched": {A: "passed"}}, same_tree=True), expect=expect)
    assert outcome.reason is reason
    assert "the same tree" in outcome.detail


def test_tests_that_pass_without_vllm_say_nothing():
    bench = FakeBench({"baseline": {A: "passed"}, "patched": {A: "passed"}}, vllm_path=None)
    assert run(bench)[0].reason is Reason.WRONG_TREE


@pytest.mark.parametrize(("baseline", "patched", "cut", "verdict", "reason"), [
    ("passed", "missing", Reason.TESTS_STALLED, "ERROR", "tests-stalled"),
    ("missing", "missing", Reason.TESTS_STALLED, "ERROR", "tests-stalled"),
    ("passed", "missing", Reason.TESTS_CRASHED, "ERROR", "tests-crashed"),
    ("passed", "missing", None, "INVALID", "missing-rows"),
    ("passed", "passed", Reason.TESTS_STALLED, "PASS", "no-regression"),
], ids=["cut-off", "both-cut-off", "killed", "by-itself", "in-time"])
def test_what_was_cut_off_from_outside_is_tried_again(baseline, patched, cut, verdict, reason):
    bench = FakeBench({"baseline": {A: "passed", B: baseline}, "patched": {A: "passed", B: patched}}, cut={"patched": cut})
    outcome, events = run(bench)
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    assert len(events) == 4  # what had run is kept
    assert ("look for what hangs on patched" in outcome.detail) is (reason == "tests-stalled")


def test_what_a_deadline_cut_off_excuses_nothing_that_broke_before():
    bench = FakeBench({"baseline": {A: "passed", B: "passed"}, "patched": {A: "failed", B: "missing"}},
                      cut={"patched": Reason.TESTS_STALLED})
    assert run(bench)[0].reason == "tests-broken"


def test_the_reason_for_missing_rows_is_passed_on():
    bench = FakeBench({"baseline": {A: "missing"}, "patched": {A: "missing"}}, note="pytest died of signal 9; …\nlog")
    assert "(pytest died of signal 9; …)" in run(bench)[0].detail


def test_an_expectation_of_an_arm_that_is_not_there():
    with pytest.raises(InvalidMeasurement, match=r"expect\.core names arm patcehd; the cell has: baseline"):
        run(FakeBench({"baseline": {A: "passed"}}), expect={"core": {"patcehd": ()}})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({"suites": []}, "suites is empty", id="no-suite"),
        pytest.param({"suites": [{"name": "a", "source": "wheel", "select": ["t"]}]}, "source 'wheel'", id="source"),
        pytest.param({"suites": [{"name": "a", "source": "pin"}]}, "select is empty", id="no-select"),
        pytest.param({"suites": [{"name": "a", "source": "newer", "select": ["x.py::t"]}]}, "needs a version",
                     id="version"),
        pytest.param({"suites": [{"name": "a", "source": "newer", "select": ["x.py"], "version": "1"}]},
                     "and node ids", id="no-node-id"),
        *(pytest.param({"suites": [{"name": "a", "source": "pin", "select": ["tests", entry]}]}, "leaves the tests' root",
                       id=entry) for entry in ("/etc/x.py", "../x.py", "tests/../../x.py::t", "tests/..[1]")),
        *(pytest.param({"suites": [{"name": "a", "source": "newer", "select": ["x.py::t"], "version": version}]},
                       "is no version", id=f"version-{version!r}") for version in ("../0.30", "latest", " 0.30.0", ">=1")),
        pytest.param({"suites": [{"name": "a", "source": "series", "workers": 65}]}, "workers is at most 64",
                     id="workers"),
        pytest.param({"suites": [{"name": "a", "source": "series", "workers": -1}]}, "workers is 0 or more",
                     id="workers-below-0"),
        pytest.param({"suites": [{"name": "a", "source": "series", "time_out": 3}]}, "Unexpected keyword",
                     id="unknown-key"),
        pytest.param({"suites": [{"name": "a", "source": "series"}] * 2}, "same name", id="twice"),
        pytest.param({"suites": [{"name": "a", "source": "series"}], "expect": {"b": {}}}, "expect names suite b",
                     id="expect-suite"),
        pytest.param({"suites": [{"name": "a", "source": "series"}], "reruns": -1}, "reruns", id="reruns"),
        pytest.param({"suites": [{"name": "a", "source": "series"}],
                      "expect": {"a": {"p": {"failing": ["t"], "messages": {"u": "x"}}}}},
                     "messages names u", id="messages"),
    ],
)
def test_options_are_refused_with_a_reason(options, says):
    with pytest.raises(ValidationError, match=says):
        TypeAdapter(Unit).validate_python(options)


@pytest.mark.parametrize("options", [
    {"source": "pin", "select": ["tests/x.py::test_a[../b]"]}, {"source": "series", "workers": 64},
    {"source": "newer", "select": ["x.py::t"], "version": "0.30.0rc1+cpu"},
])
def test_options_that_are_fine(options):
    assert TypeAdapter(Unit).validate_python({"suites": [{"name": "a", **options}]}).suites[0].name == "a"


def test_options_as_yaml_gives_them():
    unit = TypeAdapter(Unit).validate_python({
        "suites": [{"name": "a", "source": "pin", "select": ["tests/v1/core"], "marker": "cpu_test", "workers": 0}],
        "expect": {"a": {"baseline": {"failing": [A], "messages": {A: "71"}}, "patched": []}},
    })
    assert unit.suites[0].marker == "cpu_test"
    assert unit.expect["a"] == {"baseline": Failing((A,), {A: "71"}), "patched": ()}


@pytest.mark.parametrize("side_by_side", [True, False])
def test_arms_run_side_by_side_where_the_suite_says_so(side_by_side):
    class Meeting(FakeBench):
        within, most = 0, 0

        def pytest(self, arm, suite):
            self.within += 1
            self.most = max(self.most, self.within)
            if side_by_side:
                meeting.wait()
            self.within -= 1
            return super().pytest(arm, suite)

    meeting = threading.Barrier(2, timeout=10)
    bench = Meeting({"baseline": {"t.py::a": "failed"}, "patched": {"t.py::a": "passed"}})
    outcome, records = run(bench, suites=(replace(SUITE, side_by_side=side_by_side),))
    assert "fixed 1" in outcome.detail and bench.most == 1 + side_by_side
    assert [r.conditions["arm"] for r in records] == ["baseline", "patched"]
