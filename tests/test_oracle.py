"""The offload oracle: sizes, what a boot is evidence of, and the cell's verdict, as tables."""

from dataclasses import replace
from pathlib import Path

import pytest

from farm import metrics, oracle
from farm.errors import InvalidMeasurement
from farm.oracle import Counts, Evidence, Finding, Timed
from farm.records import Reason, Verdict

# The measured row of DOMAIN.md 3: tiny model, block 416, chunks of 2048 tokens, pool 34,235 tokens, tier 4 GiB.
POOL, BLOCK, BUDGET, TIER = 34_235, 416, 2048, 4 * oracle.GIB
ATTENTION, STATE = 5_111_808, 5_087_232  # bytes of three layers' pages: attention's, and a Mamba group's without its padding


def in_tier(tokens: int) -> int:
    """Bytes that a prompt takes there: a page a block, and a state of both Mamba groups at each chunk's and the last
    but one block's end."""
    blocks = tokens // BLOCK
    states = {*range(4, blocks, 4), blocks - 1}
    return blocks * ATTENTION + 2 * len(states) * STATE


# --- sizes ------------------------------------------------------------------------------------


def test_the_measured_bytes_are_those_of_the_geometry():
    assert 5 * in_tier(20_000) == 1_837_301_760  # five prompts of 20,000 tokens
    assert 47 * ATTENTION + 2 * STATE == 250_429_440  # loaded for 19,552 tokens: all but the last full block
    assert round(in_tier(20_000) / 20_000) == 18_373


def test_the_defaults_are_a_valid_and_short_workload_on_the_measured_boot():
    tokens = oracle.prompt_length(POOL, 24_000 - 8, BLOCK, BUDGET)
    count = oracle.evictors(POOL, tokens, in_tier(tokens), TIER)
    oracle.check_room(count, tokens, in_tier(tokens), POOL, TIER)
    assert (tokens, count) == (18_928, 3)
    assert count * tokens > POOL
    assert (count + 2) * in_tier(tokens) < TIER / 2
    assert not oracle.neighbours(tokens, BLOCK, BUDGET)
    assert (count + 4) * tokens * 0.852 / 20_000 < 10  # seconds of a boot, warm-up twice, each as slow as the measured cold


@pytest.mark.parametrize(
    ("tokens", "block", "budget", "served_without_patch"),
    [
        (20_000, 416, 2048, False), (18_928, 416, 2048, False),
        (46 * 416 + 9, 416, 2048, True), (45 * 416 + 9, 416, 2048, False), (47 * 416, 416, 2048, False),
        (26 * 832, 832, 2048, True), (25 * 832, 832, 2048, False),
        (25 * 1088, 1088, 2048, True), (25 * 4096, 4096, 2048, True),
    ],
    ids=["measured", "the defaults'", "46-blocks-of-4", "45-blocks-of-4", "47-blocks-of-4", "26-blocks-of-2", "25-blocks-of-2",
         "a-block-a-chunk", "a-block-over-chunks"],
)
def test_lengths_that_leave_two_states_in_neighbouring_blocks(tokens, block, budget, served_without_patch):
    assert oracle.neighbours(tokens, block, budget) is served_without_patch


@pytest.mark.parametrize(
    ("pool", "limit", "block", "budget", "tokens"),
    [
        (34_235, 23_992, 416, 2048, 45 * 416 + 208),
        (37_600, 23_992, 832, 2048, 25 * 832 + 416),
        (34_235, 8_000, 416, 2048, 17 * 416 + 208),
        (400_000, 23_992, 416, 2048, 57 * 416 + 208),
        (34_235, 2_000, 416, 2048, 2_000),
        (34_235, 23_992, None, 2048, 20_541),
        (34_235, 23_992, 416, None, 20_541),
        (34_235, 23_992, 1088, 2048, 20_541),
    ],
    ids=["tiny", "27B", "short-limit", "large-pool", "no-chunk-fits", "no-hybrid", "budget-unknown", "a-block-a-chunk"],
)
def test_prompt_length(pool, limit, block, budget, tokens):
    assert oracle.prompt_length(pool, limit, block, budget) == tokens
    assert tokens <= min(limit, pool)


