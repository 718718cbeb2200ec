"""The hunks of a patch line by line, and what a release has at the place of each.  Pure.

A change is compared as counts of code lines: what its hunk adds must stand at that place as often as it would after
the patch, what it removes as seldom.  Comments and white space are put aside; a docstring counts as code.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import Enum

from farm.moved import LineMap, folded
from farm.unidiff import FilePatch

_HASH_COMMENTS = (".py", ".pyi", ".yaml", ".yml", ".toml", ".cfg", ".sh")
_WORD = re.compile(r"[A-Za-z_]\w*")
# A word that stands by itself, as the name of something would: no attribute, no keyword of a call.
NAME = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?!\w|\s*=(?!=))")
_AROUND = 25  # lines about a hunk in which its lines are counted
_ALIKE = 0.6  # from here on two lines are called alike
_LOOKED_AT = 200  # lines of a place that are compared for likeness with each of
_LOOKED_FOR = 40  # lines of a hunk, each with
_CANDIDATES = 8
_RUNS = 40  # removed runs of a hunk that may be looked for
_ALIKE_SAID = 3
_WORDS_OF_A_LINE = 3  # with fewer, a line is like too many


class Word(str, Enum):
    """What became of one hunk's place in a release, comments and white space aside."""

    SAME = "same"  # what it adds is there, and what it removes is not
    GONE = "gone"  # what it removes is gone, and something else was put there
    PARTLY = "partly gone"  # some of what it removes is gone
    STANDS = "stands as it was"
    ABSENT = "not there"  # it only adds; its lines are not there, and the code about the place has changed
    STACKED = "on another patch"  # what it removes is not in the release that it was made for: an earlier patch puts it there
    NO_CODE = "no code"  # it changes comments or white space alone
    NO_FILE = "no file"
    UNKNOWN = "place not found"


@dataclass(frozen=True)
class HunkText:
    """One hunk with its lines.

    `file` is what it changes and `becomes` its name afterwards, relative to the package (None: made, or deleted, here).
    `number` counts within the file's part from 1, `line` is that of its header in the patch, `start` the index (from 0)
    of its first line in the old file.  `lines` are (` `, `-` or `+`, text).
    """

    file: str | None
    becomes: str | None
    number: int
    line: int
    start: int
    heading: str
    lines: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return self.file or self.becomes or "?"

    @property
    def old(self) -> tuple[str, ...]:
        return tuple(text for kind, text in self.lines if kind != "+")

    @property
    def new(self) -> tuple[str, ...]:
        return tuple(text for kind, text in self.lines if kind != "-")

    @property
    def change(self) -> tuple[int, int]:
        """First and end index, within `old`, of the lines from the first to the last that it changes."""
        at, first, end = 0, None, 0
        for kind, _ in self.lines:
            if kind != " ":
                first = at if first is None else first
                end = max(end, at + (kind == "-"))
            at += kind != "+"
        return (first or 0), max(end, first or 0)


def hunk_texts(lines: Sequence[bytes], section: FilePatch, names: Sequence[str]) -> tuple[HunkText, ...]:
    """The hunks of one file's part of a patch, of which `lines` are all; `names` are the file's names in the package."""
    file, becomes = None if section.creates else names[0], None if section.deletes else names[-1]
    found = []
    for number, hunk in enumerate(section.hunks, 1):
        body = tuple((text[:1] or " ", text[1:]) for line in hunk.body if not line.startswith(b"\\")
                     for text in (line.decode("utf-8", errors="replace").rstrip("\r"),))
        heading = lines[hunk.line - 1].decode("utf-8", errors="replace").split("@@", 2)[-1].strip()
        found.append(HunkText(file, becomes, number, hunk.line, max(0, hunk.old[0] - (hunk.old[1] > 0)), heading, body))
    return tuple(found)


@dataclass(frozen=True)
class Alike:
    """A line that the patch adds, and the line (`at`, from 1) of the release that is most like it."""

    wanted: str
    stands: str
    at: int


@dataclass(frozen=True)
class Likeness:
    """How a hunk compares with a release: of `added` code lines `there` stand, of `removed` ones `gone` do not."""

    word: Word
    there: int = 0
    added: int = 0
    gone: int = 0
    removed: int = 0
    alike: tuple[Alike, ...] = ()

    @property
    def is_code(self) -> bool:
        return self.word is not Word.NO_CODE


@dataclass(frozen=True)
class Place:
    """Where a hunk is looked for: `older` the lines about it where it applies, `newer` (from index `at`) those of the release.

    `fresh` are the indices, from 0 in the release's file, of lines that the older file does not have.
    """

    older: tuple[str, ...]
    newer: tuple[str, ...]
    at: int
    fresh: frozenset[int]


def mapped_place(lines: LineMap, first: int, end: int) -> Place:
    """The place of old[first:end], widened to kept lines at least _AROUND further out, so that both sides end alike."""
    kept = [i for i, to in enumerate(lines.to) if to >= 0]
    low = max((i for i in kept if i <= first - _AROUND), default=0)
    high = min((i for i in kept if i >= end - 1 + _AROUND), default=len(lines.old) - 1)
    start = lines.to[low] if low in range(len(lines.to)) and lines.to[low] >= 0 else 0
    stop = lines.to[high] + 1 if high >= 0 and lines.to[high] >= 0 else len(lines.new)
    fresh = frozenset(i for i in range(start, stop) if lines.back[i] < 0)
    return Place(lines.old[low:high + 1], lines.new[start:stop], start, fresh)


def similar_place(hunk: HunkText, lines: Sequence[str], at: int) -> Place:
    """The place of a hunk that no listed release takes: as many lines as it has about index `at` of the release's file."""
    first, stop = max(0, at - 3), min(len(lines), at + len(hunk.new) + 3)
    return Place(hunk.old, tuple(lines[first:stop]), first, frozenset(range(first, stop)))


