"""prefill against a bench that plays servers: every way it can end, and what it records on the way."""

import json
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from pydantic import TypeAdapter, ValidationError

from farm.bench import Arm, BootFacts, BootSlot, GaugeTrace, ProbeTrace, Prompt, Reply, balanced_order
from farm.errors import InvalidMeasurement, RequestFailed
from farm.prompts import make_prompt
from farm.records import Measurement, Outcome, Reason, Sample, Tagged, Verdict
from farm.schemas import stamp
from jobs.longprompt import joined
from jobs.prefill import Prefill

SHORT = 64  # tokens of what counts as a short request here
MTP = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3}))


@dataclass
class FakeSampling:
    points: tuple[tuple[float, float], ...]
    missed: int = 0

    def wait(self, seconds: float) -> None:
        pass

    def trace(self) -> GaugeTrace:
        return GaugeTrace("vllm:kv_cache_usage_perc", self.points, 0.05 if self.points else None, self.missed)


@dataclass
class FakeProbing:
    seen: ProbeTrace | None

    def trace(self) -> ProbeTrace | None:
        return self.seen


@dataclass
class FakeServer:
    bench: "FakeBench"
    slot: BootSlot
    facts: BootFacts
    served: int = 0  # tokens of the long prompt in the block that is being sampled
    watched: bool = False  # whether a gauge is being sampled: not while a prefix is served
    cache: tuple[int, ...] = ()  # the last long prompt
    shorts: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def complete(self, prompt, *, max_tokens, seed=None, temperature=0.0, deadline_s):
        bench = self.bench
        bench.sent.append((self.slot.arm, self.slot.boot, prompt.sha256))
        if prompt.tokens <= SHORT:
            self.shorts.release()
            if bench.short_fails:
                raise RequestFailed("the stream was cut")
            return Reply(bench.short_ttft.get(self.slot.arm, 0.01), 0.1, prompt.tokens, max_tokens, 0)
        for _ in range(bench.hold if self.watched else 0):
            assert self.shorts.acquire(timeout=10), "a short request was promised"
        found = bench.cached
        if found == "as vLLM":
            n = len(self.cache)
            found = max(0, n // 416 - 1) * 416 if n and prompt.token_ids[:n] == self.cache else 0
        self.cache, self.served = prompt.token_ids, prompt.tokens
        ttft_s = bench.ttft.get(self.slot.probe, prompt.tokens / 1000)
        return Reply(ttft_s, ttft_s + 1.0, bench.counted or prompt.tokens, max_tokens, found)

    @contextmanager
    def sampled(self, gauge, interval_s):
        sampling = FakeSampling(())
        before, self.served, self.watched = self.served, 0, True
        yield sampling
        self.watched = False
        if self.served:
            peak = self.bench.peak(self.slot, self.served)
            sampling.points = () if peak is None else ((0.0, 0.0), (0.05, peak), (0.1, 0.0))
        else:
            self.served = before
            sampling.points = ((0.0, 0.0),)

    @contextmanager
    def probed(self):
        probing = FakeProbing(None)
        yield probing
        if self.facts.probe and self.served:
            probing.seen = ProbeTrace(self.bench.steps, 1000, round(1000 * self.served / 10_000), 23, 5, 1)


@dataclass
class FakeBench:
    peaks: dict = field(default_factory=dict)  # arm -> factor; None: no sample
    pools: dict = field(default_factory=dict)  # (arm, boot) -> tokens
    cached: int | str | None = "as vLLM"
    counted: int | None = None
    block_size: int | None = 416
    argv: tuple[str, ...] = MTP
    probe_works: bool = True
    probe_peak: float = 1.0  # factor of the peak that is sampled in a boot with the probe
    steps: int = 12
    ttft: dict = field(default_factory=dict)  # whether with the probe -> seconds
    hold: int = 0  # short requests that a long one waits for
    short_ttft: dict = field(default_factory=dict)  # arm -> seconds
    short_fails: bool = False
    arms: dict = field(default_factory=lambda: {n: Arm(n, n, ()) for n in ("baseline", "patched")})
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    booted: list = field(default_factory=list)
    slots: list = field(default_factory=list)
    sent: list = field(default_factory=list)

    def peak(self, slot, tokens):
        factor = self.peaks.get(slot.arm, 1.0)
        return None if factor is None else factor * (self.probe_peak if slot.probe else 1.0) * tokens / 10_000

    @contextmanager
    def serve(self, slot: BootSlot) -> Iterator[FakeServer]:
        self.booted.append(slot.arm)
        self.slots.append(slot)
        yield FakeServer(self, slot, BootFacts(
            pool_tokens=self.pools.get((slot.arm, slot.boot), 50_000), block_size=self.block_size, argv=self.argv,
            probe=slot.probe and self.probe_works))

    def order(self, arms, boots):
        return balanced_order(arms, boots)

    def prompt(self, tokens, *, salt):
        return Prompt((zlib.crc32(salt.encode()),) * tokens, f"{salt}/{tokens}")

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


PREFIXED = {"prompts": [3000], "cached_prefix": [{"prefix": 2000, "prompt": 3000}, {"prefix": 2000, "prompt": 5000}]}


def rows(records, metric, **conditions):
    """Values of a metric, of rows with these conditions."""
    return [r.record.value for r in records if isinstance(r.record, Measurement) and r.record.metric == metric
            and conditions.items() <= r.conditions.items()]


def test_a_prompt_after_its_prefix_is_measured_beside_a_fresh_one_of_the_same_length():
    bench = FakeBench()
    records, last = outcome(bench, **PREFIXED, boots=1)
    assert last.verdict is Verdict.PASS
    for arm in bench.arms:  # floor(2000 / 416) - 1 blocks
        assert rows(records, "kv_peak", arm=arm, cached_tokens=0) == [0.3]
        assert rows(records, "kv_peak", arm=arm, cached_tokens=1248) == [0.3, 0.5]
    assert rows(records, "prefill_tokens_per_s", cached_tokens=1248, prompt_tokens=5000) == [750.4, 750.4]
    notes = {r.conditions["cached_tokens"]: r.record.note for r in records
             if isinstance(r.record, Measurement) and r.record.metric == "kv_peak"}
    assert notes == {0: None, 1248: "after a prefix of 2000 tokens"}
    assert "only prompt lengths 3000, 3000 tokens after a prefix of 2000, 5000 tokens after a prefix of 2000 were run" \
        in last.unproven


def test_a_prefix_is_served_before_its_prompt_and_shared_with_no_other():
    bench = FakeBench()
    outcome(bench, **PREFIXED, boots=1)
    first = [sha for arm, _, sha in bench.sent if arm == "baseline"]
    assert len(first) == len(set(first)) == 5
    assert first[0] == "fresh-3000/3000"
    assert (first[1], first[3]) == ("prefix-2000-3000/2000", "prefix-2000-5000/2000")


def test_a_joined_prompt_is_hashed_as_a_bench_hashes_its_own():
    whole = make_prompt(50, "x", 320)
    first, second = (Prompt(ids, "") for ids in (whole.token_ids[:20], whole.token_ids[20:]))
    assert joined(first, second) == whole


@pytest.mark.parametrize(
    ("bench", "options", "reason", "says"),
    [
        (FakeBench(cached=0), {}, Reason.PROMPT_CACHED,
         "baseline boot 0, 3000 tokens after a prefix of 2000: 0 prompt tokens came from the prefix cache; 1248 were expected"),
        (FakeBench(), {"cached_prefix": [{"prefix": 2000, "prompt": 3000, "cached": 832}]}, Reason.PROMPT_CACHED,
         "1248 prompt tokens came from the prefix cache; 832 were expected"),
        (FakeBench(block_size=None), {}, Reason.PROMPT_CACHED, "the boot did not say its block size"),
        (FakeBench(argv=()), {}, Reason.PROMPT_CACHED, "with a drafter such as MTP, and this server has none; give"),
        (FakeBench(block_size=2000), {}, Reason.PROMPT_CACHED,
         "the prefix is too short to leave a block of 2000 tokens in the cache"),
        (FakeBench(counted=7), {}, Reason.PROMPT_DIFFERS, "the prefix of 2000 tokens alone: the server counted 7"),
        (FakeBench(cached=3), {}, Reason.PROMPT_CACHED, "the prefix of 2000 tokens alone: 3 prompt tokens came from"),
    ],
    ids=["not-cached", "told-otherwise", "no-block-size", "no-drafter", "too-short", "prefix-counted-otherwise",
         "prefix-not-fresh"],
)
def test_a_prefix_that_was_not_cached_as_it_must_be_is_no_evidence(bench, options, reason, says):
    with pytest.raises(InvalidMeasurement) as caught:
        list(job(**{"prompts": [], "cached_prefix": [{"prefix": 2000, "prompt": 3000}], **options}).run(bench))
    assert caught.value.reason is reason
    assert says in str(caught.value)


@pytest.mark.parametrize("bench", [FakeBench(block_size=None), FakeBench(argv=())], ids=["no-block-size", "no-drafter"])
def test_what_must_be_cached_may_be_told(bench):
    _, last = outcome(bench, cached_prefix=[{"prefix": 2000, "prompt": 3000, "cached": 1248}], boots=1)
    assert last.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("rule", "verdict"),
    [
        ({"direction": "lower", "margin": 0.1}, Verdict.PASS),
        ({"direction": "lower", "margin": 0.1, "at": [3000]}, Verdict.PASS),
        ({"direction": "lower", "margin": 0.1, "prefix": 2000}, Verdict.PASS),
        ({"direction": "lower", "margin": 0.1, "prefix": 2000, "at": [5000]}, Verdict.PASS),
        ({"direction": "unchanged", "prefix": 2000}, Verdict.FAIL),
    ],
    ids=["all-fresh", "one-fresh", "all-of-a-prefix", "one-of-a-prefix", "missed"],
)
def test_a_rule_names_fresh_prompts_or_those_of_a_prefix(rule, verdict):
    _, last = outcome(FakeBench(peaks={"patched": 0.6}), **PREFIXED, expect=[{"metric": "kv_peak", **rule}])
    assert last.verdict is verdict, last.detail
    assert ("after a prefix" in last.detail) == ("prefix" in rule)
    assert last.detail.count("Pairs:") == (2 if rule.get("prefix") and "at" not in rule else 1)


