"""Rows on a terminal and in a pipe."""

import io

import pytest
from rich.console import Console

from farm.tables import print_table

MARKUP = "[full attention] [red]x[/red] :smile: [/]"


def printed(columns, rows, **console):
    out = io.StringIO()
    print_table(Console(file=out, **console), columns, rows)
    return out.getvalue()


@pytest.mark.parametrize("console", [{}, {"force_terminal": True, "width": 80}], ids=["pipe", "terminal"])
def test_text_that_looks_like_markup_survives(console):
    assert MARKUP in printed(["value"], [[MARKUP]], **console)
    assert "[b]head" in printed(["[b]head"], [[1]], **console)


def test_a_pipe_gets_every_value_whole_on_one_line_a_row():
    text = printed(["a", "b"], [["x" * 500, 1.5], [None, "tab\there\nnext \\n\r"]], width=40)
    assert text == f"a\tb\n{'x' * 500}\t1.5\n\ttab\\there\\nnext \\\\n\\r\n"


def test_a_pipe_without_rows_still_names_the_columns():
    assert printed(["a", "b"], []) == "a\tb\n"


def test_a_terminal_folds_and_cuts_nothing():
    text = printed(["name", "value"], [["n", "0123456789" * 20]], force_terminal=True, width=60, color_system=None)
    assert text.count("0") >= 18 and "…" not in text and max(map(len, text.splitlines())) <= 60
    assert sum(text.count(digit) for digit in "0123456789") == 200


def test_too_many_columns_become_a_record_a_block():
    columns = [f"column_number_{i}" for i in range(30)]
    text = printed(columns, [[MARKUP, *range(1, 30)], range(30)], force_terminal=True, width=80, color_system=None)
    assert "row 1 of 2" in text and "row 2 of 2" in text and MARKUP in text
    assert any(line.split() == ["column_number_29", "29"] for line in text.splitlines())


def test_a_terminal_is_not_sent_the_control_sequences_of_others():
    assert "\x1b" not in printed(["a"], [["\x1b]0;title\x07 \x1b[2J"]], force_terminal=True, color_system=None)
