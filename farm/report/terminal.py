"""The final table of a run on a terminal, and the same without colour or lines in a log.

Every text is put in as data, never as markup: a test's name may hold brackets.
A cell goes by its short name; the section of conditions has its whole id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from farm.console import Steadfast
from farm.report.contrasts import SPREAD, Contrast
from farm.report.suites import SuiteView, TestView
from farm.report.view import CellView, PatchView, RunView, view
from farm.stats import change_words, number, ratio
from farm.store import Store

STYLES = {"PASS": "green", "FAIL": "bold red", "INVALID": "yellow", "ERROR": "magenta", "SKIP": "dim"}
PLAIN_WIDTH = 100  # columns of a log, which says nothing of its own width
DETAIL_COLUMN = 160  # from this width on the detail has a column of its own
NARROW = 100  # below it the table of cells leaves out what is the same for all
NAMES = 10  # tests that a group lists
FIXED_NAMES = 3  # good news needs a count, and a few names to see which
TAIL_LINES = 8
A_A = "A/A: one tree on both arms; the spread is noise, no effect"


def render_terminal(store: Store, run: str, console: Console) -> None:
    """Print a run: the table of cells, then conditions, what was measured, tested and patched, times, and what is unproven.

    Raises UsageError where the store has no such run.
    """
    shown = view(store, run)
    if not console.is_terminal:
        console = Steadfast(file=console.file, width=max(PLAIN_WIDTH, console.width), color_system=None,
                            force_terminal=False, legacy_windows=False)
    for part in _parts(shown, console.width, lined=console.is_terminal):
        whole = isinstance(part, Text) and bool(part.no_wrap)
        console.print(part, highlight=False, markup=False, emoji=False, soft_wrap=whole)


def _parts(run: RunView, width: int, *, lined: bool) -> Iterable[object]:
    wide = width >= DETAIL_COLUMN
    if run.cells:
        yield _table(*_cells(run, width, detail=wide), width, lined, numbers=("seconds",))
    ended = "" if run.exit_code is None else f", exit code {run.exit_code}"
    yield Text(f"run {run.run}: {run.summary}; {run.status}{ended}")
    if run.campaign:
        yield Text(f"INVALID as a whole, no verdict above is evidence: {run.campaign}", STYLES["INVALID"])
    if not wide:
        yield from _section("Verdicts", [line for c in run.cells for line in _detail(c)])
    else:
        yield from _section("Logs", [line for c in run.cells if c.tail for line in _tail(c)])
    if run.pins:
        yield _heading("Pins")
        yield _table(["pin", *run.pins.columns, "geometry"], [[pin, *ends, geometry] for pin, ends, geometry in run.pins.rows],
                     width, lined)
    yield from _section("Attempts made again", [_shortened(line, run) for line in run.retried])
    yield from _section("Cards that left or joined", run.cards)
    yield from _section("Conditions", list(_conditions(run)))
    if run.contrasts:
        yield _heading("Measured, one value a boot; change and ratio (second arm / first) are of the means")
        yield from _contrasts(run, width)
    if run.suites:
        yield _heading("Tests")
        yield from (line for suite in run.suites for line in _suite_lines(suite, _shorts(run)[suite.cell]))
    yield from _section("Patches", [line for p in run.patches for line in _patch_lines(p)])
    yield from _section("Time", [run.times.words])
    if run.schedule:
        yield from _section("Schedule", run.schedule.lines)
        yield _table(run.schedule.columns, run.schedule.rows, width, lined, numbers=run.schedule.columns[1:])
    yield from _section("Unproven", [f"- {_shortened(line, run)}" for line in run.unproven])
    yield from _section("Files skipped", [f"- {line}" for line in run.problems])


def _shorts(run: RunView) -> dict[str, str]:
    return {c.cell: c.short for c in run.cells}


def _shortened(line: str, run: RunView) -> str:
    """A line without the whole ids, but in paths; the longest first, as one may be the beginning of another."""
    for cell, short in sorted(_shorts(run).items(), key=lambda pair: -len(pair[0])):
        line = re.sub(rf"(?<!/){re.escape(cell)}", lambda _, short=short: short, line)
    return line


def _cells(run: RunView, width: int, *, detail: bool) -> tuple[list[str], list[list[str | Text]]]:
    """Columns and rows.  On a narrow screen pin and card go where all cells share them: the conditions say them too."""
    columns = ["cell", "job", "profile", "pin", "card", "verdict", "reason", "seconds", *(["detail"] if detail else [])]
    rows = [_cell_row(c, detail=detail) for c in run.cells]
    left_out = {i for i, name in enumerate(columns) if width < NARROW and name in ("pin", "card")
                and len({str(row[i]) for row in rows}) == 1}
    return [name for i, name in enumerate(columns) if i not in left_out], [
        [value for i, value in enumerate(row) if i not in left_out] for row in rows]


def _cell_row(cell: CellView, *, detail: bool) -> list[str | Text]:
    tries = "" if cell.attempts < 2 else f" (attempt {cell.attempt})"
    return [cell.short, cell.job, cell.profile, cell.pin, cell.card, _verdict(cell), cell.reason + tries,
            f"{cell.wall_s:.1f}", *([cell.detail] if detail else [])]


def _verdict(cell: CellView) -> Text:
    return Text(cell.verdict if cell.final else f"{cell.verdict}, not final", STYLES.get(cell.verdict, ""))


def _detail(cell: CellView) -> Iterable[str | Text]:
    yield Text.assemble(_verdict(cell), f" {cell.short}: {cell.detail}")
    yield from _tail(cell, named=False)


def _tail(cell: CellView, *, named: bool = True) -> Iterable[str]:
    lines = cell.tail.splitlines()
    if named:
        yield f"{cell.short}:"
    if len(lines) > TAIL_LINES:
        yield f"    … {len(lines) - TAIL_LINES} lines before, in column detail of table cells"
    yield from (f"    {line}" for line in lines[-TAIL_LINES:])


# --- conditions -----------------------------------------------------------------------------

_SHARED = ("pin", "host", "card", "driver", "power limit")  # said once for all cells that have them
_OWN = ("boots", "boots with the probe", "pool", "block size", "backend", "compile caches")


def _conditions(run: RunView) -> Iterable[str | Text]:
    if run.project:
        yield f"project: {run.project}"
    if run.started:
        yield f"started: {run.started:%Y-%m-%d %H:%M} UTC"
    told = [pair for c in run.cells for pair in c.conditions]
    for label in _SHARED:
        yield from (f"{label}: {value}" for value in dict.fromkeys(v for name, v in told if name == label))
    for cell in run.cells:
        yield cell.cell if cell.cell == cell.short else f"{cell.short}: {cell.cell}"
        own = dict(cell.conditions)
        if served := [f"{label} {own[label]}" for label in _OWN if label in own]:
            yield f"    {'; '.join(served)}"
        if "expected" in own:
            yield f"    expected: {own['expected']}"
        if "logs" in own:
            yield _whole(f"    logs: {own['logs']}")


# --- figures and tests ----------------------------------------------------------------------


def _contrasts(run: RunView, width: int) -> Iterable[object]:
    for cell, found in groupby(run.contrasts, key=lambda c: c.cell):
        contrasts = sorted(found, key=lambda c: (c.probe, not c.judged, c.scenario, c.prompt_tokens or 0, c.cached_tokens))
        arms = list(dict.fromkeys(a.arm for c in contrasts for a in c.arms))
        evidence, twice = contrasts[0].evidence, contrasts[0].twice
        about = " (no evidence: see its verdict)" if not evidence else f" ({A_A})" if twice else ""
        yield Text(f"  {_shorts(run).get(cell, cell)}{about}")
        for (probe, judged, scenario), rows in groupby(contrasts, key=lambda c: (c.probe, c.judged, c.scenario)):
            rows = list(rows)
            units = {c.unit for c in rows}
            unit = "" if len(units) > 1 else "as fractions" if units == {"ratio"} else f"in {rows[0].unit}"
            probed = "boots with the probe, counted apart" if probe else ""
            unjudged = "not judged by any rule" if evidence and not judged and not twice else ""
            if said := "; ".join(filter(None, (scenario, probed, unit, unjudged))):
                yield Padding(Text(said), (0, 0, 0, 4), expand=False)
            compared = [SPREAD] if twice else ["change", "ratio"] if len(arms) > 1 else []
            values = [_contrast_row(c, arms, unit=not unit) for c in rows]
            table = _table(["tokens", "metric", *arms, *compared], values, width - 4, lined=False,
                           numbers=("tokens", "ratio", SPREAD))
            yield Padding(table, (0, 0, 0, 4), expand=False)


def _contrast_row(contrast: Contrast, arms: Sequence[str], *, unit: bool) -> list[str]:
    values = {a.arm: a for a in contrast.arms}
    row = [contrast.tokens, f"{contrast.metric}, {contrast.unit}" if unit else contrast.metric,
           *("  ".join(map(number, values[a].values)) if a in values else "" for a in arms)]
    if contrast.twice:
        return [*row, contrast.spread if contrast.evidence else ""]
    if len(arms) < 2:
        return row
    if not (arms[0] in values and arms[1] in values) or not contrast.evidence:
        return [*row, "", ""]
    first, second = values[arms[0]].mean, values[arms[1]].mean
    quotient = ratio(second, first)
    return [*row, change_words(first, second), "" if quotient is None else number(quotient)]


def _suite_lines(suite: SuiteView, short: str) -> Iterable[Text]:
    told = f": {suite.words}" if suite.words else ""
    yield Text(f"  {short}, {suite.suite}{told}")
    yield from (Text(f"      {arm}: {counts}") for arm, counts in zip(suite.arms, suite.counts, strict=True))
    for name, tests in suite.groups:
        if tests:
            yield from _tests(name, tests, FIXED_NAMES if name == "fixed" else NAMES)


def _tests(name: str, tests: Sequence[TestView], most: int) -> Iterable[Text]:
    """A line a test, its name first."""
    yield Text(f"      {name} ({len(tests)}):")
    for test in tests[:most]:
        yield _whole(f"          {test.nodeid}{'  ' + test.message if test.message else ''}")
    if len(tests) > most:
        yield Text(f"          and {len(tests) - most} more, in table tests")


def _patch_lines(patch: PatchView) -> Iterable[str | Text]:
    yield f"{patch.pin}: {patch.patch}: {patch.words}"
    yield from (_whole(f"    {file}") for file in patch.files)


# --- layout ---------------------------------------------------------------------------------


def _section(title: str, lines: Sequence[str | Text]) -> Iterable[object]:
    if lines:
        yield _heading(title)
        yield from (_indented(line) for line in lines)


def _whole(line: str) -> Text:
    """A line that is never broken: what is in it is to be copied."""
    return Text(line, no_wrap=True)


def _indented(line: str | Text) -> Padding | Text:
    """Two columns in; what does not fit goes on under the line's own beginning."""
    if isinstance(line, Text) and line.no_wrap:
        return _whole(f"  {line.plain}")
    text = Text(line) if isinstance(line, str) else line
    inner = len(text.plain) - len(text.plain.lstrip())
    return Padding(text[inner:] if inner else text, (0, 0, 0, 2 + inner), expand=False)