# --- short requests beside a long one -------------------------------------------------------

CONCURRENT = {"concurrent": {"count": 3, "tokens": 40, "interval_s": 0.001, "max_tokens": 2}}


def test_short_requests_beside_a_long_one_are_measured_each_and_by_the_worst():
    bench = FakeBench(hold=3, short_ttft={"patched": 0.5})
    records, last = outcome(bench, prompts=[1000, 4000], boots=1, **CONCURRENT)
    for arm, ttft_s in (("baseline", 0.01), ("patched", 0.5)):
        assert rows(records, "short_ttft", arm=arm, prompt_tokens=40, completion_tokens=2) == [ttft_s] * 6
        assert rows(records, "short_ttft_max", arm=arm, prompt_tokens=4000) == [ttft_s]
    short = [r.record for r in records if isinstance(r.record, Measurement) and r.record.metric.startswith("short_ttft")]
    assert {r.n for r in short} == {1, 3}
    assert sum("s into the prefill of 4000 tokens" in (r.note or "") for r in short) == 6
    assert len({sha for _, _, sha in bench.sent if sha.startswith("short-")}) == 6  # none shares its prompt with another
    assert "nothing was measured without short requests (up to 3) beside it" in last.unproven


def test_a_rule_may_judge_short_requests_by_the_worst():
    rule = {"metric": "short_ttft_max", "direction": "lower", "margin": 0.2}
    _, last = outcome(FakeBench(hold=3, short_ttft={"baseline": 0.8, "patched": 0.5}), prompts=[1000], expect=[rule],
                      **CONCURRENT)
    assert (last.verdict, last.reason) == (Verdict.PASS, Reason.AS_EXPECTED), last.detail