@pytest.mark.parametrize(
    ("pool", "tokens", "each", "tier", "count"),
    [
        (30_000, 10_000, 100.0, 1_000_000, 5),  # 1.5 times the pool
        (30_000, 10_000, 100.0, 640, 4),  # the tier has room for four beside the warm-up and the prompt
        (30_000, 10_000, 100.0, 300, 4),  # nor less than more than the pool: check_room says no
        (30_000, 10_000, 0.0, 300, 5),
        (9_000, 10_000, 100.0, 1_000_000, 2),
    ],
    ids=["roomy", "tight", "too-tight", "not-measured", "one-would-do"],
)
def test_evictors(pool, tokens, each, tier, count):
    assert oracle.evictors(pool, tokens, each, tier) == count


def test_what_stays_within_the_tiers_room_is_let_through():
    oracle.check_room(3, 10_000, oracle.GIB, 20_000, 6 * oracle.GIB)  # 5 GiB of 5.7


def test_what_does_not_is_refused_with_the_size_that_would_do():
    says = "holds 60,000 tokens .* pool holds 20,000.*--kv-offloading-size=7 or more"
    with pytest.raises(InvalidMeasurement, match=says) as caught:
        oracle.check_room(4, 10_000, oracle.GIB, 20_000, 6 * oracle.GIB)
    assert caught.value.reason is Reason.TIER_OVERFLOW


# --- what the server counts -------------------------------------------------------------------

SCRAPE = {"vllm:kv_offload_store_bytes_total": 5.0, "vllm:kv_offload_load_bytes_total": 4.0,
          "vllm:external_prefix_cache_hits_total": 3.0, "vllm:prefix_cache_hits_total": 2.0,
          "vllm:external_prefix_cache_queries_total": 99.0}


def test_each_fact_is_its_counter():
    assert Counts.of(SCRAPE) == Counts(stored=5, loaded=4, external_hits=3, gpu_hits=2)
    assert Counts(5, 4, 3, 2).since(Counts(1, 1, 1, 1)) == Counts(4, 3, 2, 1)


DATA = Path(__file__).parent / "data" / "metrics"
SERVING = (DATA / "cpu-0.29.0.txt").read_text(encoding="utf-8")  # a server without a tier
TIERED = (DATA / "offload-0.29.0.txt").read_text(encoding="utf-8")  # vLLM's OffloadPromMetrics after two stores and no load


def test_what_vllm_itself_exports():
    """The load counter has no series before the first load, and the stores stand there twice."""
    assert "\nvllm:kv_offload_load_bytes_total{" not in TIERED
    counts = Counts.of(metrics.scrape(SERVING + TIERED).values)
    assert (counts.stored, counts.loaded, counts.external_hits) == (1_837_301_760, 0, 0)
    without_twins = "".join(line + "\n" for line in TIERED.splitlines() if "kv_offload_total" not in line)
    assert Counts.of(metrics.scrape(SERVING + without_twins).values) == counts


def test_a_server_without_a_tier_exports_no_such_counters():
    with pytest.raises(InvalidMeasurement, match="no vllm:kv_offload_store_.*, no vllm:kv_offload_load_bytes_total: serve"):
        Counts.of(metrics.scrape(SERVING).values)


@pytest.mark.parametrize("fact", oracle.COUNTERS)
def test_a_counter_that_is_not_there_is_not_zero(fact):
    scrape = {name: value for name, value in SCRAPE.items() if name not in oracle.COUNTERS[fact]}
    with pytest.raises(InvalidMeasurement, match=oracle.COUNTERS[fact][0]) as caught:
        Counts.of(scrape)
    assert caught.value.reason is Reason.NO_METRICS


def test_a_counter_that_went_back_is_no_evidence():
    with pytest.raises(InvalidMeasurement, match="vllm:kv_offload_load_bytes_total went back"):
        Counts(5, 0, 0, 0).since(Counts(4, 1, 0, 0))


# --- one boot ---------------------------------------------------------------------------------

SERVED = Evidence(prompt_tokens=20_000, cold=Timed(0.852, 0), again=Timed(0.102, 19_552), evictor_ttft_s=0.7,
                  stored_cold=367_460_352, stored=1_837_301_760, during_again=Counts(0, 250_429_440, 19_552, 0),
                  tier_bytes=TIER)
# On an H200 (tests/data/runs/h200-gpu-whole, patched boot 0): no kernel compiled, a prefill of 0.3 s that took 0.16 s longer.
HICCUP = Evidence(prompt_tokens=18_928, cold=Timed(0.4784868850001658, 0), again=Timed(0.06301460700001371, 18_304),
                  evictor_ttft_s=0.31831114600004184, stored_cold=341_950_464, stored=1_709_752_320,
                  during_again=Counts(0, 235_094_016, 18_304, 0), tier_bytes=TIER)
