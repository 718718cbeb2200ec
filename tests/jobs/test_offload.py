"""offload against a bench that plays servers: a pool, a tier behind it, and what can go wrong with either."""

import math
import random
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from pydantic import TypeAdapter, ValidationError

from farm import config, oracle
from farm.bench import Arm, BootFacts, BootSlot, Prompt, Reply, balanced_order
from farm.campaign import controlled
from farm.errors import FarmError, InvalidMeasurement, RefusedConfig
from farm.records import Measurement, Outcome, Reason, Verdict
from farm.schemas import stamp
from jobs.offload import Offload

BLOCK, CHUNK = 416, 4
ARGV = ("serve", "m", "--max-model-len=24000", "--max-num-batched-tokens", "2048", "--kv-offloading-size=9",
        "--kv_offloading_size=4")
COUNTERS = {"store": "vllm:kv_offload_store_bytes_total", "load": "vllm:kv_offload_load_bytes_total",
            "tier": "vllm:external_prefix_cache_hits_total", "gpu": "vllm:prefix_cache_hits_total"}


@dataclass
class Played:
    """One boot: a pool and a tier that forget the oldest prompt first; transfers are counted at the next request.

    `defect`: nothing is looked up in the tier, unless the prompt left two neighbouring states, as in vLLM.
    """

    defect: bool
    pool: int = 34_235  # tokens
    tier: int = 4 * oracle.GIB  # bytes
    per_token: int = 18_373  # bytes in the tier
    stores: bool = True
    compiles: frozenset[int] = frozenset()  # requests (of those longer than a block, from 0) that log a JIT line
    slow: dict[int, float] = field(default_factory=dict)  # request: factor of its TTFT
    cached: dict[int, int | None] = field(default_factory=dict)  # request: cached tokens that its usage claims
    counted: int | None = None  # prompt tokens that the usage claims
    absent: str = ""  # a counter that is not exported
    restless: bool = False  # counters that never settle
    strays: frozenset[int] = frozenset()  # requests that hit pool and tier beside what they are asked for

    def __post_init__(self):
        self.in_pool: OrderedDict[str, int] = OrderedDict()
        self.in_tier: OrderedDict[str, int] = OrderedDict()
        self.counters = dict.fromkeys(COUNTERS.values(), 0.0)
        self.pending: list[int] = []
        self.requests = 0
        self.first: int | None = None  # tokens of the first request of all
        self.jit_lines = 2  # of the canary

    def count(self, what, value):
        self.counters[COUNTERS[what]] += value

    def answer(self, prompt: Prompt) -> tuple[float, int]:
        """TTFT and cached tokens."""
        while self.pending:
            self.count("store", self.pending.pop())
        if self.restless:
            self.count("store", 1)
        self.first = self.first or prompt.tokens
        if prompt.tokens < BLOCK:
            return 0.02, 0
        this, self.requests = self.requests, self.requests + 1
        for what in COUNTERS if this in self.strays else ():
            self.count(what, 7)
        self.jit_lines += this in self.compiles
        ttft, cached = self._serve(prompt)
        return ttft * self.slow.get(this, 1.0), self.cached.get(this, cached)

    def _serve(self, prompt):
        hit = (prompt.tokens // BLOCK - 1) * BLOCK
        known = prompt.sha256 in self.in_tier and (
            not self.defect or oracle.neighbours(prompt.tokens, BLOCK, CHUNK * BLOCK))
        if prompt.sha256 in self.in_pool:
            self.count("gpu", hit)
            return 0.05, hit
        self._keep(self.in_pool, prompt.sha256, prompt.tokens, self.pool)
        if known:
            self.count("load", hit * 12_800)
            self.count("tier", hit)
            return 0.08, hit
        if self.stores and prompt.sha256 not in self.in_tier:
            size = prompt.tokens * self.per_token
            self._keep(self.in_tier, prompt.sha256, size, self.tier)
            self.pending.append(size)
        return prompt.tokens / 25_000, 0

    @staticmethod
    def _keep(store, key, size, capacity):
        store[key] = size
        while sum(store.values()) > capacity:
            store.popitem(last=False)


@dataclass
class FakeServer:
    bench: "FakeBench"
    slot: BootSlot
    played: Played
    argv: tuple[str, ...]

    @property
    def facts(self):
        return BootFacts(pool_tokens=self.bench.said_pool.get((self.slot.arm, self.slot.boot), self.played.pool),
                         block_size=self.bench.block, jit_lines=self.played.jit_lines, argv=self.argv)

    def complete(self, prompt, *, max_tokens, seed=None, temperature=0.0, deadline_s):
        assert 0 < deadline_s < math.inf
        ttft, cached = self.played.answer(prompt)
        if prompt.tokens >= BLOCK:
            self.bench.sent.setdefault((self.slot.arm, self.slot.boot), []).append(prompt.sha256)
        return Reply(ttft, ttft + 0.1, self.played.counted or prompt.tokens, max_tokens, cached)

    def counters(self):
        return {name: value for name, value in self.played.counters.items() if name != self.played.absent}


@dataclass
class FakeBench:
    """`play`: what differs from a sound server, for all boots or for (arm, boot)."""

    play: dict = field(default_factory=dict)
    only: dict = field(default_factory=dict)
    argv: tuple[str, ...] = ARGV
    block: int | None = BLOCK
    said_pool: dict = field(default_factory=dict)
    refuses: str = ""
    arms: dict = field(default_factory=lambda: {n: Arm(n, n, ()) for n in ("baseline", "patched")})
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    booted: list = field(default_factory=list)
    sent: dict = field(default_factory=dict)
    servers: list = field(default_factory=list)

    @contextmanager
    def serve(self, slot):
        if slot.arm == self.refuses:
            raise RefusedConfig("KV connector OffloadingConnector is incompatible with expandable_segments:True")
        self.booted.append(slot.arm)
        played = Played(**{"defect": slot.arm == "baseline", **self.play, **self.only.get((slot.arm, slot.boot), {})})
        self.servers.append(played)
        yield FakeServer(self, slot, played, self.argv)

    def order(self, arms, boots):
        return balanced_order(arms, boots)

    def prompt(self, tokens, *, salt):
        return Prompt((1,) * tokens, f"{salt}/{tokens}")

    def progress(self, text):
        pass


EXPECT = {"baseline": "not-served", "patched": "served"}


def job(**options) -> Offload:
    return TypeAdapter(Offload).validate_python({"expect": EXPECT, **options})


def outcome(bench, **options):
    *records, last = list(job(**options).run(bench))
    assert isinstance(last, Outcome)
    return records, last


@pytest.mark.parametrize(
    ("bench", "options", "verdict", "reason"),
    [
        (FakeBench(), {}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(), {"boots": 1}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(), {"prompt_tokens": 20_000, "evictors": 4}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(play={"defect": True}), {}, Verdict.FAIL, Reason.NOT_SERVED),
        (FakeBench(play={"defect": False}), {}, Verdict.FAIL, Reason.SERVED),
        (FakeBench(play={"defect": False}), {"expect": {}}, Verdict.PASS, Reason.SERVED),
        (FakeBench(), {"expect": {}}, Verdict.FAIL, Reason.NOT_SERVED),
        (FakeBench(only={("patched", 1): {"defect": True}}), {}, Verdict.FAIL, Reason.FLAKY),
        (FakeBench(only={("baseline", 1): {"defect": False}}), {}, Verdict.INVALID, Reason.FLAKY),
        (FakeBench(), {"evictors": 0}, Verdict.INVALID, Reason.NOT_EVICTED),
        (FakeBench(), {"evictors": 1, "prompt_tokens": 12_000}, Verdict.INVALID, Reason.NOT_EVICTED),
        (FakeBench(play={"stores": False}), {}, Verdict.INVALID, Reason.NO_STORE),
        (FakeBench(), {"warmups": 0, "evictors": 12}, Verdict.INVALID, Reason.TIER_OVERFLOW),
        (FakeBench(play={"compiles": frozenset({0})}), {}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(play={"compiles": frozenset({0})}), {"warmups": 0}, Verdict.INVALID, Reason.COLD_JIT),
        (FakeBench(play={"compiles": frozenset({2})}), {}, Verdict.INVALID, Reason.COLD_JIT),
        (FakeBench(play={"slow": {0: 9.0}}), {}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(play={"slow": {0: 9.0}}), {"warmups": 0}, Verdict.INVALID, Reason.COLD_JIT),
        (FakeBench(only={("baseline", 0): {"slow": {6: 9.0}}}), {}, Verdict.PASS, Reason.AS_EXPECTED),
        (FakeBench(only={("patched", 0): {"slow": {6: 9.0}}}), {}, Verdict.INVALID, Reason.WITHIN_NOISE),
        (FakeBench(), {"ratio": 0.05}, Verdict.INVALID, Reason.WITHIN_NOISE),
        (FakeBench(play={"cached": {2: 416}}), {}, Verdict.INVALID, Reason.PROMPT_CACHED),
        (FakeBench(play={"cached": {2: None}}), {}, Verdict.INVALID, Reason.PROMPT_CACHED),
    ],
    ids=["as-published", "one-boot", "as-measured", "patch-does-nothing", "control-served", "all-served", "must-be-served",
         "patched-moves", "control-moves", "no-evictors", "too-few-evictors", "nothing-stored", "overflow-not-foreseen",
         "jit-in-the-warm-up", "jit-without-warm-up", "jit-after-the-warm-up", "slow-warm-up", "inflated-without-warm-up",
         "slow-and-not-served", "served-slowly", "ratio-out-of-reach", "cached", "cached-unknown"],
)
def test_verdicts(bench, options, verdict, reason):
    _, last = outcome(bench, **options)
    assert (last.verdict, last.reason) == (verdict, reason), last.detail


@pytest.mark.parametrize(
    ("bench", "options", "reason", "says", "requests"),
    [
        (FakeBench(argv=(*ARGV, "--kv-offloading-size", "1")), {}, Reason.TIER_OVERFLOW, "--kv-offloading-size=2 or more", 2),
        (FakeBench(), {"evictors": 12}, Reason.TIER_OVERFLOW, "14 prompts of 18,928 tokens", 2),
        (FakeBench(), {"tier_gib": 1}, Reason.TIER_OVERFLOW, "the tier of 1,073,741,824 B holds 58,441 tokens", 2),
        (FakeBench(argv=("serve", "--max-model-len=24000")), {}, Reason.NO_METRICS, "without --kv-offloading-size", 0),
        (FakeBench(play={"absent": COUNTERS["load"]}), {}, Reason.NO_METRICS, COUNTERS["load"], 0),
        (FakeBench(argv=("serve", "--kv-offloading-size=4")), {}, Reason.BAD_CONFIG, "a plain --max-model-len", 0),
        (FakeBench(argv=("serve", "--kv-offloading-size=4", "--max-model-len=24k")), {}, Reason.BAD_CONFIG, "prompt_tokens", 0),
        (FakeBench(), {"prompt_tokens": 46 * BLOCK}, Reason.BAD_CONFIG, "46 blocks of 416, 4 a prefill chunk", 0),
        (FakeBench(block=1088), {}, Reason.BAD_CONFIG, "--max-num-batched-tokens to 2176 or more", 0),
        (FakeBench(said_pool={("baseline", 0): None}), {}, Reason.POOL_MISMATCH, "baseline boot 0 did not say", 0),
        (FakeBench(said_pool={("patched", 0): 30_000}), {}, Reason.POOL_MISMATCH,
         "pool_tokens 34235 on baseline boot 0, 30000 on patched boot 0", 7),
        (FakeBench(play={"counted": 99}), {}, Reason.PROMPT_DIFFERS, "the server counted 99 prompt tokens", 1),
        (FakeBench(play={"restless": True}), {}, Reason.FACTS_DIFFER, "still move after 6 short requests", 2),
    ],
    ids=["tier-too-small", "too-many-evictors", "told-a-small-tier", "no-tier", "counter-absent", "no-limit", "limit-in-words",
         "length-that-is-always-served", "blocks-that-are-always-served", "pool-unknown", "pools-differ", "tokens-differ",
         "counters-never-settle"],
)
def test_a_broken_measurement_is_refused_as_soon_as_it_shows(bench, options, reason, says, requests):
    with pytest.raises(InvalidMeasurement) as caught:
        list(job(**options).run(bench))
    assert caught.value.reason is reason
    assert says in str(caught.value)
    assert sum(map(len, bench.sent.values())) == requests


def test_a_length_that_is_always_served_is_refused_only_where_an_arm_must_not_be():
    _, last = outcome(FakeBench(), prompt_tokens=46 * BLOCK, expect={})
    assert (last.verdict, last.reason) == (Verdict.PASS, Reason.SERVED)


def test_a_refused_configuration_stays_one():
    with pytest.raises(RefusedConfig, match="expandable_segments:True") as caught:
        list(job().run(FakeBench(refuses="baseline")))
    assert (caught.value.verdict, caught.value.reason) == (Verdict.INVALID, Reason.REFUSED_CONFIG)


def test_an_invalid_boot_is_the_last():
    bench = FakeBench(only={("baseline", 0): {"slow": {2: 9.0}}})
    _, last = outcome(bench)
    assert bench.booted == ["baseline"]
    assert last.detail.startswith("baseline boot 0: the first request's TTFT of")


def test_a_slow_first_request_is_no_matter_where_both_references_say_the_same():
    _, last = outcome(FakeBench(only={("patched", 0): {"slow": {2: 9.0}}}))
    assert (last.verdict, last.reason) == (Verdict.PASS, Reason.AS_EXPECTED)
    assert "patched boot 0 served" in last.detail and "times the evictors'" in last.detail


def test_boots_are_balanced_and_serve_the_same_prompts():
    bench = FakeBench()
    outcome(bench)
    assert bench.booted == ["baseline", "patched", "patched", "baseline"]
    [salts] = {tuple(sent) for sent in bench.sent.values()}
    assert len(bench.sent) == 4
    x, warm_up, *evictors = (f"offload-{name}/18928" for name in ("x", "warm-up", "evictor-0", "evictor-1", "evictor-2"))
    assert salts == (warm_up, warm_up, x, *evictors, x)


def test_later_boots_keep_the_evictors_of_the_first():
    """A boot whose prompts cost more must still fit, but never serves other prompts."""
    bench = FakeBench(argv=(*ARGV, "--kv-offloading-size=1.9"), only={("patched", 0): {"per_token": 20_000}})
    _, last = outcome(bench)
    assert (last.verdict, {len(sent) for sent in bench.sent.values()}) == (Verdict.PASS, {7})
    bench = FakeBench(argv=(*ARGV, "--kv-offloading-size=1.9"), only={("patched", 0): {"per_token": 21_000}})
    with pytest.raises(InvalidMeasurement, match="5 prompts of 18,928 tokens"):
        list(job().run(bench))


def test_each_boot_leaves_its_figures_with_their_conditions():
    records, last = outcome(FakeBench(), boots=1)
    by_arm: dict[str, dict] = {"baseline": {}, "patched": {}}
    for tagged in records:
        assert isinstance(tagged.record, Measurement)
        by_arm[tagged.conditions["arm"]][tagged.record.metric] = tagged
        _, row = stamp(tagged.record, {"run": "r", "cell": "c", "attempt": 1}, tagged.conditions)
        assert row["pool_tokens"] == 34_235
    size, hit = 18_928 * 18_373, 44 * BLOCK
    values = {arm: {name: tagged.record.value for name, tagged in rows.items()} for arm, rows in by_arm.items()}
    cold = 18_928 / 25_000
    both = {"ttft_cold": cold, "cached_tokens_cold": 0, "stored_bytes_cold": size, "jit_lines_cold": 0, "gpu_hits": 0,
            "ttft_evictors": cold, "stored_bytes": 5 * size}
    assert values["baseline"] == {**both, "ttft_again": cold, "ttft_ratio": 1.0, "cached_tokens_again": 0, "loaded_bytes": 0,
                                  "external_hits": 0}
    assert values["patched"] == {**both, "ttft_again": 0.08, "ttft_ratio": 0.08 / cold, "cached_tokens_again": hit,
                                 "loaded_bytes": hit * 12_800, "external_hits": hit}
    again = by_arm["patched"]["ttft_again"].conditions
    assert (again["prompt_sha256"], again["prompt_tokens"], again["cached_tokens"]) == ("offload-x/18928", 18_928, hit)
    assert by_arm["patched"]["ttft_ratio"].record.note.startswith("served: TTFT 0.757 → 0.080 s")
    assert (by_arm["patched"]["ttft_evictors"].record.n, by_arm["patched"]["ttft_evictors"].record.note) == (3, "median")
    assert "prompt_sha256" not in by_arm["patched"]["stored_bytes"].conditions
    assert last.unproven == ("only prompts of 18,928 tokens in a tier of 4 GiB were run",
                             "one boot per arm: not shown to repeat")


def test_an_invalid_boot_leaves_its_figures_too():
    records, _ = outcome(FakeBench(), evictors=0)
    values = {tagged.record.metric: tagged.record.value for tagged in records}
    assert (values["gpu_hits"], values["loaded_bytes"], values["ttft_evictors"]) == (44 * BLOCK, 0, None)


@pytest.mark.parametrize(
    "options",
    [{"boots": 0}, {"ratio": 1.0}, {"ratio": 0}, {"evictors": -1}, {"prompt_tokens": 0}, {"tier_gib": 0}, {"warmups": -1},
     {"tier_gib": math.inf}, {"deadline_s": math.inf}, {"max_tokens": 0}, {"expect": {"patched": "SERVED"}}, {"evictor": 3}],
    ids=lambda options: "-".join(f"{k}-{v}" for k, v in options.items()),
)
def test_options_that_cannot_be_meant(options):
    with pytest.raises(ValidationError):
        job(**options)


def test_only_what_the_second_request_hits_and_loads_counts():
    records, last = outcome(FakeBench(play={"strays": frozenset({1, 3})}))
    assert (last.verdict, last.reason) == (Verdict.PASS, Reason.AS_EXPECTED), last.detail
    stored = {tagged.record.value for tagged in records if tagged.record.metric == "stored_bytes_cold"}
    assert stored == {18_928 * 18_373}


def test_without_a_warm_up_nothing_is_asked_before_the_prompt():
    bench = FakeBench()
    outcome(bench, warmups=0)
    assert {sent[0] for sent in bench.sent.values()} == {"offload-x/18928"}
    assert {played.first for played in bench.servers} == {18_928}


def test_what_the_matrix_is_told():
    assert (job(prompt_tokens=100).longest, job().longest, job().arms_named) == (108, 9, ("baseline", "patched"))


# --- configs/matrix/gpu-provoked.yaml -----------------------------------------------------------

PROVOKED = {planned.config.name: planned for planned in config.load(config.PROJECT / "configs/matrix/gpu-provoked.yaml").cells}
# What a card is expected to do with the cell's own profile, arm and options; requests count from 0, those of the
# warm-up included.
ON_A_CARD = {
    "tier-overflow": {"play": {"tier": oracle.GIB}},
    "tier-overflow-counted": {"play": {"tier": oracle.GIB}},
    "not-evicted": {},
    "no-store": {},
    "cold-jit": {"play": {"compiles": frozenset({0})}, "block": 400},
    "refused-config": {"refuses": "expandable"},
}
# The same cell where what it provokes did not come to pass.
UNPROVOKED = {
    "tier-overflow": {"play": {"tier": 4 * oracle.GIB}, "argv": ("--kv-offloading-size=4",)},
    "tier-overflow-counted": {"play": {"tier": 4 * oracle.GIB}, "argv": ("--kv-offloading-size=4",)},
    "not-evicted": {"options": {"evictors": 4}},
    "no-store": {"options": {"prompt_tokens": 18_928, "evictors": 4}},
    "cold-jit": {"play": {}},
    "refused-config": {"refuses": ""},
}


def provoked(name, *, play=None, refuses="", block=BLOCK, argv=(), options=None):
    """The cell's end, as the border of a cell makes one."""
    planned = PROVOKED[name]
    arms = config.load(config.PROJECT / "configs/matrix/gpu-provoked.yaml").matrix.arms
    mine = {arm: Arm(arm, arm, ()) for arm in planned.config.arms}
    words = (*planned.profile.served_args, *(word for arm in mine for word in arms[arm].args), *argv)
    bench = FakeBench(play={"defect": False, **(play or {})}, refuses=refuses, block=block, argv=words, arms=mine)
    run = TypeAdapter(Offload).validate_python({**planned.options, **(options or {})})
    try:
        *_, last = run.run(bench)
    except FarmError as error:
        last = Outcome(error.verdict, error.reason, str(error))
    return last, controlled(last, planned.config.control)


def test_the_matrix_provokes_every_ending_that_must_be_shown():
    assert set(PROVOKED) == set(ON_A_CARD) == set(UNPROVOKED)
    assert {planned.config.control.value for planned in PROVOKED.values()} == {
        "tier-overflow", "not-evicted", "no-store", "cold-jit", "refused-config"}


@pytest.mark.parametrize("name", ON_A_CARD)
def test_a_provoked_cell_ends_with_its_reason_and_holds(name):
    last, ended = provoked(name, **ON_A_CARD[name])
    assert (last.verdict, last.reason) == (Verdict.INVALID, PROVOKED[name].config.control), last.detail
    assert (ended.verdict, ended.reason) == (Verdict.PASS, Reason.CONTROL_HELD)


@pytest.mark.parametrize("name", UNPROVOKED)
def test_a_cell_that_provokes_nothing_misses_its_control(name):
    last, ended = provoked(name, **{**ON_A_CARD[name], **UNPROVOKED[name]})
    assert (last.verdict, last.reason) == (Verdict.PASS, Reason.SERVED), last.detail
    assert (ended.verdict, ended.reason) == (Verdict.INVALID, Reason.CONTROL_MISSED)


def test_the_small_tier_is_refused_with_the_size_that_would_do_or_seen_to_overflow():
    assert "--kv-offloading-size=2 or more" in provoked("tier-overflow", **ON_A_CARD["tier-overflow"])[0].detail
    counted = provoked("tier-overflow-counted", **ON_A_CARD["tier-overflow-counted"])[0].detail
    assert "B were stored in a tier of 1,073,741,824 B" in counted


def test_the_older_runner_is_asked_for_without_a_drafter():
    """Else the kernel that cold-jit waits for is compiled in the warm-up, or is another."""
    profile = PROVOKED["cold-jit"].profile
    assert profile.env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not any("speculative" in word for word in profile.args)
