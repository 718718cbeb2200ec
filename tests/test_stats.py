"""Deciding an A/B: every way that a comparison can end, with the words and figures it ends in."""

import math

import pytest

from farm.errors import InvalidMeasurement
from farm.records import Outcome, Reason, Verdict
from farm.stats import Direction, Pair, Rule, compare, noise_floor, number, percent, ratio, relative_change, words

PASS, FAIL, INVALID = Verdict.PASS, Verdict.FAIL, Verdict.INVALID
LOWER = Rule("kv_peak", Direction.LOWER, 0.10)
HIGHER = Rule("prefill_tokens_per_s", Direction.HIGHER, 0.10)
SAME = Rule("kv_peak", Direction.UNCHANGED, 0.02)
NOISY = Rule("kv_peak", Direction.LOWER, 0.05)


def pairs(*changes, baseline=1.0):
    return [Pair(baseline, baseline * (1 + c)) for c in changes]


@pytest.mark.parametrize(
    ("changes", "rule", "noise", "verdict", "reason"),
    [
        ((-0.30, -0.31), LOWER, 0.01, PASS, Reason.AS_EXPECTED),
        ((-0.10, -0.10), LOWER, 0.01, PASS, Reason.AS_EXPECTED),
        ((-0.0999, -0.0999), LOWER, 0.01, FAIL, Reason.EFFECT_ABSENT),
        ((0.0, 0.0), LOWER, 0.01, FAIL, Reason.EFFECT_ABSENT),
        ((0.0, 0.0), LOWER, None, FAIL, Reason.EFFECT_ABSENT),
        ((0.0, 0.0), Rule("kv_peak", "lower", 0.0), 0.0, FAIL, Reason.EFFECT_ABSENT),
        ((0.05, -0.05), LOWER, 0.01, FAIL, Reason.EFFECT_ABSENT),
        ((0.30, 0.05), LOWER, 0.01, FAIL, Reason.EFFECT_ABSENT),
        ((0.30, 0.31), LOWER, 0.01, FAIL, Reason.EFFECT_WRONG_WAY),
        ((-0.30, 0.30), LOWER, 0.01, INVALID, Reason.WITHIN_NOISE),
        ((-0.11, -0.09), LOWER, 0.01, INVALID, Reason.WITHIN_NOISE),
        ((-0.07, -0.08), NOISY, 0.08, INVALID, Reason.WITHIN_NOISE),
        ((0.0, 0.0), NOISY, 0.08, INVALID, Reason.WITHIN_NOISE),
        ((-0.08, -0.08), NOISY, 0.08, INVALID, Reason.WITHIN_NOISE),
        ((-0.20, -0.08), NOISY, 0.08, INVALID, Reason.WITHIN_NOISE),
        ((-0.20, -0.21), NOISY, 0.08, PASS, Reason.AS_EXPECTED),
        ((0.20, 0.21), NOISY, 0.08, FAIL, Reason.EFFECT_WRONG_WAY),
        ((-0.30,), LOWER, None, INVALID, Reason.MORE_BOOTS_NEEDED),
        ((), LOWER, None, INVALID, Reason.MORE_BOOTS_NEEDED),
        ((-0.30,), Rule("kv_peak", "lower", 0.1, min_pairs=1), None, PASS, Reason.AS_EXPECTED),
        ((0.30, 0.40), HIGHER, 0.01, PASS, Reason.AS_EXPECTED),
        ((-0.30, -0.40), HIGHER, 0.01, FAIL, Reason.EFFECT_WRONG_WAY),
        ((0.01, 0.02), HIGHER, 0.01, FAIL, Reason.EFFECT_ABSENT),
        ((0.0, 0.0), SAME, 0.0, PASS, Reason.AS_EXPECTED),
        ((0.02, -0.02), SAME, 0.5, PASS, Reason.AS_EXPECTED),
        ((0.021, 0.0), SAME, 0.001, FAIL, Reason.CHANGED),
        ((-0.30, -0.30), SAME, None, FAIL, Reason.CHANGED),
        ((0.03, 0.0), SAME, 0.03, INVALID, Reason.WITHIN_NOISE),
        ((0.03, 0.30), SAME, 0.03, FAIL, Reason.CHANGED),
        ((0.0,), SAME, None, INVALID, Reason.MORE_BOOTS_NEEDED),
        ((0.05, 0.05), Rule("kv_peak", "unchanged", 0.0, tolerance=0.06), 0.0, PASS, Reason.AS_EXPECTED),
        ((0.05, 0.05), Rule("kv_peak", "unchanged", 0.5, tolerance=0.0), 0.0, FAIL, Reason.CHANGED),
    ],
    ids=["effect", "effect-on-the-margin", "just-short", "no-effect", "no-effect-noise-unknown", "no-effect-margin-0",
         "both-small", "wrong-or-small", "wrong-way", "opposite-pairs", "straddle-the-margin", "below-noise",
         "zero-below-noise", "equal-to-noise", "one-pair-below-noise", "beyond-noise", "wrong-way-beyond-noise",
         "one-pair-of-two", "no-pair", "one-pair-allowed", "higher", "higher-wrong-way", "higher-absent",
         "same-exactly",
         "same-on-the-margin", "changed", "changed-noise-unknown", "stray-within-noise", "one-stray-beyond-noise",
         "same-too-few", "tolerance-wider", "tolerance-narrower"],
)
def test_verdict(changes, rule, noise, verdict, reason):
    comparison = compare(pairs(*changes), rule, noise)
    assert (comparison.verdict, comparison.reason) == (verdict, reason)