UNSERVED = replace(SERVED, again=Timed(0.68, 0), during_again=Counts(0, 0, 0, 0))


@pytest.mark.parametrize(
    ("seen", "reason", "says"),
    [
        (SERVED, Reason.SERVED, "ratio 0.12, 250,429,440 B loaded, 19,552 tokens hit"),
        (UNSERVED, Reason.NOT_SERVED, "ratio 0.80, 0 B loaded, 0 tokens hit, 1,837,301,760 B stored"),
        (replace(UNSERVED, evictor_ttft_s=None), Reason.NOT_SERVED, "ratio 0.80"),
        (replace(SERVED, cold=Timed(0.852, 416)), Reason.PROMPT_CACHED, "416 tokens of the first request"),
        (replace(SERVED, cold=Timed(0.852, None)), Reason.PROMPT_CACHED, "--enable-prompt-tokens-details"),
        (replace(UNSERVED, stored_cold=0), Reason.NO_STORE, "stored nothing"),
        (replace(UNSERVED, stored=TIER + 1), Reason.TIER_OVERFLOW, "in a tier of 4,294,967,296 B"),
        (replace(UNSERVED, stored=0.96 * TIER), Reason.TIER_OVERFLOW, "pushed out"),
        (replace(UNSERVED, again=Timed(0.1, 19_552), during_again=Counts(0, 0, 0, 19_552)), Reason.NOT_EVICTED,
         "19,552 tokens of the second request were still in the GPU's pool"),
        (replace(SERVED, during_again=Counts(0, 1e8, 9_000, 10_000)), Reason.NOT_EVICTED, "more evictors"),
        (replace(UNSERVED, again=Timed(0.6, 832), during_again=Counts(0, 0, 0, 832)), Reason.NOT_EVICTED, "832 tokens"),
        (replace(SERVED, cold=Timed(14.0, 0, jit_lines=3)), Reason.COLD_JIT, "3 kernels were compiled during the first"),
        (replace(UNSERVED, cold=Timed(0.852, 0, jit_lines=1)), Reason.COLD_JIT, "1 kernels"),
        (replace(SERVED, cold=Timed(14.0, 0)), Reason.SERVED, "20.0 times the evictors', of which the second is 0.15"),
        (replace(SERVED, cold=Timed(14.0, 0), again=Timed(0.6, 19_552)), Reason.COLD_JIT,
         "0.04 of the one and 0.86 of the other"),
        (replace(HICCUP, again=Timed(0.31, 0), during_again=Counts(0, 0, 0, 0)), Reason.NOT_SERVED, "0.97: the same finding"),
        (HICCUP, Reason.SERVED, "1.5 times the evictors', of which the second is 0.20"),
        (replace(UNSERVED, cold=Timed(14.0, 0)), Reason.COLD_JIT, "20.0 times the evictors'"),
        (replace(SERVED, again=Timed(0.6, 19_552, jit_lines=2)), Reason.COLD_JIT, "2 kernels were compiled while"),
        (replace(SERVED, again=Timed(0.2, 19_552, jit_lines=2)), Reason.SERVED, "ratio 0.23"),
        (replace(SERVED, again=Timed(0.6, 19_552)), Reason.WITHIN_NOISE, "not below a ratio of 0.5"),
        (replace(SERVED, again=Timed(0.426, 19_552)), Reason.WITHIN_NOISE, "ratio 0.50"),
        (replace(SERVED, during_again=Counts(0, 0, 19_552, 0)), Reason.FACTS_DIFFER, "contradict"),
        (replace(UNSERVED, during_again=Counts(0, 1.0, 0, 0)), Reason.FACTS_DIFFER, "contradict"),
        (replace(UNSERVED, again=Timed(0.1, 0)), Reason.FACTS_DIFFER, "neither tier nor pool counted why"),
        (replace(UNSERVED, again=Timed(0.68, 19_552)), Reason.FACTS_DIFFER, "19552 tokens"),
        (replace(UNSERVED, again=Timed(0.68, None)), Reason.NOT_SERVED, "ratio 0.80"),
        (replace(UNSERVED, cold=Timed(0.0, 0)), Reason.NOT_SERVED, "ratio inf"),
    ],
    ids=["served", "not-served", "not-served-no-evictor", "cached", "cached-unknown", "no-store", "overflow", "nearly-full",
         "on-the-gpu", "partly-on-the-gpu", "on-the-gpu-and-slow", "jit-served", "jit-not-served", "inflated-served",
         "inflated-served-slowly", "hiccup-not-served", "hiccup-served", "inflated-not-served", "jit-while-served",
         "jit-while-served-yet-fast", "served-slowly", "served-at-the-ratio",
         "hits-without-loads", "loads-without-hits", "fast-without-cause", "cached-without-cause", "cached-again-unknown",
         "cold-took-no-time"],
)
def test_judge_boot(seen, reason, says):
    finding = oracle.judge_boot(seen, 0.5)
    assert finding.reason is reason, finding.detail
    assert says in finding.detail
    assert finding.valid is (reason in (Reason.SERVED, Reason.NOT_SERVED))