def code(line: str) -> str:
    """A line with its white space folded and its `#` comment off; empty where nothing is left."""
    text = folded(line)
    if text.startswith("#"):
        return ""
    comment = text.find(" #", max(text.rfind("'"), text.rfind('"')) + 1)  # after the last quote it is in no string
    return text if comment < 0 else text[:comment]


def compare(hunk: HunkText, place: Place) -> Likeness:
    """What became of the hunk's change at that place."""
    read = _reader(hunk.name)
    lines = [(kind, read(text)) for kind, text in hunk.lines]
    older, newer = [read(text) for text in place.older], [read(text) for text in place.newer]
    added, removed = _changed(lines)
    if not added and not removed:
        return Likeness(Word.NO_CODE)
    before, now = Counter(older), Counter(newer)
    there = sum(min(n, max(0, now[line] - before[line])) for line, n in added.items())
    stacked = any(before[line] < n for line, n in removed.items())  # then only what stands there at all can be counted
    gone = sum(n if stacked and not now[line] else min(n, max(0, before[line] - now[line])) for line, n in removed.items())
    stands = [line for line in newer if line]
    if there == added.total() and gone == removed.total() and (added or _closed_up(lines, stands)):
        word = Word.SAME
    elif stacked:
        word = Word.STACKED
    elif removed:
        word = Word.GONE if gone == removed.total() else Word.PARTLY if gone else Word.STANDS
    else:
        context = [line for kind, line in lines if line and kind != "+"]
        word = Word.STANDS if context and _in_a_row(context, stands) else Word.ABSENT
    alike = () if word is Word.SAME else _alike(added - (now - before), [(newer[i - place.at], i) for i in sorted(place.fresh)])
    return Likeness(word, there, added.total(), gone, removed.total(), alike)


def names_used(hunk: HunkText) -> tuple[str, ...]:
    """Plain names in the code that it adds: no attributes, no keywords of calls, nothing out of strings."""
    read = _reader(hunk.name)
    added, _ = _changed([(kind, read(text)) for kind, text in hunk.lines])
    quoted = False
    found: dict[str, None] = {}
    for kind, text in hunk.lines:
        if kind == "-":
            continue
        inside, quoted = quoted, quoted ^ (text.count('"""') % 2 == 1)
        if kind == "+" and not inside and not quoted and (line := read(text)) in added:
            bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", line)
            found |= dict.fromkeys(match[1] for match in NAME.finditer(bare) if not keyword.iskeyword(match[1]))
    return tuple(found)


_Coded = Sequence[tuple[str, str]]  # a hunk's lines as (kind, code)


def _reader(file: str) -> Callable[[str], str]:
    """How the code of a line of this file is read."""
    return code if file.endswith(_HASH_COMMENTS) else folded


def _changed(lines: _Coded) -> tuple[Counter[str], Counter[str]]:
    """Code lines that a hunk adds and removes, less those that it only moves or indents.

    Lines that tell something, if there are any: `)` or `return` alone stand everywhere.
    """
    plus, minus = (Counter(line for kind, line in lines if line and kind == sign) for sign in "+-")
    plus, minus = plus - minus, minus - plus
    telling = [Counter({line: n for line, n in found.items() if _tells(line)}) for found in (plus, minus)]
    return (telling[0], telling[1]) if any(telling) else (plus, minus)


def _tells(line: str) -> bool:
    return any(not keyword.iskeyword(word) for word in _WORD.findall(line))


def _closed_up(lines: _Coded, stands: Sequence[str]) -> bool:
    """Whether the code about each removed run stands side by side: nothing came for what is removed.

    From a line that tells something to the next one that does: `)` and `else:` stand side by side everywhere.
    """
    after: list[str] = []
    runs: list[int] = []  # where in `after` something was taken out
    for kind, line in lines:
        if line and kind == "-":
            runs.append(len(after))
        elif line:
            after.append(line)
    for at in sorted(set(runs))[:_RUNS]:
        low = next((i for i in range(at - 1, -1, -1) if _tells(after[i])), None)
        high = next((i for i in range(at, len(after)) if _tells(after[i])), None)
        if low is None or high is None or not _in_a_row(after[low:high + 1], stands):
            return False
    return 0 < len(set(runs)) <= _RUNS


def _in_a_row(wanted: Sequence[str], stands: Sequence[str]) -> bool:
    return "\n".join(["", *wanted, ""]) in "\n".join(["", *stands, ""])


def _alike(missing: Counter[str], fresh: Sequence[tuple[str, int]]) -> tuple[Alike, ...]:
    """For added lines that are not there, the likeliest of the place's new ones (line, index), the best pairs first."""
    new = [(line, i, Counter(_WORD.findall(line))) for line, i in fresh if _tells(line)][:_LOOKED_AT]
    pairs: list[tuple[float, Alike]] = []
    for wanted in list(missing)[:_LOOKED_FOR]:
        words = Counter(_WORD.findall(wanted))
        if words.total() < _WORDS_OF_A_LINE:
            continue
        near = [(line, i) for line, i, other in new if 5 * (words & other).total() >= 2 * max(words.total(), other.total())]
        scored = [(SequenceMatcher(None, wanted[:300], line[:300], False).ratio(), -i, line) for line, i in near[:_CANDIDATES]]
        score, at, line = max(scored, default=(0.0, 0, ""))
        if score >= _ALIKE:
            pairs.append((score, Alike(wanted, line, 1 - at)))
    best = sorted(pairs, key=lambda pair: (-pair[0], pair[1].at))[:_ALIKE_SAID]
    return tuple(sorted((alike for _, alike in best), key=lambda alike: alike.at))