@pytest.mark.parametrize(
    ("values", "rule", "noise", "detail"),
    [
        ([(0.7705, 0.5342), (0.7704, 0.5342)], LOWER, 0.0013,
         "kv_peak is 30.7 % lower on patched (0.5342 against 0.7704; patched/baseline 0.6934, baseline/patched 1.442). "
         "Pairs: -30.7 %, -30.7 %. Every pair is lower, beyond the margin of 10 % and the noise floor of 0.1 %."),
        ([(0.2139, 0.2139), (0.2139, 0.2139)], SAME, 0.0,
         "kv_peak is the same on both arms (0.2139). Pairs: 0 %, 0 %. Unchanged: every pair is within 2 %."),
        ([(0.5, 0.25)], LOWER, None,
         "kv_peak is 50 % lower on patched (0.25 against 0.5; patched/baseline 0.5, baseline/patched 2). Pairs: -50 %. "
         "More boots needed: 1 of 2 pairs for kv_peak, so 1 more boot an arm."),
        ([], Rule("ttft", "lower", 0.1, min_pairs=3), None,
         "More boots needed: 0 of 3 pairs for ttft, so 3 more boots an arm."),
        ([(10, 10.7), (10, 9.5)], Rule("ttft", "lower", 0.05), 0.12,
         "ttft is 1 % higher on patched (10.1 against 10; patched/baseline 1.01, baseline/patched 0.9901). Pairs: +7 "
         "%, "
         "-5 %. An effect within the noise floor of 12 % is no evidence, and the margin of 5 % is not above that "
         "noise: "
         "warm the caches or quiet the card, then boot more pairs."),
        ([(10, 8), (10, 9.5), (10, 7)], Rule("ttft", "lower", 0.1), 0.01,
         "ttft is 18.3 % lower on patched (8.167 against 10; patched/baseline 0.8167, baseline/patched 1.224). Pairs: "
         "-20 %, -5 %, -30 %. The pairs disagree: 2 of 3 are lower beyond the margin of 10 % and the noise floor of "
         "1 %, the rest not; boot more pairs."),
        ([(10, 9.9), (10, 10)], Rule("ttft", "lower", 0.1), None,
         "ttft is 0.5 % lower on patched (9.95 against 10; patched/baseline 0.995, baseline/patched 1.005). Pairs: "
         "-1 %, 0 %. The rule wants lower: no pair is, beyond the margin of 10 % (the noise was not measured)."),
        ([(900, 450), (900, 450)], HIGHER, 0.02,
         "prefill_tokens_per_s is 50 % lower on patched (450 against 900; patched/baseline 0.5, baseline/patched 2). "
         "Pairs: -50 %, -50 %. The rule wants higher: every pair goes the other way, beyond the margin of 10 % and the "
         "noise floor of 2 %."),
        ([(1.0, 1.3), (1.0, 1.0)], SAME, 0.1,
         "kv_peak is 15 % higher on patched (1.15 against 1; patched/baseline 1.15, baseline/patched 0.8696). Pairs: "
         "+30 %, 0 %. The rule wants it unchanged: 1 of 2 pairs strays beyond the margin of 2 % and the noise floor of "
         "10 %."),
        ([(1.0, 1.05), (1.0, 1.0)], SAME, 0.1,
         "kv_peak is 2.5 % higher on patched (1.025 against 1; patched/baseline 1.025, baseline/patched 0.9756). "
         "Pairs: "
         "+5 %, 0 %. A pair strays beyond 2 %, yet no further than the noise floor of 10 %: evidence neither of a "
         "change nor of none; warm the caches or quiet the card, then boot more pairs."),
        ([(0.0, 0.5), (0.0, 0.5)], SAME, 0.0,
         "kv_peak is higher on patched (0.5 against 0; patched/baseline undefined, baseline/patched 0). Pairs: up from "
         "0, up from 0. The rule wants it unchanged: 2 of 2 pairs stray beyond the margin of 2 % and the noise "
         "floor of 0 %."),
        ([(0.0, 0.0), (0.0, 0.0)], LOWER, 0.0,
         "kv_peak is the same on both arms (0). Pairs: 0 %, 0 %. The rule wants lower: no pair is, beyond the margin "
         "of "
         "10 % and the noise floor of 0 %."),
    ],
    ids=["pass", "same", "one-more-boot", "three-more-boots", "within-noise", "disagree", "absent", "wrong-way",
         "changed", "stray-within-noise", "from-zero", "zero-on-both"],
)
def test_detail(values, rule, noise, detail):
    assert compare([Pair(*v) for v in values], rule, noise).detail == detail