@pytest.mark.parametrize(
    ("bench", "error", "says"),
    [
        (FakeBench(hold=1, ttft={False: 1e-9}), InvalidMeasurement,
         "no short request was sent in the 0.00 s of the prefill; shorten concurrent.interval_s (0.001 s)"),
        (FakeBench(hold=1, short_fails=True), RequestFailed, "the stream was cut"),
    ],
    ids=["too-late", "failed"],
)
def test_short_requests_that_came_to_nothing(bench, error, says):
    with pytest.raises(error) as caught:
        list(job(prompts=[1000], concurrent={"count": 1, "interval_s": 0.001}, boots=1).run(bench))
    assert says in str(caught.value)


# --- boots with the probe -------------------------------------------------------------------


def test_boots_with_the_probe_come_last_balanced_and_numbered_on():
    bench = FakeBench()
    outcome(bench, prompts=[1000], boots=2, probe_boots=2)
    assert [(s.arm, s.boot, s.pair, s.order, s.probe) for s in bench.slots] == [
        ("baseline", 0, 0, 0, False), ("patched", 0, 0, 1, False), ("patched", 1, 1, 2, False), ("baseline", 1, 1, 3, False),
        ("baseline", 2, 2, 4, True), ("patched", 2, 2, 5, True), ("patched", 3, 3, 6, True), ("baseline", 3, 3, 7, True)]


