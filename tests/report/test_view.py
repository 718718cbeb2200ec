"""What every renderer is given."""

from datetime import timedelta
from pathlib import Path

import pytest
from sample_run import BEGAN, RUN, prefill_records, unit_records

from farm.errors import UsageError
from farm.records import Measurement, Outcome, Reason, Verdict
from farm.report import expected
from farm.report.view import view


def cells(run):
    return {c.cell: c for c in run.cells}


def test_an_unknown_run_is_refused(store):
    with pytest.raises(UsageError, match="no run 'other' in .*see: farm runs"):
        view(store, "other")


def test_the_tally_counts_a_cell_without_a_row_as_invalid(store):
    run = view(store, RUN)
    assert run.tally == {"PASS": 2, "FAIL": 1, "INVALID": 2, "ERROR": 1, "SKIP": 1} and run.missing == 1
    assert run.summary == "2 PASS, 1 FAIL, 2 INVALID, 1 ERROR, 1 SKIP"


def test_cells_whose_rows_are_in_a_damaged_file_are_no_verdict(author):
    for name in ("a", "b"):
        author.cell(name, "unit", Outcome(Verdict.PASS, Reason.NO_REGRESSION, "fine"))
    author.run(cells=2)
    (damaged, *_) = sorted(Path(author.store.root).glob("table=cells/*/a-1.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-40])
    run = view(author.store, RUN)
    assert run.summary == "1 PASS, 1 unreadable" and any(str(damaged) in line for line in run.problems)
    assert any("1 cell of the matrix unreadable: bring back the files" in line for line in run.unproven)


def test_a_retried_cell_is_shown_by_its_final_attempt_and_its_rows_alone(store):
    run = view(store, RUN)
    cell = cells(run)["prefill-tiny-0.29.0"]
    assert (cell.verdict, cell.attempt, cell.attempts, cell.final) == ("PASS", 2, 2, True)
    peak = next(c for c in run.contrasts if (c.cell, c.metric) == (cell.cell, "kv_peak"))
    assert [(a.arm, a.values) for a in peak.arms] == [("baseline", (0.7705, 0.7704)), ("patched", (0.5342, 0.5342))]


def test_a_cell_without_a_final_attempt_is_shown_by_its_last(author):
    for attempt in (1, 2):
        died = Outcome(Verdict.ERROR, Reason.BOOT_DIED, f"try {attempt}")
        author.cell("c", "prefill", died, attempt=attempt, final=False)
    author.run(cells=1)
    (cell,) = view(author.store, RUN).cells
    assert (cell.detail, cell.final, cell.attempts) == ("try 2", False, 2)


def test_a_killed_run_is_shown_from_its_cells(author):
    author.cell("c", "unit", Outcome(Verdict.PASS, Reason.NO_REGRESSION, "fine"), wall_s=10.0, vllm_s=9.0)
    run = view(author.store, RUN)
    assert run.status == "no row of its own: killed before it ended" and run.exit_code is None and run.missing == 0
    assert run.times.words == "all cells together 10.0 s: vLLM 9.0 s, ours 1.0 s (10.0 %)"


def test_a_run_without_cells_is_shown(author):
    author.run(cells=3, status="interrupted", exit_code=130, wall_s=4.0, vllm_s=0.0)
    run = view(author.store, RUN)
    assert run.summary == "3 not run yet" and run.cells == run.contrasts == run.suites == run.patches == ()
    assert run.times.words == "wall 4.0 s, none with vLLM at work yet"
    assert run.unproven == ("3 cells of the matrix not run yet",)


@pytest.mark.parametrize(("status", "said"), [("running", "not run yet"), ("interrupted", "not run yet"),
                                              ("finished", "INVALID")])
def test_a_cell_without_a_row_is_invalid_only_once_the_run_has_ended(author, status, said):
    author.cell("c", "unit", Outcome(Verdict.PASS, Reason.NO_REGRESSION, "fine"))
    author.run(cells=3, status=status, exit_code=None)
    assert view(author.store, RUN).tally == {"PASS": 1, said: 2}


@pytest.mark.parametrize(("cell", "job", "profile", "short"), [
    ("prefill-mtp-long-tiny-mtp-long-0.29.0-cpu-580b8a19", "prefill", "tiny/mtp-long", "mtp-long-580b8a19"),
    ("replay-0.29.0-cpu-8e342dd6", "replay", None, "replay-8e342dd6"),
    ("unit-retirement-0.29.0-cpu-e474b465", "unit", None, "retirement-e474b465"),
    ("by-hand", "unit", None, "by-hand"),
])
def test_the_short_name_is_the_cells_own_or_its_jobs_with_the_hash(author, cell, job, profile, short):
    author.cell(cell, job, Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), conditions={"profile": profile})
    assert [c.short for c in view(author.store, RUN).cells] == [short]


RULES = '[{"metric": "kv_peak", "direction": "unchanged", "margin": 0, "at": [4000]}]'


@pytest.mark.parametrize(("text", "words", "judged"), [
    (None, "", []),
    (RULES, "kv_peak unchanged within 0 % at 4,000 tokens", [("kv_peak", 4000)]),
    ('{"mtp": {"arms_equal": true, "arms": {"a": {"retained": [6, 5]}}}, "s": []}',
     "mtp: arms_equal yes, arms a retained 6, 5; s: none", "all"),
    ("not json", "not json", []),
])
def test_what_was_expected(text, words, judged):
    figures = [(metric, tokens) for metric in ("kv_peak", "ttft") for tokens in (4000, 8000)]
    assert expected.words(text) == words
    assert [f for f in figures if expected.judged(text, *f, "mtp")] == (figures if judged == "all" else judged)


@pytest.mark.parametrize(("wall", "vllm", "words"), [
    (100.0, 88.0, "wall 100.0 s: vLLM 88.0 s, ours 12.0 s (12.0 %)"),
    (100.0, 150.0, "all cells together 20.0 s: vLLM 18.0 s, ours 2.0 s (10.0 %)"),
    (None, None, "all cells together 20.0 s: vLLM 18.0 s, ours 2.0 s (10.0 %)"),
], ids=["one-card", "side-by-side", "not-recorded"])
def test_ours_against_vllm(author, wall, vllm, words):
    author.cell("c", "unit", Outcome(Verdict.PASS, Reason.NO_REGRESSION, "fine"))
    author.run(wall_s=wall, vllm_s=vllm)
    assert view(author.store, RUN).times.words == words


def test_detail_and_log_tail_are_apart_and_free_of_terminal_sequences(store):
    cell = cells(view(store, RUN))["prefill-dead"]
    assert cell.detail == "the server died"
    assert cell.tail.startswith("(EngineCore pid=1) line 0 <script>") and "\x1b" not in cell.tail


def test_contrasts_are_by_length_and_scenario_with_words(store):
    found = [(c.metric, c.length, c.words) for c in view(store, RUN).contrasts if c.cell == "replay-0.29.0"]
    same = "the same on both arms (5)"
    fewer = "62.5 % lower on patched (6 against 16; patched/baseline 0.375, baseline/patched 2.667)"
    at = [f"k=3 budget=2048 lag={lag}" for lag in (0, 1)]
    assert found == [("retained_states_before", f"{tokens} {scenario}", words)
                     for tokens, words in (("2,000", same), ("20,000", fewer)) for scenario in at]


def test_a_note_about_scrapes_does_not_tear_a_served_metric_apart(store):
    peaks = [c for c in view(store, RUN).contrasts if (c.cell, c.metric) == ("prefill-tiny-0.29.0", "kv_peak")]
    assert len(peaks) == 1 and peaks[0].scenario == ""


def test_figures_of_an_invalid_cell_are_no_evidence(store):
    found = [c for c in view(store, RUN).contrasts if c.cell == "prefill-pools"]
    assert found and {c.words for c in found} == {"no evidence: see the cell's verdict"}


def test_one_arm_alone_has_no_words_and_a_missing_value_is_left_out(author):
    author.cell("c", "prefill", Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), [
        (Measurement("ttft", 2.0, "s"), {"arm": "patched", "boot": 0}),
        (Measurement("ttft", None, "s"), {"arm": "patched", "boot": 1})])
    (only,) = view(author.store, RUN).contrasts
    assert (only.length, only.arms[0].values, only.words) == ("", (2.0,), "")


