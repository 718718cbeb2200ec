"""A matrix with other arms than its own: an A/A, and what becomes of what was expected."""

import pytest

from farm import config, plan
from farm import matrix as matrix_run
from farm.config import MatrixConfig
from farm.errors import UsageError
from farm.preflight import read_tests
from farm.rearm import rearm, words
from farm.series import load_series, series_directory

GPU_TINY = config.PROJECT / "configs/matrix/gpu-tiny.yaml"


def matrix(*, cells, arms=None):
    arms = arms or {"baseline": {"patches": "none"}, "patched": {"env": {"A": 1}}, "one-removed": {"without": ["x.patch"]}}
    return MatrixConfig(name="m", pins=("p",), arms=arms, cells=tuple(cells))


@pytest.mark.parametrize(
    ("expect", "chosen", "left"),
    [
        ({"baseline": "not-served", "patched": "served"}, "patched,patched", {"patched": "served", "patched-again": "served"}),
        ({"baseline": "not-served", "patched": "served"}, "baseline,baseline",
         {"baseline": "not-served", "baseline-again": "not-served"}),
        ({"baseline": "not-served", "patched": "served"}, "patched", {"patched": "served"}),
        ({"baseline": "not-served", "patched": "served"}, "one-removed,one-removed", None),
        ({"up": {"baseline": ["t"], "patched": []}}, "patched,patched", {"up": {"patched": [], "patched-again": []}}),
        ({"s": {"arms": {"baseline": {"m": 1}, "patched": {"m": 2}}}, "e": {"arms_equal": True}}, "patched,patched",
         {"s": {"arms": {"patched": {"m": 2}, "patched-again": {"m": 2}}}, "e": {"arms_equal": True}}),
        ({"s": {"arms": {"baseline": {"m": 1}}}, "e": {"arms_equal": True}}, "patched,patched", {"e": {"arms_equal": True}}),
        ([{"metric": "kv_peak", "direction": "lower"}], "patched,patched", None),
        ([{"metric": "kv_peak", "direction": "lower"}, {"metric": "ttft", "direction": "unchanged", "probe": True}],
         "patched,patched", [{"metric": "ttft", "direction": "unchanged", "probe": True}]),
        ([{"metric": "kv_peak", "direction": "lower"}], "one-removed,patched", [{"metric": "kv_peak", "direction": "lower"}]),
        (None, "patched,patched", None),
    ],
    ids=["offload", "offload-baseline", "one-arm", "arm-without-expectation", "unit", "replay", "replay-none-left", "rules",
         "rules-about-the-probe", "rules-of-two-arms", "nothing"],
)
def test_what_is_expected_goes_with_its_arm_and_effects_are_not_expected_of_an_a_a(expect, chosen, left):
    (cell,) = rearm(matrix(cells=[{"job": "x", "expect": expect}]), tuple(chosen.split(","))).cells
    assert cell.expect == left


def test_a_twin_is_the_arm_under_another_name():
    made = rearm(matrix(cells=[{"job": "x"}, {"job": "y", "arms": ["baseline"]}]), ("patched", "patched"))
    assert [cell.arms for cell in made.cells] == [("patched", "patched-again")] * 2
    assert made.arms["patched-again"] is made.arms["patched"]


def test_a_control_keeps_its_own_arms():
    control = {"job": "x", "arms": ["one-removed"], "control": "failing-set-differs", "expect": {"s": {"one-removed": []}}}
    whole = matrix(cells=[control])
    made = rearm(whole, ("patched", "patched"))
    assert made.cells == whole.cells and set(whole.arms) < set(made.arms)


@pytest.mark.parametrize(("chosen", "says"), [
    (("patchde",), "the matrix has no arm 'patchde'; it has: baseline, patched, one-removed"),
    (("patched",) * 3, "patched is named more than twice"),
], ids=["unknown", "three-times"])
def test_arms_that_cannot_be_meant(chosen, says):
    with pytest.raises(UsageError, match=says):
        rearm(matrix(cells=[{"job": "x"}]), chosen)


@pytest.mark.parametrize(("chosen", "says"), [
    (("patched", "patched"), "arms patched, patched instead of the cells' own; controls keep theirs. An A/A: rules that "
                             "compare two arms are left out"),
    (("a", "b"), "arms a, b instead of the cells' own; controls keep theirs"),
], ids=["twice", "others"])
def test_what_is_run_instead_is_told(chosen, says):
    assert words(chosen) == says


def test_a_twin_takes_no_arms_name():
    arms = {"a": {}, "a-again": {"patches": "none"}}
    with pytest.raises(UsageError, match="has an arm a-again of its own"):
        rearm(matrix(cells=[{"job": "x"}], arms=arms), ("a", "a"))


def cells(arms=()):
    loaded = config.load(GPU_TINY, arms=arms)
    series = load_series(series_directory(loaded.series_root, "0.29.0"))
    return plan.cells(loaded, {"site-cuda": series}, read_tests(loaded.series_root))


def test_the_cells_of_an_a_a_are_others_than_those_of_the_a_b():
    ours, twins = cells(), cells(("patched", "patched"))
    assert len(ours) == len(twins) and not {c.id for c in ours} & {c.id for c in twins}
    for cell in twins:
        first, second = cell.arms
        assert (first.name, second.name) == ("patched", "patched-again")
        assert (first.patches, first.env, first.args) == (second.patches, second.env, second.args)
    assert {c.id for c in twins} == {c.id for c in cells(("patched", "patched"))}


def test_an_a_a_is_resumed_as_one():
    asked = matrix_run.Request(GPU_TINY, ("prefill",), arms=("patched", "patched"))
    assert "--only prefill --arms patched,patched --resume r" in asked.resumption("r")
