"""The final table, on a terminal and in a log."""

import io

import pytest
from rich.console import Console
from sample_run import EVIL, RUN, prefill_records

from farm.records import Measurement, Outcome, Reason, TestRow, Verdict
from farm.report.terminal import render_terminal


def rendered(store, **console):
    out = io.StringIO()
    render_terminal(store, RUN, Console(file=out, **console))
    return out.getvalue()


def row_of(text, cell):
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [cell])


def test_a_log_has_no_colour_no_boxes_and_100_columns(store):
    text = rendered(store)
    assert "\x1b" not in text and not set(text) & set("╭│─┃━")
    assert max(len(line) for line in text.splitlines() if "::" not in line) <= 100  # a test's line is never broken


def test_one_line_a_cell_with_verdict_reason_and_seconds(store):
    text = rendered(store)
    assert text.splitlines()[0].split() == ["cell", "job", "profile", "pin", "card", "verdict", "reason", "seconds"]
    assert row_of(text, "unit-0.29.0")[-3:] == ["FAIL", "tests-broken", "30.5"]
    assert row_of(text, "prefill-pools")[-3:] == ["INVALID", "pool-mismatch", "20.0"]
    assert f"run {RUN}: 2 PASS, 1 FAIL, 2 INVALID, 1 ERROR, 1 SKIP; finished, exit code 2" in text


def test_details_figures_tests_patches_time_and_unproven_follow(store):
    text = rendered(store)
    order = ["Verdicts", "  INVALID prefill-pools: pools differ: 4,096 and 2,048 tokens. Pin the pool.",
             "Conditions", "Measured, one value a boot", "Tests", "  unit-0.29.0, v1-core: 1 broken, 1 fixed, 1 still failing",
             "broken (1):\n          tests/v1/core/test_x.py::test_new  assert 1 == 2\n", "Patches",
             "6 hunks, 2 with an offset", "Time",
             "  wall 100.0 s: vLLM 88.0 s, ours 12.0 s (12.0 %)", "Unproven",
             "  - offload-0.29.0: skipped (needs-unmet)"]
    places = [text.find(part) for part in order]
    assert -1 not in places and places == sorted(places)


def test_every_boot_of_both_arms_stands_beside_the_change(store):
    lines = [" ".join(line.split()) for line in rendered(store).splitlines()]
    assert "2,048 kv_peak, ratio 0.7705 0.7704 0.5342 0.5342 30.7 % lower 0.6934" in lines
    at = lines.index("prefill-pools (no evidence: see its verdict)")
    assert lines[at + 2] == "2,048 kv_peak, ratio 0.7705 0.7704 0.5342 0.5342"


def test_markup_in_data_is_printed_as_it_is(store):
    text = rendered(store)
    assert f"FAIL unit-0.29.0: 1 test broken: test_new {EVIL}" in text
    assert text.count(EVIL) >= 9  # the lines of the log's tail too


def test_a_log_tail_shows_its_end_and_says_where_the_rest_is(store):
    text = rendered(store)
    assert "… 12 lines before, in column detail of table cells" in text
    assert "line 11 " not in text and "line 19 " in text


def test_a_terminal_has_lines_and_colour(store):
    text = rendered(store, force_terminal=True, width=100, color_system="standard")
    assert "╭" in text and "\x1b[1;31mFAIL" in text


def test_a_wide_terminal_has_the_detail_in_the_table(store):
    text = rendered(store, force_terminal=True, width=200, color_system=None)
    assert any("prefill-pools" in line and "pools differ" in line for line in text.splitlines())
    assert "Verdicts" not in text and "Logs" in text


def test_long_lists_of_tests_are_cut_with_a_count(author):
    rows = [(TestRow("s", f"t{i:02}", outcome), {"arm": arm}) for i in range(12)
            for arm, outcome in (("baseline", "passed"), ("patched", "failed"))]
    author.cell("c", "unit", Outcome(Verdict.FAIL, Reason.TESTS_BROKEN, "12 broken"), rows)
    text = rendered(author.store)
    assert "broken (12):" in text and "          t09\n" in text and "t10\n" not in text
    assert "          and 2 more, in table tests\n" in text


@pytest.mark.parametrize("console", [{}, {"force_terminal": True, "width": 80}])
def test_a_run_without_cells_is_printed(author, console):
    author.run(cells=2, status="interrupted", exit_code=130)
    assert "2 not run yet; interrupted, exit code 130" in " ".join(rendered(author.store, **console).split())


FINE = Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine")
WHOLE = "prefill-long-tiny-mtp-0.29.0-cpu-54744f45"
NOTE = "mtp-long: block=832 k=3 budget=2048 lag=1 method=mtp mamba_groups=3"


