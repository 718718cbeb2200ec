"""Which side a test changed to."""

import pytest

from farm.report.suites import digest, plain


def row(arm, nodeid, outcome, message=None, number=0, suite="s", cell="c"):
    return {"cell": cell, "suite": suite, "arm": arm, "nodeid": nodeid, "outcome": outcome, "message": message,
            "round": number}


def compared(before, after):
    """The group that a test lands in, given its outcomes round by round on each arm."""
    rows = [row(arm, "t", outcome, number=i) for arm, outcomes in (("b", before), ("p", after))
            for i, outcome in enumerate(outcomes)]
    rows += [row(arm, "anchor", "passed") for arm in "bp"]
    (suite,) = digest(rows, {"c": ["b", "p"]})
    return [name for name, tests in suite.groups if tests]


@pytest.mark.parametrize(("before", "after", "groups"), [
    (["passed"], ["passed"], []),
    (["passed"], ["skipped"], []),
    (["failed"], ["passed"], ["fixed"]),
    (["error"], ["xfailed"], ["fixed"]),
    (["passed"], ["failed"], ["broken"]),
    (["skipped"], ["crashed"], ["broken"]),
    (["passed"], ["failed", "failed"], ["broken"]),
    (["failed"], ["timeout"], ["still failing"]),
    (["passed"], ["failed", "passed"], ["flaky"]),
    (["failed", "passed"], ["failed"], ["flaky"]),
    (["passed"], ["missing"], ["on one arm only"]),
    ([], ["passed"], ["on one arm only"]),
    (["missing"], ["missing"], []),
])
def test_groups(before, after, groups):
    assert compared(before, after) == groups


def test_counts_are_of_the_first_round():
    rows = [row("b", "t1", "passed"), row("b", "t2", "failed"), row("b", "t2", "failed", number=1),
            row("p", "t1", "passed")]
    (suite,) = digest(rows, {"c": ["b", "p"]})
    assert suite.counts == ("1 passed, 1 failed", "1 passed")


def test_the_message_is_the_first_line_of_the_failing_arm():
    rows = [row("b", "t", "passed", "not this"), row("p", "t", "failed", "\n\x1b[31mE   assert 71 == 7 + 1\x1b[0m\nmore"),
            row("p", "t", "failed", "second round", number=1)]
    (suite,) = digest(rows, {"c": ["b", "p"]})
    assert [(t.nodeid, t.message) for t in suite.broken] == [("t", "assert 71 == 7 + 1")]


def test_one_arm_alone_has_only_counts():
    (suite,) = digest([row("b", "t", "failed")], {"c": ["b"]})
    assert (suite.arms, suite.counts, suite.words) == (("b",), ("1 failed",), "")


def test_three_arms_are_each_compared_with_the_first():
    rows = [row("stock", "t", "passed"), row("a", "t", "failed"), row("z", "t", "passed")]
    suites = digest(rows, {"c": ["stock", "z", "a"]})
    assert [(s.arms, s.words) for s in suites] == [
        (("stock", "z"), "no difference, none failing"), (("stock", "a"), "1 broken")]


def test_suites_and_cells_stay_apart():
    rows = [row("b", "t", "passed", suite=s, cell=c) for c in ("c2", "c1") for s in ("x", "a")]
    assert [(s.cell, s.suite) for s in digest(rows, {})] == [("c1", "a"), ("c1", "x"), ("c2", "a"), ("c2", "x")]


@pytest.mark.parametrize(("text", "clean"), [
    (None, ""), ("a\tb\nc", "a\tb\nc"), ("\x1b[1;31mred\x1b[0m", "red"), ("bell\x07 \x9b1m\x00", "bell 1m"),
])
def test_plain(text, clean):
    assert plain(text) == clean
