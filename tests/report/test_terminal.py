"""The final table, on a terminal and in a log."""

import io

import pytest
from rich.console import Console
from sample_run import EVIL, RUN

from farm.records import Outcome, Reason, TestRow, Verdict
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
    assert max(map(len, text.splitlines())) <= 100


def test_one_line_a_cell_with_verdict_reason_and_seconds(store):
    text = rendered(store)
    assert text.splitlines()[0].split() == ["cell", "job", "profile", "pin", "card", "verdict", "reason", "seconds"]
    assert row_of(text, "unit-0.29.0")[-3:] == ["FAIL", "tests-broken", "30.5"]
    assert row_of(text, "prefill-pools")[-3:] == ["INVALID", "pool-mismatch", "20.0"]
    assert f"run {RUN}: 2 PASS, 1 FAIL, 2 INVALID, 1 ERROR, 1 SKIP; finished, exit code 2" in text


def test_details_figures_tests_patches_time_and_unproven_follow(store):
    text = rendered(store)
    order = ["Verdicts", "  INVALID prefill-pools: pools differ: 4,096 and 2,048 tokens. Pin the pool.",
             "Measured, one value a boot", "Tests", "  unit-0.29.0, v1-core: 1 broken, 1 fixed, 1 still failing",
             "broken: tests/v1/core/test_x.py::test_new  assert 1 == 2", "Patches", "6 hunks, 2 with an offset", "Time",
             "  wall 100.0 s: vLLM 88.0 s, ours 12.0 s (12.0 %)", "Unproven",
             "  - offload-0.29.0: skipped (needs-unmet)"]
    places = [text.find(part) for part in order]
    assert -1 not in places and places == sorted(places)


def test_every_boot_of_both_arms_stands_beside_the_change(store):
    lines = [" ".join(line.split()) for line in rendered(store).splitlines()]
    assert "kv_peak, ratio 2,048 0.7705 0.7704 0.5342 0.5342 30.7 % lower 0.6934 1.442" in lines
    at = lines.index("prefill-pools (no evidence: see its verdict)")
    assert lines[at + 2] == "kv_peak, ratio 2,048 0.7705 0.7704 0.5342 0.5342"


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
    assert "broken: t09" in text and "broken: t10" not in text and "broken: and 2 more, in table tests" in text


@pytest.mark.parametrize("console", [{}, {"force_terminal": True, "width": 80}])
def test_a_run_without_cells_is_printed(author, console):
    author.run(cells=2, status="interrupted", exit_code=130)
    assert "2 INVALID; interrupted, exit code 130" in " ".join(rendered(author.store, **console).split())