def test_boots_with_the_probe_leave_exact_rows_that_say_so():
    records, last = outcome(FakeBench(), prompts=[1000, 4000], boots=2, probe_boots=1)
    exact = {"kv_peak_exact": 0.4, "kv_peak_blocks": 400, "retained_states_before": 23, "retained_states_after": 5}
    for metric, value in exact.items():
        assert rows(records, metric, prompt_tokens=4000) == [value] * 2
        assert rows(records, metric, prompt_tokens=4000, probe=True, boot=2) == [value] * 2
    assert rows(records, "kv_peak", prompt_tokens=4000, probe=True) == [0.4] * 2
    assert [r.record.note for r in records if isinstance(r.record, Measurement) and r.record.metric == "kv_peak_blocks"] == [
        "of 1000 blocks"] * 4
    assert not any("probe" in line for line in last.unproven)


def test_boots_with_the_probe_decide_nothing():
    """Their peaks alone would be an effect; the other boots show none."""
    _, last = outcome(FakeBench(probe_peak=0.5), expect=SAME, probe_boots=1)
    assert (last.verdict, last.reason) == (Verdict.PASS, Reason.AS_EXPECTED)


@pytest.mark.parametrize(
    ("bench", "options", "says"),
    [
        (FakeBench(probe_peak=0.5), {}, "kv_peak of patched with the probe is not as without it: 0.05 against 0.1 at 1000 "
                                        "tokens (noise 0 %); 0.2 against 0.4 at 4000 tokens (noise 0 %)"),
        (FakeBench(ttft={True: 7.0}), {}, "ttft of baseline with the probe is not as without it: 7 against 1 at 1000 tokens"),
        (FakeBench(probe_peak=0.5), {"boots": 1}, "0.05 against 0.1 at 1000 tokens (noise not measured)"),
    ],
    ids=["peak", "ttft", "noise-unknown"],
)
def test_where_the_probe_disagrees_it_is_said(bench, options, says):
    _, last = outcome(bench, **{"boots": 2, "probe_boots": 1, **options})
    assert any(says in line for line in last.unproven), last.unproven


def test_where_the_gauge_showed_less_than_the_engine_held_it_is_said():
    _, last = outcome(FakeBench(peaks={"patched": 0.75}), boots=2, probe_boots=1)
    assert last.unproven[-1] == ("kv_peak is what the gauge showed; the engine held more: 0.075 of 0.1 on patched at 1000 "
                                 "tokens; 0.3 of 0.4 on patched at 4000 tokens")


def test_a_difference_within_the_noise_is_not_said():
    bench = FakeBench(probe_peak=1.05)
    bench.peak = lambda slot, tokens: (0.9, 1.1, 1.05)[slot.boot] * tokens / 10_000
    _, last = outcome(bench, boots=2, probe_boots=1)
    assert not any("probe" in line or "engine" in line for line in last.unproven), last.unproven


