"""The final table of a run on a terminal, and the same without colour or lines in a log.

Every text is put in as data, never as markup: a test's name may hold brackets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from farm.report.suites import SuiteView
from farm.report.view import CellView, Contrast, RunView, view
from farm.stats import change_words, number, ratio
from farm.store import Store

STYLES = {"PASS": "green", "FAIL": "bold red", "INVALID": "yellow", "ERROR": "magenta", "SKIP": "dim"}
PLAIN_WIDTH = 100  # columns of a log, which says nothing of its own width
DETAIL_COLUMN = 160  # from this width on the detail has a column of its own
NAMES = 10  # tests that a group lists
TAIL_LINES = 8


def render_terminal(store: Store, run: str, console: Console) -> None:
    """Print a run: the table of cells, then what was measured, tested and patched, times, and what is unproven.

    Raises UsageError where the store has no such run.
    """
    shown = view(store, run)
    if not console.is_terminal:
        console = Console(file=console.file, width=max(PLAIN_WIDTH, console.width), color_system=None,
                          force_terminal=False, legacy_windows=False)
    for part in _parts(shown, console.width, lined=console.is_terminal):
        console.print(part, highlight=False, markup=False, emoji=False)


def _parts(run: RunView, width: int, *, lined: bool) -> Iterable[object]:
    wide = width >= DETAIL_COLUMN
    columns = ["cell", "job", "profile", "pin", "card", "verdict", "reason", "seconds", *(["detail"] if wide else [])]
    yield _table(columns, [_cell_row(c, detail=wide) for c in run.cells], lined, numbers=("seconds",))
    ended = "" if run.exit_code is None else f", exit code {run.exit_code}"
    yield Text(f"run {run.run}: {run.summary}; {run.status}{ended}")
    if not wide:
        yield from _section("Verdicts", [line for c in run.cells for line in _detail(c)])
    else:
        yield from _section("Logs", [line for c in run.cells if c.tail for line in _tail(c)])
    if run.contrasts:
        yield _heading("Measured, one value a boot; change and ratios are of the means")
        yield from _contrasts(run, lined=lined)
    yield from _section("Tests", [line for s in run.suites for line in _suite_lines(s)])
    if run.patches:
        yield _heading("Patches")
        yield _table(["pin", "patch", "applied", "files"],
                     [[p.pin, p.patch, p.words, ", ".join(p.files)] for p in run.patches], lined)
    yield from _section("Time", [run.times.words])
    yield from _section("Unproven", [f"- {line}" for line in run.unproven])
    yield from _section("Files skipped", [f"- {line}" for line in run.problems])


def _cell_row(cell: CellView, *, detail: bool) -> list[str | Text]:
    tries = "" if cell.attempts < 2 else f" (attempt {cell.attempt})"
    return [cell.cell, cell.job, cell.profile, cell.pin, cell.card, _verdict(cell), cell.reason + tries,
            f"{cell.wall_s:.1f}", *([cell.detail] if detail else [])]


def _verdict(cell: CellView) -> Text:
    return Text(cell.verdict if cell.final else f"{cell.verdict}, not final", STYLES.get(cell.verdict, ""))


def _detail(cell: CellView) -> Iterable[str | Text]:
    yield Text.assemble(_verdict(cell), f" {cell.cell}: {cell.detail}")
    yield from _tail(cell, named=False)


def _tail(cell: CellView, *, named: bool = True) -> Iterable[str]:
    lines = cell.tail.splitlines()
    if named:
        yield f"{cell.cell}:"
    if len(lines) > TAIL_LINES:
        yield f"    … {len(lines) - TAIL_LINES} lines before, in column detail of table cells"
    yield from (f"    {line}" for line in lines[-TAIL_LINES:])


def _contrasts(run: RunView, *, lined: bool) -> Iterable[object]:
    for cell, found in groupby(run.contrasts, key=lambda c: c.cell):
        contrasts = list(found)
        arms = list(dict.fromkeys(a.arm for c in contrasts for a in c.arms))
        yield Text(f"  {cell}{'' if contrasts[0].evidence else ' (no evidence: see its verdict)'}")
        columns = ["metric", "at", *arms, "change", *([f"{arms[1]}/{arms[0]}", "inverse"] if len(arms) > 1 else [])]
        yield Padding(_table(columns, [_contrast_row(c, arms) for c in contrasts], lined, numbers=columns[-2:]),
                      (0, 0, 0, 2), expand=False)


def _contrast_row(contrast: Contrast, arms: Sequence[str]) -> list[str]:
    values = {a.arm: a for a in contrast.arms}
    row = [f"{contrast.metric}, {contrast.unit}", contrast.length,
           *("  ".join(map(number, values[a].values)) if a in values else "" for a in arms)]
    if len(arms) < 2 or not (arms[0] in values and arms[1] in values) or not contrast.evidence:
        return [*row, *[""] * (1 if len(arms) < 2 else 3)]
    first, second = values[arms[0]].mean, values[arms[1]].mean
    ratios = (ratio(second, first), ratio(first, second))
    return [*row, change_words(first, second), *("" if r is None else number(r) for r in ratios)]


def _suite_lines(suite: SuiteView) -> Iterable[str]:
    told = f": {suite.words}" if suite.words else ""
    yield f"{suite.cell}, {suite.suite}{told}"
    yield from (f"    {arm}: {counts}" for arm, counts in zip(suite.arms, suite.counts, strict=True))
    for name, tests in suite.groups:
        for test in tests[:NAMES]:
            yield f"    {name}: {test.nodeid}{'  ' + test.message if test.message else ''}"
        if len(tests) > NAMES:
            yield f"    {name}: and {len(tests) - NAMES} more, in table tests"


def _section(title: str, lines: Sequence[str | Text]) -> Iterable[object]:
    if lines:
        yield _heading(title)
        yield from (Padding(Text(line) if isinstance(line, str) else line, (0, 0, 0, 2), expand=False)
                    for line in lines)


def _heading(title: str) -> Text:
    return Text(f"\n{title}", "bold")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], lined: bool,
           numbers: Sequence[str] = ()) -> Table:
    table = Table(box=box.ROUNDED if lined else None, pad_edge=lined, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(value) if isinstance(value, str) else value for value in row))
    return table