def test_patches_say_how_they_applied(store):
    assert [(p.patch, p.words, p.files) for p in view(store, RUN).patches] == [
        ("mamba-align.patch", "4 hunks, none with an offset", ("v1/core/single_type_kv_cache_manager.py",)),
        ("offload-mtp.patch", "6 hunks, 2 with an offset, at most 13 lines",
         ("v1/kv_offload/a.py", "v1/kv_offload/b.py")),
    ]


def test_conditions_come_from_the_boots(store):
    told = dict(cells(view(store, RUN))["prefill-tiny-0.29.0"].conditions)
    assert told["pin"] == "0.29.0-cpu (vllm 0.29.0, torch 2.13.0, python 3.11.7)"
    assert told["card"] == "CPU slot 0 (cpu-box-0, 24.0 GiB)"
    assert told["arm baseline"] == "tree bbbbbbbbbbbbbbbb: no patches"
    assert told["arm patched"] == "tree cccccccccccccccc: mamba-align.patch, offload-mtp.patch"
    assert told["boots"] == "2 on each arm" and told["pool"] == "4,096 tokens, pinned on each arm"
    assert told["block size"] == "416 on each arm" and told["prompts"] == "2,048 tokens (121212121212)"
    assert "driver" not in told and "power limit" not in told and "connector" not in told


