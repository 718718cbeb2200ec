"""prefill against a bench that plays servers: every way it can end, and what it records on the way."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from pydantic import TypeAdapter, ValidationError

from farm.bench import Arm, BootFacts, BootSlot, GaugeTrace, Prompt, Reply, balanced_order
from farm.errors import InvalidMeasurement
from farm.records import Measurement, Outcome, Reason, Sample, Verdict
from jobs.prefill import Prefill


@dataclass
class FakeSampling:
    points: tuple[tuple[float, float], ...]
    missed: int = 0

    def wait(self, seconds: float) -> None:
        pass

    def trace(self) -> GaugeTrace:
        return GaugeTrace("vllm:kv_cache_usage_perc", self.points, 0.05 if self.points else None, self.missed)


@dataclass
class FakeServer:
    bench: "FakeBench"
    slot: BootSlot
    facts: BootFacts
    served: int = 0

    def complete(self, prompt, *, max_tokens, seed=None, temperature=0.0, deadline_s):
        self.served = prompt.tokens
        self.bench.sent.append((self.slot.arm, self.slot.boot, prompt.sha256))
        return Reply(ttft_s=prompt.tokens / 1000, total_s=1.0, prompt_tokens=self.bench.counted or prompt.tokens,
                     completion_tokens=max_tokens, cached_tokens=self.bench.cached)

    @contextmanager
    def sampled(self, gauge, interval_s):
        sampling = FakeSampling(())
        before, self.served = self.served, 0
        yield sampling
        if self.served:
            peak = self.bench.peak(self.slot, self.served)
            sampling.points = () if peak is None else ((0.0, 0.0), (0.05, peak), (0.1, 0.0))
        else:
            self.served = before
            sampling.points = ((0.0, 0.0),)


@dataclass
class FakeBench:
    peaks: dict = field(default_factory=dict)  # arm -> factor; None: no sample
    pools: dict = field(default_factory=dict)  # (arm, boot) -> tokens
    cached: int | None = 0
    counted: int | None = None
    arms: dict = field(default_factory=lambda: {n: Arm(n, n, ()) for n in ("baseline", "patched")})
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    booted: list = field(default_factory=list)
    sent: list = field(default_factory=list)

    def peak(self, slot, tokens):
        factor = self.peaks.get(slot.arm, 1.0)
        return None if factor is None else factor * tokens / 10_000

    @contextmanager
    def serve(self, slot: BootSlot) -> Iterator[FakeServer]:
        self.booted.append(slot.arm)
        yield FakeServer(self, slot, BootFacts(pool_tokens=self.pools.get((slot.arm, slot.boot), 50_000), block_size=416))

    def order(self, arms, boots):
        return balanced_order(arms, boots)

    def prompt(self, tokens, *, salt):
        return Prompt((1,) * tokens, f"{salt}/{tokens}")

    def progress(self, text):
        pass


LOWER = ({"metric": "kv_peak", "direction": "lower", "margin": 0.1, "at": [4000]},)
SAME = ({"metric": "kv_peak", "direction": "unchanged", "margin": 0.01},)


def job(**options):
    return TypeAdapter(Prefill).validate_python({"prompts": [1000, 4000], "warmup_tokens": 0, **options})


def outcome(bench, **options):
    *records, last = list(job(**options).run(bench))
    assert isinstance(last, Outcome)
    return records, last


@pytest.mark.parametrize(
    ("bench", "options", "verdict", "reason"),
    [
        (FakeBench(), {"expect": SAME}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(peaks={"patched": 0.6}), {"expect": LOWER}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(peaks={"patched": 0.6}), {"expect": SAME}, Verdict.FAIL, Reason.CHANGED),
        (FakeBench(), {"expect": LOWER}, Verdict.FAIL, Reason.EFFECT_ABSENT),
        (FakeBench(peaks={"patched": 1.5}), {"expect": LOWER}, Verdict.FAIL, Reason.EFFECT_WRONG_WAY),
        (FakeBench(), {"expect": LOWER, "boots": 1}, Verdict.INVALID, Reason.MORE_BOOTS_NEEDED),
        (FakeBench(), {}, Verdict.PASS, Reason.NO_REGRESSION),
    ],
    ids=["same-as-expected", "lower-as-expected", "changed", "absent", "wrong-way", "too-few-boots", "no-expect"],
)
def test_verdicts(bench, options, verdict, reason):
    _, last = outcome(bench, **options)
    assert (last.verdict, last.reason) == (verdict, reason), last.detail


@pytest.mark.parametrize(
    ("bench", "reason", "says"),
    [
        (FakeBench(pools={("patched", 0): 49_000}), Reason.POOL_MISMATCH,
         "pool_tokens 50000 on baseline boot 0, 49000 on patched boot 0"),
        (FakeBench(pools={("baseline", 1): 49_000}), Reason.POOL_MISMATCH, "49000 on baseline boot 1"),
        (FakeBench(pools={("baseline", 0): None}), Reason.POOL_MISMATCH, "did not say its pool's size"),
        (FakeBench(cached=16), Reason.PROMPT_CACHED, "16 prompt tokens came from the prefix cache"),
        (FakeBench(cached=None), Reason.PROMPT_CACHED, "--enable-prompt-tokens-details"),
        (FakeBench(counted=999), Reason.PROMPT_DIFFERS, "the server counted 999 prompt tokens"),
        (FakeBench(peaks={"patched": None}), Reason.NO_SAMPLES, "no sample of vllm:kv_cache_usage_perc"),
    ],
    ids=["pools-between-arms", "pools-between-boots", "pool-unknown", "cached", "cached-unknown", "tokens-differ",
         "no-samples"],
)
def test_a_broken_measurement_is_no_evidence(bench, reason, says):
    with pytest.raises(InvalidMeasurement) as caught:
        list(job(expect=SAME).run(bench))
    assert caught.value.reason is reason
    assert says in str(caught.value)


def test_boots_are_balanced_and_prompts_equal_in_every_boot():
    bench = FakeBench()
    outcome(bench, expect=SAME, boots=2)
    assert bench.booted == ["baseline", "patched", "patched", "baseline"]
    per_boot = {}
    for arm, boot, sha in bench.sent:
        per_boot.setdefault((arm, boot), []).append(sha)
    assert len({tuple(v) for v in per_boot.values()}) == 1
    assert len(set(per_boot["baseline", 0])) == 2


def test_each_request_leaves_its_figures_with_their_conditions():
    records, _ = outcome(FakeBench(peaks={"patched": 0.5}), expect=SAME, boots=2)
    peaks = [r for r in records if isinstance(r.record, Measurement) and r.record.metric == "kv_peak"]
    assert [(r.conditions["arm"], r.conditions["boot"], r.conditions["prompt_tokens"], r.record.value) for r in peaks[:4]] == [
        ("baseline", 0, 1000, 0.1), ("baseline", 0, 4000, 0.4), ("patched", 0, 1000, 0.05), ("patched", 0, 4000, 0.2)]
    assert {m.record.metric for m in records if isinstance(m.record, Measurement)} == {
        "kv_peak", "kv_settle", "ttft", "prefill_tokens_per_s"}
    assert all(r.conditions["pool_tokens"] == 50_000 and r.conditions["cached_tokens"] == 0 for r in peaks)
    assert len([r for r in records if isinstance(r.record, Sample)]) == 4 * 2 * 3


@pytest.mark.parametrize(
    "options",
    [{"prompts": []}, {"prompts": [0]}, {"prompts": [10, 10]}, {"boots": 0}, {"interval_s": 0}, {"promts": [1]},
     {"expect": [{"metric": "kv_peak", "direction": "sideways"}]},
     {"expect": [{"metric": "kv_peak", "direction": "lower", "at": [77]}]}],
    ids=["no-prompt", "zero", "twice", "boots", "interval", "typo", "direction", "unknown-length"],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValidationError):
        job(**options)