def _heading(title: str) -> Text:
    return Text(f"\n{title}", "bold")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int, lined: bool,
           numbers: Sequence[str] = ()) -> Table:
    """Rich takes from the widest column even where that breaks a word, so the widths are set here.

    The lines between columns go where the texts or at least their words fit only without.
    """
    texts = [[Text(value) if isinstance(value, str) else value for value in row] for row in rows]
    down = [[Text(name), *(row[i] for row in texts)] for i, name in enumerate(columns)]
    natural = [max(len(text.plain) for text in column) for column in down]
    least = [max(max(map(len, text.plain.split()), default=0) for text in column) for column in down]
    inside, beside = width - (3 * len(columns) + 1), width - 2 * (len(columns) - 1)
    lined = lined and (sum(natural) <= inside or (sum(natural) > beside and sum(least) <= inside))
    table = Table(box=box.ROUNDED if lined else None, pad_edge=lined, header_style="bold",
                  padding=(0, 1) if lined else (0, 2, 0, 0))
    for name, fitted in zip(columns, _fitted(natural, least, inside if lined else beside), strict=True):
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold", width=fitted)
    for row in texts:
        table.add_row(*row)
    return table


def _fitted(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths of columns: the widest give way, down to their longest word; below that only where nothing else fits."""
    widths = list(natural)
    for floors in (least, [1] * len(widths)):
        while sum(widths) > room and (spare := [i for i, w in enumerate(widths) if w > floors[i]]):
            widths[max(spare, key=lambda i: widths[i])] -= 1
    return widths