def test_conditions_that_differ_are_told_by_arm(store):
    told = dict(cells(view(store, RUN))["prefill-pools"].conditions)
    assert told["pool"] == "baseline 4,096 tokens, pinned; patched 2,048 tokens, pinned"


def test_the_argv_hash_leaves_out_what_names_the_boot(author):
    alike, other = prefill_records(), prefill_records()
    for _, own in other:
        if own["arm"] == "patched":
            own["argv"] = [*own["argv"], "--enforce-eager"]
    author.cell("alike", "prefill", Outcome(Verdict.PASS, Reason.AS_EXPECTED, ""), alike)
    author.cell("other", "prefill", Outcome(Verdict.PASS, Reason.AS_EXPECTED, ""), other)
    found = cells(view(author.store, RUN))
    same = dict(found["alike"].conditions)["argv hash"]
    assert same.endswith(" on each arm")
    assert dict(found["other"].conditions)["argv hash"].startswith(f"baseline {same.split()[0]}; patched ")


def test_a_gpu_says_driver_capability_and_power(author):
    author.cell("c", "prefill", Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), conditions={
        "card_name": "RTX 3090", "card": "GPU-1", "compute_capability": "8.6", "driver": "580.1",
        "power_limit_before_w": 250.0, "power_limit_after_w": 200.0})
    run = view(author.store, RUN)
    told = dict(run.cells[0].conditions)
    assert told["card"] == "RTX 3090 (GPU-1, compute capability 8.6, 24.0 GiB)"
    assert (told["driver"], told["power limit"]) == ("580.1", "250 W, 200 W afterwards")
    assert run.unproven == ("no card other than RTX 3090 was run",)


def test_what_is_unproven_is_said_in_words(store):
    assert view(store, RUN).unproven == (
        "prefill-tiny-0.29.0: only prompt lengths 2048 were run",
        "offload-0.29.0: skipped (needs-unmet)",
        "prefill-dead: no evidence either way (boot-died)",
        "prefill-pools: no evidence either way (pool-mismatch)",
        "1 cell of the matrix left no row: no evidence either way (missing-rows)",
        "prefill-tiny-0.29.0: 2 pairs of boots: too few for a statistical claim (a sign test at 5 % needs 6)",
        "nothing ran on a GPU: what needs one (speculative decoding, offload, timing) is not shown here",
        "no profile other than tiny was run",
    )


def test_a_damaged_file_is_reported_once_and_the_rest_is_shown(own_store):
    path = Path(own_store.files.path("tests", RUN, "unit-0.29.0-1.parquet"))
    path.write_bytes(b"PAR1")
    run = view(own_store, RUN)
    assert run.suites == () and len(run.cells) == 6
    assert len(run.problems) == 1 and str(path) in run.problems[0]


def test_the_same_view_after_compaction(own_store):
    before = view(own_store, RUN)
    own_store.compact(RUN)
    assert view(own_store, RUN) == before


def test_project_and_start(store):
    run = view(store, RUN)
    assert run.project == f"{'f' * 12} with uncommitted changes"
    assert run.started == BEGAN and run.started.utcoffset() == timedelta(0)


def test_suites_are_digested_in_the_order_of_the_arms(author):
    author.cell("c", "unit", Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), unit_records())
    (suite,) = view(author.store, RUN).suites
    assert suite.arms == ("baseline", "patched")