@pytest.mark.parametrize(
    ("bench", "says"),
    [(FakeBench(probe_works=False), "patched boot 1, 1000 tokens: the server was booted without the probe"),
     (FakeBench(steps=0), "patched boot 1, 1000 tokens: the probe saw no step of the engine")],
    ids=["no-probe", "no-step"],
)
def test_a_probe_row_that_was_promised_and_is_missing(bench, says):
    bench.arms = {"patched": bench.arms["patched"]}
    with pytest.raises(InvalidMeasurement) as caught:
        list(job(boots=1, probe_boots=1).run(bench))
    assert caught.value.reason is Reason.MISSING_ROWS
    assert says in str(caught.value)


# --- what the probe costs -------------------------------------------------------------------

COST = {"prompts": [1000], "repeats": 5, "boots": 2, "probe_boots": 2,
        "expect": [{"metric": metric, "direction": "unchanged", "margin": 0.05, "probe": True}
                   for metric in ("kv_peak", "ttft")]}


def one_arm(**options):
    return FakeBench(arms={"patched": Arm("patched", "patched", ())}, **options)


def test_ten_requests_with_the_probe_and_ten_without_are_all_recorded():
    bench = one_arm()
    records, _ = outcome(bench, **COST)
    for metric in ("ttft", "kv_peak"):
        assert len(rows(records, metric, probe=False)) == len(rows(records, metric, probe=True)) == 10
    per_boot = {}
    for _, boot, sha in bench.sent:
        per_boot.setdefault(boot, []).append(sha)
    assert sorted(per_boot) == [0, 1, 2, 3]
    assert {tuple(sent) for sent in per_boot.values()} == {tuple(per_boot[0])} and len(set(per_boot[0])) == 5


@pytest.mark.parametrize("ruled", [True, False], ids=["a-rule-decides", "no-rule"])
def test_what_a_rule_has_decided_is_not_called_unproven(ruled):
    bench = one_arm(ttft={True: 1.02})
    _, last = outcome(bench, **(COST if ruled else {**COST, "expect": COST["expect"][:1]}))
    assert last.verdict is Verdict.PASS
    assert any("with the probe is not as without it" in line for line in last.unproven) is not ruled


def test_boots_with_and_without_the_probe_take_turns():
    bench = one_arm()
    outcome(bench, **COST)
    assert [(s.boot, s.pair, s.order, s.probe) for s in bench.slots] == [
        (0, 0, 0, False), (2, 2, 1, True), (3, 3, 2, True), (1, 1, 3, False)]


@pytest.mark.parametrize(
    ("bench", "verdict", "reason", "says"),
    [
        (one_arm(), Verdict.PASS, Reason.AS_EXPECTED, "patched, 1000 tokens: ttft is the same on both arms (1)"),
        (one_arm(ttft={True: 1.04}), Verdict.PASS, Reason.AS_EXPECTED,
         "ttft is 4 % higher on probe boots (1.04 against 1; probe boots/plain boots 1.04"),
        (one_arm(ttft={True: 1.5}), Verdict.FAIL, Reason.CHANGED, "50 % higher"),
        (one_arm(probe_peak=0.9), Verdict.FAIL, Reason.CHANGED, "kv_peak is 10 % lower"),
    ],
    ids=["no-cost", "within-the-margin", "slower", "another-peak"],
)
def test_a_rule_about_the_probe(bench, verdict, reason, says):
    _, last = outcome(bench, **COST)
    assert (last.verdict, last.reason) == (verdict, reason), last.detail
    assert says in last.detail


def test_a_rule_about_the_probe_looks_at_each_arm():
    _, last = outcome(FakeBench(peaks={"patched": 0.5}), **COST)
    assert (last.verdict, last.detail.count("Pairs:")) == (Verdict.PASS, 4)  # two metrics, two arms; the arms' own peaks differ


