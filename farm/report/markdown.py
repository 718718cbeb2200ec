"""A run as a comment on a pull request: conditions first, then verdicts, figures, tests and what is unproven."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from farm.report.gfm import code, fenced, text
from farm.report.suites import SuiteView
from farm.report.view import CellView, RunView, view
from farm.stats import number
from farm.store import Store

MARKS = {"PASS": "✅", "FAIL": "❌", "INVALID": "⚠️", "ERROR": "💥", "SKIP": "⏭️"}
NAMES = 25  # tests that a group lists: GitHub takes 65,536 characters a comment
TAIL_CHARACTERS = 2000


def markdown(store: Store, run: str) -> str:
    """GitHub-flavoured Markdown.  Raises UsageError where the store has no such run."""
    return "\n".join(_lines(view(store, run))) + "\n"


def _lines(run: RunView) -> Iterable[str]:
    yield f"## Patch farm: {run.summary}"
    yield ""
    facts = [f"run {code(run.run)}", text(run.status), "" if run.exit_code is None else f"exit code {run.exit_code}",
             f"{run.started:%Y-%m-%d %H:%M} UTC" if run.started else "",
             f"project {code(run.project)}" if run.project else ""]
    yield " · ".join(filter(None, facts))
    if run.campaign:
        yield from ("", f"**INVALID as a whole, no verdict below is evidence**: {text(run.campaign)}")
    if run.pins:
        yield from _section("Pins", _table(["pin", *map(text, run.pins.columns), "geometry"], [
            [code(pin), *map(text, ends), text(geometry)] for pin, ends, geometry in run.pins.rows]))
    yield ""
    yield "### Conditions"
    yield ""
    for cells, told in _by_conditions(run.cells):
        yield f"- {', '.join(code(c) for c in cells)}"
        yield from (f"  - {label}: {text(value)}" for label, value in told)
    yield from _section("Verdicts", _table(
        ["cell", "card", "verdict", "reason", "seconds", "detail"],
        [[code(c.cell), text(c.card), f"{MARKS.get(c.verdict, '')} {c.verdict}{'' if c.final else ', not final'}",
          text(c.reason), f"{c.wall_s:.1f}", text(c.detail)] for c in run.cells]))
    for cell in run.cells:
        if cell.tail:
            yield from _folded(f"{code(cell.cell)}: last lines of the log", fenced(cell.tail[-TAIL_CHARACTERS:].splitlines()))
    yield from _section("A/B, one value a boot", _table(
        ["cell", "metric", "prompt tokens", "arm values", "in words"],
        [[code(c.cell), f"{code(c.metric)} ({text(c.unit)}){'' if c.judged else ', not judged'}", text(c.length),
          "; ".join(f"{text(a.arm)} {', '.join(map(number, a.values))}" for a in c.arms), text(c.words)]
         for c in run.contrasts]) if run.contrasts else [])
    yield from ("", *(f"- {text(line)}" for line in run.scenarios)) if run.scenarios else ()
    yield from _section("Tests", [line for suite in run.suites for line in _suite(suite)])
    yield from _section("Patches", _table(
        ["pin", "patch", "applied", "files"],
        [[code(p.pin), code(p.patch), p.words, ", ".join(map(code, p.files))] for p in run.patches])
        if run.patches else [])
    yield from _section("Time", [run.times.words])
    if run.schedule:
        yield from _section("Schedule", [*(f"- {text(line)}" for line in run.schedule.lines), "", *_table(
            run.schedule.columns, [[text(value) for value in row] for row in run.schedule.rows])])
    yield from _section("Unproven", [f"- {text(line)}" for line in run.unproven])
    yield from _section("Files skipped", [f"- {text(line)}" for line in run.problems])


def _by_conditions(cells: Sequence[CellView]) -> list[tuple[list[str], tuple[tuple[str, str], ...]]]:
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for cell in cells:
        groups.setdefault(cell.conditions, []).append(cell.cell)
    return [(names, told) for told, names in groups.items()]


def _suite(suite: SuiteView) -> Iterable[str]:
    counts = "; ".join(f"{text(arm)} {counts}" for arm, counts in zip(suite.arms, suite.counts, strict=True))
    yield f"- {code(suite.cell)}, {code(suite.suite)}: {suite.words or 'one arm alone'} ({counts})"
    for name, tests in suite.groups:
        if not tests:
            continue
        listed = [f"- {code(t.nodeid)}{': ' + text(t.message) if t.message else ''}" for t in tests[:NAMES]]
        if len(tests) > NAMES:
            listed.append(f"- and {len(tests) - NAMES} more, in table tests")
        yield from _folded(f"{len(tests)} {name}", listed)


def _section(title: str, lines: Iterable[str]) -> Iterable[str]:
    lines = list(lines)
    if lines:
        yield from ("", f"### {title}", "", *lines)


def _folded(summary: str, lines: Iterable[str]) -> Iterable[str]:
    yield from ("", f"<details><summary>{_html_code(summary)}</summary>", "", *lines, "", "</details>", "")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _html_code(summary: str) -> str:
    """Markdown is not read inside <summary>."""
    return re.sub(r"`([^`]*)`", lambda found: f"<code>{text(found[1])}</code>", summary)