# --- the cell ---------------------------------------------------------------------------------

YES, NO, OVER = (Finding(r, f"it is {r.value}") for r in (Reason.SERVED, Reason.NOT_SERVED, Reason.TIER_OVERFLOW))
AS_PUBLISHED = {"baseline": "not-served", "patched": "served"}


@pytest.mark.parametrize(
    ("baseline", "patched", "expect", "verdict", "reason"),
    [
        ([NO, NO], [YES, YES], AS_PUBLISHED, Verdict.PASS, Reason.AS_EXPECTED),
        ([NO, NO], [NO, NO], AS_PUBLISHED, Verdict.FAIL, Reason.NOT_SERVED),
        ([YES, YES], [YES, YES], AS_PUBLISHED, Verdict.FAIL, Reason.SERVED),
        ([YES, YES], [NO, NO], AS_PUBLISHED, Verdict.FAIL, Reason.NOT_SERVED),
        ([NO, NO], [YES, NO], AS_PUBLISHED, Verdict.FAIL, Reason.FLAKY),
        ([NO, YES], [YES, YES], AS_PUBLISHED, Verdict.INVALID, Reason.FLAKY),
        ([NO, YES], [YES, NO], AS_PUBLISHED, Verdict.INVALID, Reason.FLAKY),
        ([NO, OVER], [YES, YES], AS_PUBLISHED, Verdict.INVALID, Reason.TIER_OVERFLOW),
        ([NO], [NO, OVER], AS_PUBLISHED, Verdict.INVALID, Reason.TIER_OVERFLOW),
        ([YES], [YES], {}, Verdict.PASS, Reason.SERVED),
        ([NO], [YES], {}, Verdict.FAIL, Reason.NOT_SERVED),
        ([YES, NO], [YES, YES], {}, Verdict.FAIL, Reason.FLAKY),
        ([NO, NO], [YES, YES], {"patched": "served"}, Verdict.PASS, Reason.AS_EXPECTED),
        ([NO, YES], [YES, YES], {"patched": "served"}, Verdict.PASS, Reason.AS_EXPECTED),
    ],
    ids=["as-expected", "patch-does-nothing", "control-served", "wrong-way", "patched-moves", "control-moves", "both-move",
         "invalid-baseline", "invalid-beats-fail", "no-expect-served", "no-expect-not-served", "no-expect-moves", "one-judged",
         "unjudged-moves"],
)
def test_judge(baseline, patched, expect, verdict, reason):
    outcome = oracle.judge({"baseline": baseline, "patched": patched}, expect, ("x",))
    assert (outcome.verdict, outcome.reason) == (verdict, reason), outcome.detail
    assert "x" in outcome.unproven


def test_the_outcome_names_every_boot_and_what_was_not_judged():
    outcome = oracle.judge({"baseline": [NO, NO], "patched": [YES]}, {"patched": "served"})
    assert outcome.detail == ("baseline boot 0 not-served: it is not-served; baseline boot 1 not-served: it is not-served; "
                              "patched boot 0 served: it is served")
    assert outcome.unproven == ("nothing was expected of baseline: recorded, not judged",)
    wrong = oracle.judge({"baseline": [YES], "patched": [NO]}, AS_PUBLISHED).detail
    assert wrong.startswith("baseline served where not-served was expected, patched not-served where served was expected. ")
    assert oracle.judge({"baseline": [NO, OVER]}, {}).detail == "baseline boot 1: it is tier-overflow"
