"""The triage table for a reader: GitHub-flavoured Markdown, and a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.text import Text

from farm.findings import Status
from farm.hunks import Likeness, Word
from farm.report import gfm
from farm.report.suites import plain
from farm.tables import print_table
from farm.triagetable import MOVED, UPSTREAM, HunkTriage, Triaged, TriageTable

MARKS = {Status.CLEAN.value: "✅", Status.OFFSET.value: "✅", UPSTREAM: "⬆️", MOVED: "⚠️"}
BAD = "❌"
STYLES = {UPSTREAM: "cyan", MOVED: "yellow"}
LINES = 12  # of a place that are shown
LONGEST = 160  # characters of a line
MOST_CHARACTERS = 60_000  # GitHub takes 65,536 a comment
NOT_LISTED = "-"
_WORDS = {
    Word.SAME: "the same change is there already", Word.GONE: "gone, something else stands there", Word.PARTLY: "partly gone",
    Word.STANDS: "stands as it was", Word.ABSENT: "not there, and the code about it has changed",
    Word.STACKED: "builds on an earlier patch", Word.NO_CODE: "changes comments or white space alone",
    Word.NO_FILE: "the file is not there", Word.UNKNOWN: "its place was not found",
}


def markdown(table: TriageTable) -> str:
    """The table, then a folded section for each cell that is not clean, as many as a comment holds."""
    head = "\n".join(_head(table)) + "\n"
    told = [cell for cell in table.cells if _notable(cell)]
    sections = ["\n".join(_section(cell)) + "\n" for cell in told]
    left = MOST_CHARACTERS - len(head)
    shown: list[str] = []
    for section in sections:
        left -= len(section)
        if left < 0:
            break
        shown.append(section)
    rest = told[len(shown):]
    if rest:
        names = ", ".join(f"{_code(cell.patch)} on {_text(cell.pin)}" for cell in rest[:20])
        shown.append(f"\nNot shown, for length: {names}{' and others' if len(rest) > 20 else ''}. `--json` has all of it.\n")
    return head + "".join(shown)


def render(table: TriageTable, console: Console) -> None:
    """Print the table, then what is to be known of each cell that is not clean, and which series served each pin."""
    pins = [pin.label for pin in table.pins]
    print_table(console, ("patch", *pins), [
        (name, *(_words(table.cell(name, pin)) for pin in pins)) for name in table.patches])
    for cell in table.cells:
        if _notable(cell):
            title = plain(f"{cell.patch} on {cell.pin}: {cell.status}")
            console.print(Text.assemble("\n", (title, _style(cell))), soft_wrap=True)
            for line in _lines(cell):
                console.print(Text(plain(line)), soft_wrap=True, highlight=False)
    console.print(Text("\n" + "\n".join(plain(line) for line in _sources(table))), soft_wrap=True, highlight=False)


def _notable(cell: Triaged) -> bool:
    return cell.status != Status.CLEAN.value or bool(cell.detail)


def _words(cell: Triaged | None) -> str:
    """A cell in short."""
    if cell is None:
        return NOT_LISTED
    failing = sum(h.applies is False for h in cell.hunks)
    if not cell.good and failing:
        return f"{cell.status} {failing}/{len(cell.hunks)}"
    return cell.status


def _style(cell: Triaged) -> str:
    return STYLES.get(cell.status, "" if cell.good else "bold red")


def _sources(table: TriageTable) -> Iterable[str]:
    for pin in table.pins:
        count = f"{len(pin.patches)} patch{'' if len(pin.patches) == 1 else 'es'}"
        yield f"{pin.label}: vLLM {pin.version}, {count} of {pin.directory or 'no directory'}, on {pin.package}"
    if any(cell.good for cell in table.cells):
        yield "a hunk that applies is not yet code that works: farm check DIR --pin PIN looks at the patched code too"


def _lines(cell: Triaged) -> Iterable[str]:
    """A cell on a terminal: what to know, then a line a hunk, by file."""
    if cell.detail:
        yield f"  {cell.detail}"
    file = None
    for hunk in cell.hunks:
        told = _hunk_words(hunk)
        if told and hunk.file != file:
            file = hunk.file
            yield f"  {file}"
        if told:
            yield f"    hunk {hunk.number}, line {hunk.line} of the patch{_at(hunk)}: {told}"
        yield from (f"        {line}" for line in _alike(hunk, lambda text: f"`{text}`"))


def _at(hunk: HunkTriage) -> str:
    """Where its place is in the release, with the file's name where that is another."""
    if hunk.there is None or hunk.at is None:
        return ""
    line = (hunk.focus or (hunk.at,))[0]
    return f", here line {line}" if hunk.there == hunk.file else f", here {hunk.there}:{line}"


# --- one hunk -------------------------------------------------------------------------------


