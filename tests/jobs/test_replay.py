"""jobs/replay: what each set of rows is called, what YAML may say, and the driver on a real vLLM."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter, ValidationError

from farm.bench import Needs
from farm.errors import TreeFailure
from farm.records import Outcome, Reason, Tagged, Verdict
from farm.schemas import stamp
from jobs.inside import replay_driver
from jobs.replay import Bounds, Expect, Replay, Scenario

ASYNC = Scenario("async", block_size=832, speculative_blocks=3, prompts=(20000, 2000))
SYNC = replace(ASYNC, name="sync", lag=0)
LEAK = {("async", 20000): (16, 15, 73), ("async", 2000): (5, 5, 18)}  # before, after, peak
HELD = {("async", 20000): (6, 5, 43), ("async", 2000): (5, 5, 18)}
FLAT = {("sync", 20000): (5, 4, 40), ("sync", 2000): (5, 4, 18)}
ISSUE = {
    "async": Expect({"baseline": Bounds(retained_before=(16, 5)),
                     "patched": Bounds(retained_before_max=6, retained_after_max=5)}),
    "sync": Expect(arms_equal=True),
}


def events(table: Mapping[tuple[str, int], tuple[int, int, int]]) -> list[Mapping]:
    """Driver output: the greatest count is neither first nor last."""
    return [{"event": "attest", "vllm_path": "/x/vllm/__init__.py", "version": "0.29.0"}] + [
        {"event": "prompt", "scenario": scenario, "prompt_tokens": tokens, "chunks": [tokens],
         "before": [0, before, before - 1], "after": [0, after, after - 1], "peak_blocks": peak, "pool_blocks": 99}
        for (scenario, tokens), (before, after, peak) in table.items()
    ]


class FakeBench:
    """Arms with canned driver output; an exception in its place is raised."""

    def __init__(self, **arms: Sequence[Mapping] | Exception) -> None:
        self.arms = {name: SimpleNamespace(name=name) for name in arms}
        self.rng, self.calls, self.lines = random.Random(0), [], []
        self._canned = arms

    def python(self, arm: str, code: str, args: Mapping, *, timeout_s: float) -> Iterator[Mapping]:
        self.calls.append((arm, code, json.loads(json.dumps(args)), timeout_s))
        canned = self._canned[arm]
        if isinstance(canned, Exception):
            raise canned
        yield from canned

    def progress(self, text: str) -> None:
        self.lines.append(text)


def run(bench: FakeBench, job: Replay) -> tuple[list[Tagged], Outcome]:
    *rows, outcome = job.run(bench)
    return rows, outcome


@pytest.mark.parametrize(
    ("baseline", "patched", "expect", "verdict", "reason", "says"),
    [
        pytest.param(LEAK | FLAT, HELD | FLAT, ISSUE, Verdict.PASS, Reason.AS_EXPECTED,
                     "baseline 16/5 then 15/5, patched 6/5 then 5/5", id="as-expected"),
        pytest.param(LEAK | FLAT, LEAK | FLAT, ISSUE, Verdict.FAIL, Reason.EFFECT_ABSENT,
                     "patched 16/5, expected at most 6", id="patch-does-nothing"),
        pytest.param(LEAK | FLAT, HELD | {("async", 20000): (9, 9, 50)} | FLAT, ISSUE, Verdict.FAIL, Reason.CHANGED,
                     "patched 9/5, expected at most 6", id="patch-does-too-little"),
        pytest.param(LEAK | FLAT, HELD | {("async", 2000): (7, 5, 18)} | FLAT, ISSUE, Verdict.FAIL,
                     Reason.EFFECT_WRONG_WAY, "patched 6/7, expected at most 6", id="one-prompt-worse"),
        pytest.param(HELD | FLAT, HELD | FLAT, ISSUE, Verdict.FAIL, Reason.CHANGED,
                     "baseline 6/5, expected 16/5", id="baseline-no-longer-leaks"),
        pytest.param(LEAK | FLAT, HELD | FLAT | {("sync", 2000): (4, 4, 18)}, ISSUE, Verdict.FAIL, Reason.CHANGED,
                     "expected to be equal", id="arms-differ-where-equal-was-expected"),
        pytest.param(LEAK | FLAT, HELD | FLAT | {("sync", 2000): (5, 4, 19)}, ISSUE, Verdict.FAIL,
                     Reason.EFFECT_WRONG_WAY, "sync peak_blocks at 20000/2000 tokens: patched 40/19 is above",
                     id="peak-worse-where-equal-was-expected"),
        pytest.param(LEAK | FLAT, HELD | FLAT, {}, Verdict.PASS, Reason.NO_REGRESSION, "patched 6/5",
                     id="no-expectation-better"),
        pytest.param(LEAK | FLAT, LEAK | FLAT, {}, Verdict.PASS, Reason.NO_REGRESSION, "patched 16/5",
                     id="no-expectation-same"),
        pytest.param(HELD | FLAT, LEAK | FLAT, {}, Verdict.FAIL, Reason.EFFECT_WRONG_WAY, "patched 16/5 is above",
                     id="no-expectation-worse"),
        pytest.param(LEAK | FLAT, HELD | {("sync", 20000): (6, 4, 40), ("sync", 2000): (5, 4, 18)},
                     {"async": ISSUE["async"]}, Verdict.FAIL, Reason.EFFECT_WRONG_WAY, "sync retained_states_before",
                     id="scenario-without-expectation-worse"),
        pytest.param(LEAK | FLAT, HELD, ISSUE, Verdict.INVALID, Reason.MISSING_ROWS,
                     "2 of 8 promised rows did not come: patched sync 20000, patched sync 2000", id="rows-missing"),
        pytest.param(LEAK | FLAT, HELD | FLAT, {"async": Expect({"patchd": Bounds(retained_before_max=6)})},
                     Verdict.INVALID, Reason.BAD_CONFIG, "names arm patchd; this cell has baseline, patched",
                     id="arm-misspelt"),
    ],
)
def test_verdict(baseline, patched, expect, verdict, reason, says):
    bench = FakeBench(baseline=events(baseline), patched=events(patched))
    _, outcome = run(bench, Replay((ASYNC, SYNC), expect))
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    assert says in outcome.detail


def test_worst_reason_of_several_is_the_cells():
    worse = HELD | {("async", 20000): (17, 15, 73)} | FLAT
    expect = {"async": Expect({"baseline": Bounds(retained_before=(1, 1)), "patched": Bounds(retained_before_max=6)})}
    _, outcome = run(FakeBench(baseline=events(LEAK | FLAT), patched=events(worse)), Replay((ASYNC, SYNC), expect))
    assert outcome.reason is Reason.EFFECT_WRONG_WAY
    assert "baseline 16/5, expected 1/1" in outcome.detail


UNKNOWN = [{"event": "unknown-api", "detail": "vLLM 0.99.0: vllm.v1.outputs has no DraftTokenIds"}]


@pytest.mark.parametrize(
    ("arms", "verdict", "reason"),
    [
        pytest.param({"baseline": UNKNOWN, "patched": []}, Verdict.INVALID, Reason.MISSING_ROWS, id="pin-not-known"),
        pytest.param({"baseline": events(LEAK), "patched": UNKNOWN}, Verdict.FAIL, Reason.TREE_FAILED,
                     id="patch-removed-it"),
    ],
)
def test_unknown_api_counts_against_a_tree_only_where_the_reference_has_it(arms, verdict, reason):
    _, outcome = run(FakeBench(**arms), Replay((ASYNC,)))
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    assert "has no DraftTokenIds" in outcome.detail


def test_one_arm_without_bounds_is_refused_before_anything_runs():
    bench = FakeBench(baseline=events(LEAK))
    _, outcome = run(bench, Replay((ASYNC,), {"async": Expect(arms_equal=True)}))
    assert (outcome.verdict, outcome.reason, bench.calls) == (Verdict.INVALID, Reason.BAD_CONFIG, [])


def test_one_arm_with_bounds_is_judged_by_them():
    job = Replay((ASYNC,), {"async": Expect({"baseline": Bounds(retained_before=(16, 5))})})
    assert run(FakeBench(baseline=events(LEAK)), job)[1].verdict is Verdict.PASS


def test_tree_failure_passes_through_after_the_rows_of_the_other_arm():
    bench = FakeBench(baseline=events(LEAK), patched=TreeFailure("IndexError in remove_skipped_blocks"))
    seen = []
    with pytest.raises(TreeFailure, match="IndexError"):
        seen.extend(Replay((ASYNC,)).run(bench))
    assert len(seen) == 6


def test_rows_are_stampable_measurements():
    rows, _ = run(FakeBench(baseline=events(LEAK), patched=events(HELD)), Replay((ASYNC,)))
    assert len(rows) == 2 * 2 * 3
    identity = {"run": "r", "cell": "c", "attempt": 1}
    stamped = [stamp(r.record, identity, r.conditions) for r in rows[:3]]
    assert [(t, row["metric"], row["value"], row["unit"], row["n"]) for t, row in stamped] == [
        ("measurements", "retained_states_before", 16, "blocks", 3),
        ("measurements", "retained_states_after", 15, "blocks", 3),
        ("measurements", "peak_blocks", 73, "blocks", 3),
    ]
    row = stamped[0][1]
    assert (row["arm"], row["prompt_tokens"], row["block_size"]) == ("baseline", 20000, 832)
    assert "block=832 k=3 budget=2048 lag=1" in row["note"]


def test_driver_is_given_every_option_and_the_deadline():
    bench = FakeBench(baseline=events(LEAK), patched=events(HELD))
    run(bench, Replay((ASYNC,), deadline_s=7))
    assert [call[0] for call in bench.calls] == ["baseline", "patched"]
    _, code, args, timeout_s = bench.calls[0]
    assert "remove_skipped_blocks" in code and timeout_s == 7
    assert args == {"scenarios": [{**asdict(ASYNC), "prompts": [20000, 2000]}]}


YAML = {  # as a matrix says it under `with:` and `expect:`
    "scenarios": [{"name": "async", "block_size": 832, "speculative_blocks": 3, "prompts": [20000, 2000]}],
    "expect": {"async": {"arms": {"baseline": {"retained_before": [16, 5]}, "patched": {"retained_after_max": 5}}}},
}
ONE = YAML["scenarios"][0]


def test_yaml_makes_the_job():
    job = TypeAdapter(Replay).validate_python(YAML)
    assert job.scenarios == (ASYNC,)
    assert job.expect["async"].arms["patched"] == Bounds(retained_after_max=5)
    assert job.needs == Needs(cuda=False, own_card=False)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"scenario": []}, "scenario", id="unknown-option"),
        pytest.param({"scenarios": [ONE | {"blocksize": 1}]}, "blocksize", id="unknown-key"),
        pytest.param({"scenarios": [ONE | {"method": "medusa"}]}, "method", id="unknown-method"),
        pytest.param({"scenarios": [ONE | {"block_size": 0}]}, "block_size", id="no-block"),
        pytest.param({"scenarios": [ONE | {"prompts": [5, 5]}]}, "different lengths", id="prompt-twice"),
        pytest.param({"scenarios": [ONE | {"chunk_budget": 4}]}, "no room", id="budget-all-drafts"),
        pytest.param({"scenarios": [ONE, ONE]}, "name of its own", id="scenario-twice"),
        pytest.param({"scenarios": [], "expect": {}}, "at least one scenario", id="no-scenario"),
        pytest.param({"expect": {"asinc": {"arms_equal": True}}}, "there are: async", id="expect-of-no-scenario"),
        pytest.param({"expect": {"async": {}}}, "says nothing", id="empty-rule"),
        pytest.param({"expect": {"async": {"arms": {"baseline": {}}}}}, "says nothing", id="empty-bounds"),
        pytest.param({"expect": {"async": {"arms": {"baseline": {"retained_before": [16]}}}}},
                     "1 values for 2 prompts", id="list-too-short"),
        pytest.param({"expect": {"async": {"arms": {"baseline": {"retained": [16, 5]}}}}}, "retained",
                     id="unknown-bound"),
    ],
)
def test_bad_yaml_is_refused(change, says):
    with pytest.raises(ValidationError, match=says):
        TypeAdapter(Replay).validate_python(YAML | change)


# --- the driver's adapter (stdlib only, so it can be tested here) ------------------------------


def _old(block_size, layers=()):
    return ("old", block_size, layers)


def _renamed(tokens_per_block):
    return ("renamed", tokens_per_block)


def _wants_more(block_size, layout):
    return ("more", block_size, layout)


def _open_ended(*args, **kwargs):
    return ("open", kwargs)


@pytest.mark.parametrize(
    ("factory", "result"),
    [
        pytest.param(_old, ("old", 832, ()), id="as-known"),
        pytest.param(_open_ended, ("open", {"block_size": 832}), id="takes-anything"),
        pytest.param(_renamed, r"takes no \['block_size'\], wants \['tokens_per_block'\]", id="renamed"),
        pytest.param(_wants_more, r"takes no more, wants \['layout'\]", id="new-required-parameter"),
    ],
)
def test_build_checks_a_signature_before_the_call(factory, result):
    if isinstance(result, tuple):
        assert replay_driver.build(factory, block_size=832) == result
        return
    with pytest.raises(replay_driver.UnknownApi, match=result):
        replay_driver.build(factory, block_size=832)


def test_model_facts_name_what_they_lack_and_still_allow_a_default():
    facts = replay_driver.ModelFacts(4096)
    assert facts.is_diffusion is False and getattr(facts, "new_fact", 1) == 1
    with pytest.raises(replay_driver.UnknownApi, match="model_config.new_fact: add it to ModelFacts"):
        _ = facts.new_fact


# --- the driver on a real vLLM --------------------------------------------------------------

REAL = (
    Scenario("mtp-long", 832, 3, (20000, 14000, 12000, 2000)),
    Scenario("mtp-long-sync", 832, 3, (20000, 2000), lag=0),
    # DOMAIN.md 3 says 13 at "10k": so up to 9,855 tokens; from 22 blocks of 448 on there is one more chunk.
    Scenario("dflash2-fast", 448, 7, (2000, 9800, 10000, 20000, 42000, 56000), method="dflash"),
    # The H200 figures of DOMAIN.md 3: peaks 0.0753, 0.4212 and 0.7705 of a pool of 292 blocks.
    Scenario("h200-tiny", 416, 3, (4000, 32000, 60000), mamba_groups=2),
    Scenario("block-over-budget", 4096, 3, (20000,)),
)
BEFORE = {"mtp-long": [16, 12, 11, 5], "mtp-long-sync": [5, 5], "dflash2-fast": [9, 13, 14, 19, 31, 39]}


@pytest.fixture(scope="session")
def driven(real_pin, tmp_path_factory) -> list[Mapping]:
    pin = real_pin("0.29.0-cpu")
    driver = resources.files("jobs").joinpath("inside/replay_driver.py").read_text(encoding="utf-8")
    done = subprocess.run([pin.python, "-c", driver], input=json.dumps({"scenarios": [asdict(s) for s in REAL]}),
                          env=pin.env(pin.baseline, tmp_path_factory.mktemp("home")),
                          capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.vllm
def test_real_attests_first_and_prints_rows_only(driven):
    assert driven[0]["event"] == "attest" and driven[0]["vllm_path"].endswith("vllm/__init__.py")
    assert [(e["scenario"], e["prompt_tokens"]) for e in driven[1:]] == [(s.name, p) for s in REAL for p in s.prompts]


@pytest.mark.vllm
@pytest.mark.parametrize("scenario", BEFORE)
def test_real_baseline_retains_the_published_states(driven, scenario):
    assert [max(e["before"]) for e in driven[1:] if e["scenario"] == scenario] == BEFORE[scenario]


@pytest.mark.vllm
def test_real_peaks_are_those_measured_on_an_h200(driven):
    peaks = [e["peak_blocks"] / 292 for e in driven[1:] if e["scenario"] == "h200-tiny"]
    assert peaks == pytest.approx([0.0753, 0.4212, 0.7705], abs=0.00006)


@pytest.mark.vllm
def test_real_chunks_are_the_tree_schedulers(driven):
    chunks = {(e["scenario"], e["prompt_tokens"]): e["chunks"] for e in driven[1:]}
    assert chunks["mtp-long", 12000] == [1664] * 6 + [832, 1184]
    assert chunks["block-over-budget", 20000][:2] == [2048, 2048]
