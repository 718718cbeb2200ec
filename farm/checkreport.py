"""A checked series as one object, and as lines for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from farm.diffhead import printable
from farm.findings import CheckReport, ListProblem, PatchResult, Rejected

MOST_LINES = 8  # of a rejected hunk's and of the tree's text on a terminal; the object has all
MOST_HUNKS = 6
MOST_PROBLEMS = 200
LONGEST_LINE = 2000  # characters; the object has all


def to_json(report: CheckReport) -> dict[str, Any]:
    """The object that `farm check --json` prints; `series` holds the list's problems, notes too."""
    return {
        "directory": report.directory, "tree": report.tree, "version": report.version, "exit_code": report.exit_code,
        "patches": [_patch(result) for result in report.patches],
        "series": [{"problem": p.problem.value, "name": p.name, "line": p.line, "detail": p.detail, "note": p.problem.is_note}
                   for p in report.problems],
    }


def _patch(result: PatchResult) -> dict[str, Any]:
    found = result.application
    faults = (f"{f.kind.value}: {f.detail}" for f in result.findings)
    return {
        "name": result.name, "status": found.status.value, "hunks": found.hunks, "offsets": list(found.offsets),
        "detail": "; ".join(filter(None, [found.detail, *faults])), "line": found.line, "files": list(found.files),
        "already": found.already, "ok": result.ok,
        "rejected": [{"file": r.file, "hunk": r.hunk, "line": r.line, "wanted": list(r.wanted), "stands": list(r.stands),
                      "at": r.at, "already": r.already} for r in found.rejected],
        "findings": [{"kind": f.kind.value, "file": f.file, "line": f.line, "name": f.name, "detail": f.detail}
                     for f in result.findings],
        "sha256": result.sha256,
    }


def render(report: CheckReport, console: Console) -> None:
    """One line a patch, what is wrong with it below; the list's problems; what was judged and how it ends."""
    width = max((len(result.name) for result in report.patches), default=0)
    for result in report.patches:
        _print(console, _headline(result, width))
        for line in _below(report, result):
            _print(console, line)
    for problem in report.problems[:MOST_PROBLEMS]:
        _print(console, _problem(report, problem))
    if len(report.problems) > MOST_PROBLEMS:
        _print(console, Text(f"and {len(report.problems) - MOST_PROBLEMS} more problems of the list; --json has them all"))
    where = "no tree, by its list and text alone"
    if report.tree is not None:
        where = f"{report.tree} (vLLM {report.version or 'of an unknown version'})"
    style = "green" if report.exit_code == 0 else "red"
    _print(console, Text(f"{report.directory} on {where}: {summary(report)}", style=style))


def summary(report: CheckReport) -> str:
    """How it ends, in words: how many patches of which status, and what the list has."""
    counts = Counter(result.application.status.value + (", with faults in its code" if result.findings else "")
                     for result in report.patches)
    words = [f"{number} {status}" for status, number in counts.items()]
    if faults := sum(len(result.findings) for result in report.patches):
        words.append(f"{faults} {'fault' if faults == 1 else 'faults'} in patched code")
    problems = [problem for problem in report.problems if not problem.problem.is_note]
    if problems:
        words.append(f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'} of the list")
    return ", ".join(words) or "a series without patches"


def _print(console: Console, line: Text) -> None:
    """Names and lines of patches are data: whatever they hold, the terminal shows it and obeys none of it."""
    if len(line) > LONGEST_LINE:  # rich measures every character, seconds for a megabyte
        line = Text(f"{line.plain[:LONGEST_LINE]} …", style=line.style)
    line.end = ""
    said = Text.assemble(*((printable(part.text), part.style or "") for part in line.render(console)))
    console.print(said, soft_wrap=True, highlight=False)


def _headline(result: PatchResult, width: int) -> Text:
    found = result.application
    hunks = f"{found.hunks} hunk{'' if found.hunks == 1 else 's'}"
    files = f", {len(found.files)} file{'' if len(found.files) == 1 else 's'}" if found.files else ""
    line = Text(f"{result.name:<{width}}  ")
    line.append(f"{found.status.value:<14}", style="green" if result.ok else "red")
    faults = f", {len(result.findings)} in its code to mend" if result.findings else ""
    return line.append(f"  {hunks}{files}{faults}" if found.status.good else "")


def _below(report: CheckReport, result: PatchResult) -> Iterator[Text]:
    found = result.application
    if found.detail:
        place = "" if found.status.good else f"{report.directory}/{result.name}:{f'{found.line}:' if found.line else ''} "
        yield Text(f"    {place}{found.detail}")
    for rejected in found.rejected[:MOST_HUNKS]:
        yield from _hunk(rejected)
    if len(found.rejected) > MOST_HUNKS:
        yield Text(f"    and {len(found.rejected) - MOST_HUNKS} more rejected hunks; --json has them all", style="dim")
    for fault in result.findings:
        yield Text(f"    {fault.file}:{fault.line}: {fault.kind.value}: {fault.detail}", style="red")


def _hunk(rejected: Rejected) -> Iterator[Text]:
    """What the hunk expects, and what stands there instead."""
    if rejected.at is None:
        return
    yield Text(f"    hunk #{rejected.hunk} of {rejected.file} expects:", style="dim")
    yield from _lines(rejected.wanted)
    yield Text("    the same stands there:" if rejected.stands == rejected.wanted else
               f"    and from line {rejected.at} on there stands:", style="dim")
    if rejected.stands != rejected.wanted:
        yield from _lines(rejected.stands)


def _lines(lines: tuple[str, ...]) -> Iterator[Text]:
    for line in lines[:MOST_LINES]:
        yield Text(f"      | {line.expandtabs()}".rstrip())
    if len(lines) > MOST_LINES:
        yield Text(f"      | … {len(lines) - MOST_LINES} more", style="dim")


def _problem(report: CheckReport, problem: ListProblem) -> Text:
    note = problem.problem.is_note
    line = Text(f"{report.directory}/series:{f'{problem.line}:' if problem.line else ''} ")
    return line.append(f"{problem.problem.value}: {problem.detail}{' (a note)' if note else ''}", style="" if note else "red")