def test_both_ratios_and_every_pair_are_kept():
    comparison = compare([Pair(8, 4), Pair(12, 6)], LOWER, 0.1)
    assert (comparison.baseline, comparison.patched, comparison.ratio, comparison.inverse) == (10, 5, 0.5, 2.0)
    assert comparison.changes == (-0.5, -0.5) and comparison.noise == 0.1


def test_unmeasured_noise_is_said_to_be_unproven():
    rule = Rule("kv_peak", "lower", 0.1, min_pairs=1)
    assert compare(pairs(-0.3), rule, None).outcome() == Outcome(
        PASS, Reason.AS_EXPECTED, compare(pairs(-0.3), rule, None).detail,
        ("kv_peak: the noise floor was not measured (one boot an arm), only the margin judged",))
    assert compare(pairs(-0.3), rule, 0.0).outcome().unproven == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("arm", ["baseline", "patched"])
def test_a_value_that_is_no_number_is_no_evidence(bad, arm):
    with pytest.raises(InvalidMeasurement, match=f"kv_peak, pair 1: .*{bad}") as caught:
        compare([Pair(1, 1), Pair(**{"baseline": 1, "patched": 1, arm: bad})], LOWER, None)
    assert caught.value.reason is Reason.NO_SAMPLES


@pytest.mark.parametrize("fields", [{"direction": "sideways"}, {"margin": -0.1}, {"min_pairs": 0}, {"tolerance": -1}])
def test_a_rule_that_means_nothing_is_refused(fields):
    with pytest.raises(ValueError, match=r"sideways|at least"):
        Rule(**{"metric": "kv_peak", "direction": "lower", "margin": 0.1} | fields)


@pytest.mark.parametrize(
    ("arms", "floor"),
    [
        ([], None),
        ([[1.0], [2.0]], None),
        ([[1.0, 1.0], [2.0]], 0.0),
        ([[0.9, 1.1], [5.0, 5.0]], 0.2),
        ([[1.0, 1.0], [4.0, 5.0, 6.0]], 0.4),
        ([[0.0, 0.0]], 0.0),
        ([[-1.0, 1.0]], math.inf),
    ],
    ids=["no-arm", "one-boot-an-arm", "one-arm-measured", "widest-arm", "three-boots", "all-zero", "mean-zero"],
)
def test_noise_floor(arms, floor):
    assert noise_floor(arms) == (None if floor is None else pytest.approx(floor))


@pytest.mark.parametrize(
    ("baseline", "patched", "change", "patched_over", "baseline_over", "said"),
    [
        (2.0, 1.0, -0.5, 0.5, 2.0, "50 % lower on patched (1 against 2; patched/baseline 0.5, baseline/patched 2)"),
        (0.0, 0.0, 0.0, None, None, "the same on both arms (0)"),
        (0.0, 3.0, math.inf, None, 0.0,
         "higher on patched (3 against 0; patched/baseline undefined, baseline/patched 0)"),
        (4.0, 0.0, -1.0, 0.0, None,
         "100 % lower on patched (0 against 4; patched/baseline 0, baseline/patched undefined)"),
        (-2.0, -1.0, 0.5, 0.5, 2.0, "50 % higher on patched (-1 against -2; patched/baseline 0.5, baseline/patched 2)"),
    ],
    ids=["halved", "both-zero", "from-zero", "to-zero", "negative"],
)
def test_words_and_ratios(baseline, patched, change, patched_over, baseline_over, said):
    assert relative_change(baseline, patched) == change
    assert (ratio(patched, baseline), ratio(baseline, patched)) == (patched_over, baseline_over)
    assert words(baseline, patched) == said


def test_words_use_the_arms_own_names():
    assert words(2, 1, ("stock", "ours")) == "50 % lower on ours (1 against 2; ours/stock 0.5, stock/ours 2)"


@pytest.mark.parametrize(("value", "text"), [
    (0.0, "0"), (16.0, "16"), (0.53421, "0.5342"), (11.24, "11.24"), (912.34, "912.3"), (1234.5, "1,234"),
    (176020, "176,020"), (0.00012345, "0.0001234"), (-5.5, "-5.5"), (math.inf, "inf"),
])
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("fraction", "text"), [
    (0.0, "0 %"), (0.001, "0.1 %"), (0.0001, "0.01 %"), (0.3067, "30.7 %"), (0.1, "10 %"), (12.0, "1200 %"),
    (math.inf, "without bound"),
])
def test_percent(fraction, text):
    assert percent(fraction) == text