def test_a_boot_counts_with_the_median_of_its_requests():
    bench = FakeBench()
    seen = iter([1.0, 9.0, 1.0, 1.0, 1.0, 1.0])
    bench.peak = lambda slot, tokens: next(seen)
    _, last = outcome(bench, prompts=[1000], repeats=3, boots=1, expect=[{"metric": "kv_peak", "direction": "unchanged"}])
    assert "the same on both arms (1)" in last.detail


@pytest.mark.parametrize("options", [{"probe_boots": 0}, {"probe_boots": 1}, {"repeats": 0}],
                         ids=["no-boots-with-it", "fewer", "no-requests"])
def test_a_cost_that_cannot_be_measured(options):
    with pytest.raises(ValidationError):
        job(**{**COST, **options})


def test_every_row_fits_its_table():
    """A misspelt condition would be evidence lost: `stamp` refuses it."""
    records, _ = outcome(FakeBench(hold=3), **PREFIXED, boots=1, probe_boots=1, **CONCURRENT)
    identity = {"run": "r", "cell": "c", "attempt": 1}
    tables = {stamp(r.record, identity, r.conditions)[0] for r in records if isinstance(r, Tagged)}
    assert tables == {"measurements", "samples"}


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompts": []}, "at least one length"),
        ({"prompts": [0]}, "one token or more"),
        ({"prompts": [10, 10]}, "a length twice"),
        ({"boots": 0}, "boots, interval_s"),
        ({"interval_s": 0}, "boots, interval_s"),
        ({"probe_boots": -1}, "probe_boots not negative"),
        ({"promts": [1]}, "promts"),
        ({"expect": [{"metric": "kv_peak", "direction": "sideways"}]}, "lower"),
        ({"expect": [{"metric": "kv_peak", "direction": "lower", "at": [77]}]}, "lengths that prompts does not list: [77]"),
        ({"expect": [{"metric": "kv_peak", "direction": "lower", "prefix": 9}]},
         "a prefix that cached_prefix does not list: 9"),
        ({"cached_prefix": [{"prefix": 9, "prompt": 20}],
          "expect": [{"metric": "kv_peak", "direction": "lower", "prefix": 9, "at": [1000]}]},
         "lengths that cached_prefix does not list after a prefix of 9: [1000]"),
        ({"prompts": [], "cached_prefix": [{"prefix": 9, "prompt": 20}],
          "expect": [{"metric": "kv_peak", "direction": "lower"}]}, "prompts lists none: give the rule a prefix"),
        ({"expect": [{"metric": "short_ttft_max", "direction": "lower"}]}, "give concurrent"),
        ({"cached_prefix": [{"prefix": 20, "prompt": 20}]}, "20 tokens is not the beginning of a longer prompt (20)"),
        ({"cached_prefix": [{"prompt": 20}]}, "fresh prompts go under prompts"),
        ({"cached_prefix": [{"prefix": 9, "prompt": 20, "cached": 10}]}, "a prefix of 9 tokens cannot leave 10 cached"),
        ({"cached_prefix": [{"prefix": 9, "prompt": 20}] * 2}, "a prefix and prompt twice"),
        ({"cached_prefix": [{"prefix": 9, "promt": 20}]}, "promt"),
        ({"concurrent": {"count": 0}}, "count, tokens, max_tokens and interval_s must be positive"),
        ({"concurrent": {"count": 1, "interval_s": float("inf")}}, "none infinite"),
        ({"concurrent": {"tokens": 9}}, "count"),
    ],
    ids=["no-prompt", "zero", "twice", "boots", "interval", "probe-boots", "typo", "direction", "unknown-length",
         "unknown-prefix", "unknown-length-of-a-prefix", "no-fresh", "no-shorts", "prefix-too-long", "no-prefix",
         "too-much-cached", "prefix-twice", "prefix-typo", "no-count", "interval-infinite", "count-missing"],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ValidationError) as caught:
        job(**options)
    assert says in str(caught.value)


def test_the_longest_request_counts_prompts_after_a_prefix_too():
    assert job(prompts=[100], cached_prefix=[{"prefix": 200, "prompt": 900}], max_tokens=8).longest == 908