def _hunk_words(hunk: HunkTriage) -> str:
    """How it went and what became of its place, in a line."""
    went = ("" if hunk.applies is None else "does not apply" if not hunk.applies else
            f"applies with offset {hunk.offset}" if hunk.offset else "applies")
    near = ""
    if hunk.movement is not None:
        near = f"{hunk.movement.near.changed} code lines near it changed"
        if hunk.movement.function and hunk.movement.in_function is not None:
            inside = hunk.movement.in_function  # which may reach further than what is near
            near += f"; {inside.changed} of the {inside.of} in {hunk.movement.function} did"
    astray = f"lands on line {hunk.astray}, which is not its place" if hunk.astray else ""
    lost = f"uses {', '.join(hunk.lost)}, which is gone" if hunk.lost else ""
    there = "" if hunk.there in (None, hunk.file) else f"the file is now {hunk.there}"
    became = "" if hunk.movement is not None or hunk.likeness is None else _became(hunk.likeness)
    return "; ".join(filter(None, (went, astray, became, there, near, lost)))


def _became(like: Likeness) -> str:
    counts = [f"removed lines gone: {like.gone} of {like.removed}" if like.removed else "",
              f"added lines there: {like.there} of {like.added}" if like.added else ""]
    told = "" if like.word in (Word.SAME, Word.NO_CODE) else ", ".join(filter(None, counts))
    return f"{_WORDS[like.word]} ({told})" if told else _WORDS[like.word]


def _alike(hunk: HunkTriage, code: Callable[[str], str]) -> Iterable[str]:
    if hunk.likeness is not None and hunk.likeness.word is not Word.SAME:
        for alike in hunk.likeness.alike:
            yield f"{code(alike.wanted[:LONGEST])} is like line {alike.at}: {code(alike.stands[:LONGEST])}"


def _stands(hunk: HunkTriage) -> Sequence[str]:
    """The lines of the place with their numbers, LINES at most, from just before what changes."""
    if hunk.at is None or not hunk.stands:
        return ()
    first, end = hunk.focus or (hunk.at, hunk.at)
    skipped = max(0, first - 1 - hunk.at) if len(hunk.stands) > LINES else 0
    numbered = [f"{hunk.at + i:5}  {plain(line)[:LONGEST]}" for i, line in enumerate(hunk.stands)][skipped:]
    if len(numbered) <= LINES:
        return numbered
    more = max(0, end - 1 - (hunk.at + skipped + LINES - 1))
    return [*numbered[:LINES - 1], f"    …  {more} more lines" if more else "    …"]


# --- Markdown -------------------------------------------------------------------------------


def _head(table: TriageTable) -> Iterable[str]:
    bad = sum(not cell.good for cell in table.cells)
    yield (f"## Triage: {len(table.patches)} patch{'' if len(table.patches) == 1 else 'es'} on {len(table.pins)} "
           f"pin{'' if len(table.pins) == 1 else 's'}, {bad or 'no'} cell{'' if bad == 1 else 's'} to rebase")
    yield ""
    yield f"| patch | {' | '.join(_text(pin.label) for pin in table.pins)} |"
    yield "|---|" + "---|" * len(table.pins)
    for name in table.patches:
        cells = [table.cell(name, pin.label) for pin in table.pins]
        yield f"| {_code(name)} | {' | '.join(_marked(cell) for cell in cells)} |"
    yield ""
    for line in _sources(table):
        yield f"- {_text(line)}"
    yield ""


def _marked(cell: Triaged | None) -> str:
    return _words(cell) if cell is None else f"{MARKS.get(cell.status, BAD)} {_text(_words(cell))}"


def _section(cell: Triaged) -> Iterable[str]:
    yield f"<details><summary><code>{_text(cell.patch)}</code> on {_text(cell.pin)}: {_text(_words(cell))}</summary>"
    yield ""
    yield _text(cell.detail) or "It applies."
    if cell.base is not None:
        yield f"Compared with {_text(cell.base)}, the nearest listed pin that takes it."
    yield ""
    file = None
    for hunk in cell.hunks:
        told = _hunk_words(hunk)
        if told and hunk.file != file:
            file = hunk.file
            yield from ("", _code(file))
        if told:
            place = f"line {hunk.line} of the patch{_at(hunk)}"
            yield from ("", f"**Hunk {hunk.number}** ({_text(place)}): {_text(told)}")
        if hunk.applies is False and (lines := _stands(hunk)):
            yield from ("", *gfm.fenced(lines))
        if alike := [f"- {line}" for line in _alike(hunk, _code)]:
            yield from ("", *alike)
    yield from ("", "</details>", "")


def _text(value: str) -> str:
    return gfm.text(plain(value))


def _code(value: str) -> str:
    return gfm.code(plain(value))