def scenario_records():
    return [(Measurement(metric, float(value), "blocks", note=NOTE), {"arm": arm, "prompt_tokens": tokens})
            for tokens in (20000, 2000) for arm, value in (("baseline", 16), ("patched", 6))
            for metric in ("retained_states_before", "peak_blocks")]


@pytest.mark.parametrize("width", [80, 100])
def test_a_scenario_is_told_once_above_one_line_for_each_figure(author, width):
    author.cell("replay-0.29.0-cpu-8e342dd6", "replay", FINE, scenario_records())
    text = rendered(author.store, force_terminal=True, width=width, color_system=None)
    lines = [" ".join(line.split()) for line in text[text.index("Measured"):].splitlines()]
    at = lines.index("tokens metric baseline patched change ratio")
    assert " ".join(text.split()).count(NOTE) == 1 and "in blocks; not judged by any rule" in " ".join(lines[:at])
    assert lines[at + 1:at + 5] == [f"{tokens} {metric} 16 6 62.5 % lower 0.375" for tokens in ("2,000", "20,000")
                                    for metric in ("peak_blocks", "retained_states_before")]


@pytest.mark.parametrize("width", [80, 100])
def test_a_cell_goes_by_its_short_name_and_once_by_its_id(author, width):
    author.cell(WHOLE, "prefill", FINE, conditions={"profile": "tiny/mtp"})
    text = rendered(author.store, force_terminal=True, width=width, color_system=None)
    assert text.count(WHOLE) == 1 and f"  long-54744f45: {WHOLE}\n" in text and "PASS long-54744f45: fine" in text


def test_conditions_say_project_pin_host_pool_what_was_expected_and_where_the_logs_are(author):
    env = {"HOME": f"/cache/caches/{'b' * 64}/home"}
    records = [(record, own | {"tree": "b" * 64, "env": env}) for record, own in prefill_records()]
    rule = '[{"metric": "kv_peak", "direction": "lower", "margin": 0.15, "at": [2048]}]'
    author.cell(WHOLE, "prefill", FINE, records, expect=rule)
    author.run(cells=1)
    text = rendered(author.store)
    part = text[text.index("Conditions"):text.index("Measured")]
    for line in ("project: ffffffffffff with uncommitted changes", "pin: 0.29.0-cpu (vllm 0.29.0, torch 2.13.0, python",
                 "host: box (native, EPYC)", "pool 4,096 tokens, pinned on each arm; block size 416 on each arm",
                 "expected: kv_peak lower by at least 15 % at 2,048 tokens", f"logs: /cache/logs/{RUN}/{WHOLE}-1\n"):
        assert line in part
    judged, _, others = text[text.index("Measured"):text.index("Time")].partition("not judged by any rule")
    assert "kv_peak" in judged and "ttft" not in judged and "ttft" in others


def test_fixed_tests_are_a_count_and_three_names(author):
    long = f"tests/test_x.py::test_{'n' * 100}"
    rows = [(TestRow("s", f"{long}[{i}-0]", outcome, message="E   assert 1 == 2"), {"arm": arm}) for i in range(5)
            for arm, outcome in (("baseline", "failed"), ("patched", "passed"))]
    author.cell("c", "unit", FINE, rows)
    text = rendered(author.store, force_terminal=True, width=80, color_system=None)
    assert "      fixed (5):\n" in text and "and 2 more, in table tests" in text
    assert [line.strip() for line in text.splitlines() if "::" in line] == [
        f"{long}[{i}-0]  assert 1 == 2" for i in range(3)]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_word_of_a_table_is_broken(store, width):
    text = rendered(store, force_terminal=True, width=width, color_system=None)
    table = text[:text.index(f"run {RUN}")]
    assert {"as-expected", "pool-mismatch", "tests-broken", "needs-unmet"} <= set(table.split())


def test_a_path_in_a_detail_keeps_the_whole_id(author):
    cell = "boot-tiny-cpu-0.29.0-cpu-81880818"
    lost = Outcome(Verdict.ERROR, Reason.SERVER_LOST, f"{cell} ended (log /cache/logs/r/{cell}-1/boot-0.log)")
    author.cell(cell, "boot", lost, final=False, conditions={"profile": "tiny-cpu", "pin": "0.29.0-cpu"})
    author.cell(cell, "boot", Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), attempt=2,
                conditions={"profile": "tiny-cpu", "pin": "0.29.0-cpu"})
    author.run(cells=1)
    out = io.StringIO()
    render_terminal(author.store, RUN, Console(file=out, width=300))
    (line,) = [line for line in out.getvalue().splitlines() if "attempt 1" in line]
    assert f"boot-81880818 ended (log /cache/logs/r/{cell}-1/boot-0.log)" in line
