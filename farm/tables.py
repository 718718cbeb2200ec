"""Rows for a reader: a table on a terminal, tab-separated values in a pipe.  Every value is data, never markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from farm.report.suites import plain

_NARROW = 12  # a column folded below this is no longer read as a column
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def print_table(console: Console, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Nothing is cut: a terminal folds, and shows a record a block where the columns are too many for its width.

    In a pipe the first line names the columns; tab, line breaks and backslash
    inside a value are escaped.  A missing value is empty.
    """
    texts = [["" if value is None else str(value) for value in row] for row in rows]
    if not console.is_terminal:
        # As a segment: rich would turn the tabs of a text into spaces.
        lines = ("\t".join(value.translate(_ESCAPES) for value in row) + "\n" for row in [list(columns), *texts])
        console.print(Segments([Segment("".join(lines))]), crop=False, soft_wrap=True, end="")
        return
    texts = [[plain(value) for value in row] for row in texts]
    if _least_width(columns, texts) > console.width:
        for number, row in enumerate(texts, 1):
            console.print(Text(f"row {number} of {len(texts)}", "bold"))
            console.print(_record(columns, row))
    else:
        console.print(_table(columns, texts))


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    longest = [max([len(name), *(max(map(len, row[i].splitlines()), default=0) for row in rows)])
               for i, name in enumerate(columns)]
    return sum(min(length, _NARROW) for length in longest) + 3 * len(longest) + 1


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for name in columns:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _record(columns: Sequence[str], row: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in zip(columns, row, strict=True):
        table.add_row(Text(f"  {name}"), Text(value))
    return table
