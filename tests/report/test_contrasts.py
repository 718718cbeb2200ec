"""Figures arm beside arm: what counts together and what apart, on a run of a real card and on rows made for it."""

import pytest
from rich.console import Console
from sample_run import RUN, prefill_records

from farm.config import PROJECT
from farm.records import Measurement, Outcome, Reason, Verdict
from farm.report import expected
from farm.report.contrasts import ArmValues, Contrast, same_tree_twice
from farm.report.html import html
from farm.report.markdown import markdown
from farm.report.terminal import render_terminal
from farm.report.view import view
from farm.store import Store

H200 = PROJECT / "tests/data/runs/h200-gpu-tiny"  # configs/matrix/gpu-tiny.yaml on one H200


@pytest.fixture(scope="module")
def recorded():
    store = Store.at(H200)
    (run,) = store.runs()
    return view(store, run)


def figures(run, cell, metric, tokens):
    return {(c.cached_tokens, c.probe): {a.arm: [round(v, 4) for v in a.values] for a in c.arms}
            for c in run.contrasts if cell in c.cell and (c.metric, c.prompt_tokens) == (metric, tokens)}


def test_fresh_and_cached_prompts_of_one_length_stand_apart_and_so_do_boots_with_the_probe(recorded):
    assert figures(recorded, "mtp-long", "kv_peak", 32_000) == {
        (0, False): {"baseline": [0.4212, 0.4212], "patched": [0.3048, 0.3048]},
        (19_552, False): {"baseline": [0.3459, 0.3459], "patched": [0.3048, 0.3048]},
        (0, True): {"baseline": [0.4212], "patched": [0.3048]},
        (19_552, True): {"baseline": [0.3459], "patched": [0.3048]}}
    assert figures(recorded, "mtp-long", "kv_peak_exact", 60_000) == {(0, True): {"baseline": [0.7705], "patched": [0.5377]}}


def test_arms_that_cached_differently_are_not_torn_apart(recorded):
    """What the offload oracle measures is that one arm finds the prompt and the other does not."""
    assert figures(recorded, "offload", "ttft_again", 18_928) == {
        (0, False): {"baseline": [0.3552, 0.3849], "patched": [0.0894, 0.094]}}


def test_boots_with_the_probe_are_in_no_pair(recorded):
    (line,) = [line for line in recorded.unproven if "pairs of boots" in line]
    assert "mtp-long" in line and ": 2 pairs of boots" in line
    told = {c.cell: dict(c.conditions) for c in recorded.cells if "mtp-long" in c.cell and c.job == "prefill"}
    (cell,) = told.values()
    assert (cell["boots"], cell["boots with the probe"]) == ("2 on each arm", "1 on each arm")


def test_a_rule_for_a_prefix_judges_what_was_cached(recorded):
    judged = {(c.prompt_tokens, c.cached_tokens) for c in recorded.contrasts
              if c.judged and c.metric == "kv_peak" and "mtp-long" in c.cell}
    assert judged == {(n, 0) for n in (4000, 8000, 16_000, 32_000, 60_000)} | {(32_000, 19_552)}
    assert not any(c.judged for c in recorded.contrasts if c.probe)


RULES = '[{"metric": "kv_peak", "direction": "lower", "margin": 0.1, "prefix": 20000}]'
PROBE = '[{"metric": "ttft", "direction": "unchanged", "margin": 0.1, "probe": true}]'


@pytest.mark.parametrize(("rules", "metric", "cached", "probe", "judged"), [
    (RULES, "kv_peak", 19_552, False, True), (RULES, "kv_peak", 0, False, False), (RULES, "kv_peak", 19_552, True, False),
    (RULES, "kv_peak", 30_000, False, False), (PROBE, "ttft", 0, True, True), (PROBE, "ttft", 0, False, True),
    (PROBE, "kv_peak", 0, True, False), ('{"s": 1}', "x", 5, True, True),
], ids=["cached", "fresh", "cached-with-the-probe", "cached-beyond-the-prefix", "probe", "its-other-side", "other-metric",
        "scenario"])
def test_which_figures_a_rule_looks_at(rules, metric, cached, probe, judged):
    assert expected.judged(rules, metric, 32_000, "s", cached=cached, probe=probe) is judged


def test_rules_in_words():
    assert expected.words(RULES) == "kv_peak lower by at least 10 % after a prefix of 20,000"
    assert expected.words(PROBE) == "ttft unchanged within 10 % on boots with the probe against those without"


# --- A/A ------------------------------------------------------------------------------------

TREE = {"tree": "t" * 64, "patches": [{"name": "a.patch", "sha256": "a", "hunks": 1, "offset_hunks": 0, "max_offset": 0}],
        "env": [("A", "1")], "args": ["--x"]}


@pytest.mark.parametrize(("second", "twice"), [
    ({}, True), ({"tree": "u" * 64}, False), ({"patches": []}, False), ({"env": [("A", "2")]}, False), ({"args": []}, False),
], ids=["same", "tree", "patches", "env", "args"])
def test_an_a_a_is_known_by_its_arms(second, twice):
    assert same_tree_twice({"arms": [{"arm": "patched", **TREE}, {"arm": "patched-again", **TREE, **second}]}) is twice
    assert not same_tree_twice({"arms": [{"arm": "patched", **TREE}]}) and not same_tree_twice({"arms": None})


@pytest.fixture
def twins(author, monkeypatch):
    monkeypatch.setattr("sample_run.ARMS", {"patched": ("c" * 64, ()), "patched-again": ("c" * 64, ())})
    ended = Outcome(Verdict.PASS, Reason.NO_REGRESSION, "measured; nothing was decided")
    author.cell("prefill-tiny-0.29.0", "prefill", ended, prefill_records(peaks=((0.5, 0.52), (0.5, 0.48))))
    author.run(cells=1)
    return author.store


def test_an_a_a_has_a_spread_and_no_effect(twins, capsys):
    (peak,) = [c for c in view(twins, RUN).contrasts if c.metric == "kv_peak"]
    assert (peak.twice, peak.spread, peak.words) == (True, "8 %", "spread 8 % between boots of one tree")
    render_terminal(twins, RUN, Console(width=100))
    shown = capsys.readouterr().out
    assert "A/A: one tree on both arms; the spread is noise, no effect" in shown
    assert "patched-again  spread" in shown and "8 %" in shown
    for text in (shown, markdown(twins, RUN), html(twins, RUN)):
        assert "lower" not in text and "higher" not in text


def test_a_single_value_has_no_spread():
    one = Contrast("c", "m", "s", None, "", (ArmValues("a", (1.0,)),), evidence=True, twice=True)
    assert (one.spread, one.words) == ("", "")


def test_values_of_a_cell_that_is_no_evidence_have_no_spread_in_words(author, monkeypatch):
    monkeypatch.setattr("sample_run.ARMS", {"patched": ("c" * 64, ()), "patched-again": ("c" * 64, ())})
    author.cell("c", "prefill", Outcome(Verdict.INVALID, Reason.POOL_MISMATCH, "pools differ"), [
        (Measurement("ttft", 2.0, "s"), {"arm": arm, "boot": 0, "pair": 0}) for arm in ("patched", "patched-again")])
    (only,) = view(author.store, RUN).contrasts
    assert only.words == "no evidence: see the cell's verdict"
