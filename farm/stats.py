"""Deciding an A/B: paired comparison, noise floor, the rule and its words.

Pure.  One pair is one baseline boot and the patched boot beside it in the
balanced order.  The rule is written before the run; every pair must agree
with it (DESIGN.md, "Deciding an A/B"):

    every pair beyond margin and noise, the way that the rule says      PASS
    every pair beyond margin and noise, the other way                   FAIL     effect-wrong-way
    no pair beyond the margin, and the noise is below it                FAIL     effect-absent
    some pairs beyond the margin and some not                           INVALID  within-noise
    a pair within the noise floor, and the noise is not below the margin INVALID within-noise
    fewer pairs than the rule wants                                     INVALID  more-boots-needed

For `unchanged`: PASS where every pair is within its tolerance, FAIL (changed)
where one strays beyond the noise as well, INVALID (within-noise) otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from farm.errors import InvalidMeasurement
from farm.records import Outcome, Reason, Verdict

_ROUNDING = 1e-9  # 1 - 0.8 is not quite 0.2: a figure on the margin clears it


class Direction(str, Enum):
    """What the patch claims of the metric."""

    LOWER = "lower"
    HIGHER = "higher"
    UNCHANGED = "unchanged"


@dataclass(frozen=True)
class Pair:
    """One metric's value on the two boots of a pair, in the metric's unit."""

    baseline: float
    patched: float


@dataclass(frozen=True)
class Rule:
    """What counts as an effect.  `margin` and `tolerance` are fractions of the baseline (0.1: 10 %).

    `tolerance` is how far `unchanged` may stray; where it is None, `margin` says that.
    """

    metric: str
    direction: Direction
    margin: float
    min_pairs: int = 2
    tolerance: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "direction", Direction(self.direction))
        if not 0 <= self.margin < math.inf or not 0 <= (self.tolerance or 0) < math.inf or self.min_pairs < 1:
            raise ValueError(f"rule for {self.metric}: margin and tolerance are finite and at least 0, min_pairs at least 1")


@dataclass(frozen=True)
class Comparison:
    """A decided rule.  Ratios are of the means, None where the divisor is 0; `changes` are (patched - baseline)
    / baseline of each pair, infinite where a baseline of 0 became something."""

    rule: Rule
    verdict: Verdict
    reason: Reason
    detail: str
    baseline: float | None
    patched: float | None
    ratio: float | None  # patched / baseline
    inverse: float | None  # baseline / patched
    changes: tuple[float, ...]
    noise: float | None
    unproven: tuple[str, ...] = ()

    def outcome(self) -> Outcome:
        return Outcome(self.verdict, self.reason, self.detail, self.unproven)


def noise_floor(same_arm_values: Sequence[Sequence[float]]) -> float | None:
    """The A/A noise: the largest (max - min) / mean between boots of one arm, over the arms.

    None where no arm has two values: the noise was not measured.
    """
    spreads = []
    for values in same_arm_values:
        if len(values) < 2:
            continue
        spread = max(values) - min(values)
        mean = abs(math.fsum(values) / len(values))
        spreads.append(0.0 if spread == 0 else spread / mean if mean else math.inf)
    return max(spreads, default=None)


def compare(pairs: Sequence[Pair], rule: Rule, noise: float | None,
            arms: tuple[str, str] = ("baseline", "patched")) -> Comparison:
    """Judge pairs by a rule.  `noise` is `noise_floor`'s; None counts as unmeasured and is said in `unproven`.  `arms`
    are the names of the two sides, for the words.

    Raises InvalidMeasurement (no-samples) for a value that is no finite number.
    """
    for number, pair in enumerate(pairs):
        if not (math.isfinite(pair.baseline) and math.isfinite(pair.patched)):
            raise InvalidMeasurement(f"{rule.metric}, pair {number}: {pair.baseline} and {pair.patched} cannot be "
                                     "compared; see the boot's samples", reason=Reason.NO_SAMPLES)
    changes = tuple(relative_change(p.baseline, p.patched) for p in pairs)
    baseline = math.fsum(p.baseline for p in pairs) / len(pairs) if pairs else None
    patched = math.fsum(p.patched for p in pairs) / len(pairs) if pairs else None
    verdict, reason, why = _decide(changes, rule, noise)
    unproven = () if noise is not None or not pairs else (
        f"{rule.metric}: the noise floor was not measured (one boot an arm), only the margin judged",)
    found = f"{rule.metric} is {words(baseline, patched, arms)}. Pairs: {_list(changes)}. " if pairs else ""
    return Comparison(rule, verdict, reason, f"{found}{why}.", baseline, patched, ratio(patched, baseline),
                      ratio(baseline, patched), changes, noise, unproven)


def _decide(changes: Sequence[float], rule: Rule, noise: float | None) -> tuple[Verdict, Reason, str]:
    if (short := rule.min_pairs - len(changes)) > 0:
        return (Verdict.INVALID, Reason.MORE_BOOTS_NEEDED,
                f"More boots needed: {len(changes)} of {rule.min_pairs} pairs for {rule.metric}, so {short} more "
                f"{'boot' if short == 1 else 'boots'} an arm")
    if rule.direction is Direction.UNCHANGED:
        return _decide_unchanged(changes, rule, noise)
    floor = noise or 0.0
    way = rule.direction.value
    effects = [-c if rule.direction is Direction.LOWER else c for c in changes]
    clears = [e >= rule.margin - _ROUNDING and e > floor + _ROUNDING for e in effects]
    against = [-e >= rule.margin - _ROUNDING and -e > floor + _ROUNDING for e in effects]
    if all(clears):
        return Verdict.PASS, Reason.AS_EXPECTED, f"Every pair is {way}, beyond {_limits(rule.margin, noise)}"
    if all(against):
        return Verdict.FAIL, Reason.EFFECT_WRONG_WAY, (
            f"The rule wants {way}: every pair goes the other way, beyond {_limits(rule.margin, noise)}")
    if floor > _ROUNDING and floor >= rule.margin - _ROUNDING and any(abs(e) <= floor + _ROUNDING for e in effects):
        return Verdict.INVALID, Reason.WITHIN_NOISE, (
            f"An effect within the noise floor of {percent(floor)} is no evidence, and the margin of "
            f"{percent(rule.margin)} is not above that noise: warm the caches or quiet the card, then boot more pairs")
    if any(clears):
        return Verdict.INVALID, Reason.WITHIN_NOISE, (
            f"The pairs disagree: {sum(clears)} of {len(effects)} {'is' if sum(clears) == 1 else 'are'} {way} beyond "
            f"{_limits(rule.margin, noise)}, the rest not; boot more pairs")
    return Verdict.FAIL, Reason.EFFECT_ABSENT, (
        f"The rule wants {way}: no pair is, beyond {_limits(rule.margin, noise)}")


def _decide_unchanged(changes: Sequence[float], rule: Rule, noise: float | None) -> tuple[Verdict, Reason, str]:
    allowed = rule.margin if rule.tolerance is None else rule.tolerance
    strays = [abs(c) for c in changes if abs(c) > allowed + _ROUNDING]
    if not strays:
        return Verdict.PASS, Reason.AS_EXPECTED, f"Unchanged: every pair is within {percent(allowed)}"
    if noise is not None and max(strays) <= noise + _ROUNDING:
        return Verdict.INVALID, Reason.WITHIN_NOISE, (
            f"A pair strays beyond {percent(allowed)}, yet no further than the noise floor of {percent(noise)}: "
            "evidence neither of a change nor of none; warm the caches or quiet the card, then boot more pairs")
    return Verdict.FAIL, Reason.CHANGED, (
        f"The rule wants it unchanged: {len(strays)} of {len(changes)} pairs "
        f"{'strays' if len(strays) == 1 else 'stray'} beyond {_limits(allowed, noise)}")


def _limits(margin: float, noise: float | None) -> str:
    floor = "(the noise was not measured)" if noise is None else f"and the noise floor of {percent(noise)}"
    return f"the margin of {percent(margin)} {floor}"


# --- numbers in words -----------------------------------------------------------------------


def relative_change(baseline: float, patched: float) -> float:
    """(patched - baseline) / |baseline|; 0 where both are 0, infinite where only the baseline is."""
    if patched == baseline:
        return 0.0
    return (patched - baseline) / abs(baseline) if baseline else math.copysign(math.inf, patched)


def ratio(dividend: float | None, divisor: float | None) -> float | None:
    return None if dividend is None or not divisor else dividend / divisor


def change_words(baseline: float, patched: float) -> str:
    """Lower or higher than the baseline, and by how much: "30.7 % lower"."""
    change = relative_change(baseline, patched)
    if change == 0:
        return "the same"
    way = "lower" if change < 0 else "higher"
    return way if math.isinf(change) else f"{percent(abs(change))} {way}"


def words(baseline: float, patched: float, arms: tuple[str, str] = ("baseline", "patched")) -> str:
    """The change in words, both values and both ratios; `arms` are their names."""
    first, second = arms
    if baseline == patched:
        return f"the same on both arms ({number(baseline)})"
    ratios = ((f"{second}/{first}", ratio(patched, baseline)), (f"{first}/{second}", ratio(baseline, patched)))
    told = ", ".join(f"{name} {'undefined' if value is None else number(value)}" for name, value in ratios)
    return f"{change_words(baseline, patched)} on {second} ({number(patched)} against {number(baseline)}; {told})"


def number(value: float) -> str:
    """Four significant digits, thousands grouped: 0.5342, 11.2, 176,020."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(fraction: float) -> str:
    """A fraction as a percentage: one decimal, more where it would read 0."""
    if not math.isfinite(fraction):
        return "without bound"
    value = 100 * fraction
    digits = f"{value:.1f}" if value == 0 or abs(value) >= 0.05 else f"{value:.2g}"
    return f"{digits.removesuffix('.0')} %"


def _list(changes: Sequence[float]) -> str:
    return ", ".join("0 %" if c == 0 else "up from 0" if c == math.inf else f"{'+' if c > 0 else '-'}{percent(abs(c))}"
                     for c in changes)
