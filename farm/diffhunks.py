"""The hunks of one file in a unified diff, each one recounted.  Pure.

Stricter than GNU patch, which takes hunks that were cut off at the end of the patch, and leaves out what a hunk's counts do
not cover.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from farm.diffhead import ANY_HUNK, REWRITE, Head, PatchSyntaxError
from farm.findings import Status

HUNK = re.compile(rb"@@ -(\d{1,10})(?:,(\d{1,10}))? \+(\d{1,10})(?:,(\d{1,10}))? @@")
FARTHEST = 10_000_000  # lines: GNU patch goes over as many, one by one, where a hunk says so
_SIGNATURE = re.compile(rb"-- ?\r?$")  # of a mail, after the last hunk
_PROSE = re.compile(rb" |- \S")  # what may stand below an empty line after the last hunk: words, a list


@dataclass(frozen=True)
class Hunk:
    """One hunk: the line of its header in the patch file (from 1), (start, line count) before and after, its lines.

    `body` are its lines as written, first character included, markers of a missing newline too.
    """

    line: int
    old: tuple[int, int]
    new: tuple[int, int]
    body: tuple[bytes, ...] = field(default=(), compare=False, repr=False)

    @property
    def wanted(self) -> tuple[bytes, ...]:
        """The lines that it expects in the file: context and removed."""
        return tuple(line[1:] for line in self.body if line[:1] in (b" ", b"-", b""))

    @property
    def changes(self) -> tuple[bytes, ...]:
        """Its removed and added lines, sign included."""
        return tuple(line for line in self.body if line[:1] in (b"-", b"+"))

    @property
    def context(self) -> tuple[int, int]:
        """How many context lines lead and trail."""
        lines = [line for line in self.body if line[:1] != b"\\"]
        marks = [number for number, line in enumerate(lines) if line[:1] in (b"-", b"+")]
        return marks[0], len(lines) - 1 - marks[-1]

    @property
    def span(self) -> tuple[int, int]:
        """Lines [begin, end) of the old file; a pure insertion takes none, and stands after its start."""
        start, count = self.old
        return (start, start + count) if count else (start + 1, start + 1)


def read_hunks(lines: list[bytes], at: int, head: Head) -> tuple[tuple[Hunk, ...], int]:
    """The hunks that begin at line index `at`, and the index after them."""
    hunks: list[Hunk] = []
    while at < len(lines) and lines[at].startswith(ANY_HUNK):
        hunk, at = _hunk(lines, at)
        if hunks and hunk.span[0] < hunks[-1].span[1]:
            raise PatchSyntaxError(f"this hunk begins at line {hunk.old[0]} of the file, before the end of the one above it: "
                                   f"the two are out of order, overlap, or are the same. {REWRITE}", hunk.line,
                                   Status.DUPLICATE_DIFF if any(_same(hunk, other) for other in hunks) else Status.MALFORMED)
        if (head.old is None and hunk.old != (0, 0)) or (head.new is None and hunk.new != (0, 0)):
            raise PatchSyntaxError("its headers say that the file is new or deleted (/dev/null), but this hunk keeps or "
                                   f"expects lines. {REWRITE}", hunk.line)
        hunks.append(hunk)
    if head.plain and not hunks:
        raise PatchSyntaxError("no hunk (`@@ -1,2 +1,2 @@`) follows these headers: the diff was cut off, or is of another form "
                               "than unified", head.end - 1)
    if hunks:
        _check_rest(lines, at, hunks[-1])
    return tuple(hunks), at


def _same(one: Hunk, other: Hunk) -> bool:
    return one.old == other.old and one.body == other.body


def _hunk(lines: list[bytes], at: int) -> tuple[Hunk, int]:
    """The hunk whose header is at line index `at`, and the index after it."""
    header, match = at + 1, HUNK.match(lines[at])
    if match is None:
        raise PatchSyntaxError("this hunk header cannot be read; it has the form `@@ -1,2 +1,2 @@`", header)
    old, new = _span(match[1], match[2]), _span(match[3], match[4])
    if old[1] == new[1] == 0 or (old[1] and not old[0]) or (new[1] and not new[0]):
        raise PatchSyntaxError(f"this hunk header counts no lines, or counts them from line 0. {REWRITE}", header)
    if max(old[0], new[0]) > FARTHEST:
        raise PatchSyntaxError(f"this hunk says that it stands at line {max(old[0], new[0])}: no source has so many, and GNU "
                               f"patch would count up to it. {REWRITE}", header)
    left_old, left_new, begin, at = old[1], new[1], at + 1, at + 1
    while at < len(lines) and (left_old > 0 or left_new > 0):
        kind = lines[at][:1]
        if kind == b"\\":
            _check_marker(lines, at, begin, left_old, left_new)
        elif kind in (b" ", b"", b"-", b"+"):  # b"": editors trim a blank context line's space, and GNU patch takes that
            left_old -= kind != b"+"
            left_new -= kind != b"-"
        else:
            break
        at += 1
    if left_old > 0 or left_new > 0:
        raise PatchSyntaxError(f"the hunk on line {header} ends here before its counts are full ({max(left_old, 0)} lines "
                               f"of the old and {max(left_new, 0)} of the new file are missing): it was cut off or trimmed, or "
                               f"its counts are wrong. {REWRITE}", min(at + 1, len(lines)))
    if left_old or left_new:
        raise PatchSyntaxError(f"the hunk on line {header} has more lines than one of its counts says. {REWRITE}", at)
    if lines[at - 1] == b"":
        raise PatchSyntaxError(f"the last line of the hunk on line {header} is empty: the single space of a blank context "
                               "line was trimmed, and the hunk may have been cut off here, which GNU patch would not see. "
                               f"{REWRITE}", at)
    if at < len(lines) and lines[at].startswith(b"\\"):
        at += 1
    if (lines[at - 2].startswith(b"--- ") and lines[at - 1].startswith(b"+++ ") and at < len(lines)
            and lines[at].startswith(ANY_HUNK)):
        raise PatchSyntaxError(f"the counts of the hunk on line {header} reach into these headers of the next file. {REWRITE}",
                               at - 1)
    hunk = Hunk(header, old, new, tuple(lines[begin:at]))
    if not hunk.changes:
        raise PatchSyntaxError(f"this hunk changes nothing. {REWRITE}", header)
    return hunk, at


def _span(start: bytes, count: bytes | None) -> tuple[int, int]:
    return int(start), 1 if count is None else int(count)


def _check_marker(lines: list[bytes], at: int, begin: int, left_old: int, left_new: int) -> None:
    """`\\ No newline at end of file`, in any language: of the last line of a side, and so of none before its end."""
    before = lines[at - 1][:1] if at > begin else b"\\"
    if before == b"\\" or (before != b"+" and left_old > 0) or (before != b"-" and left_new > 0):
        raise PatchSyntaxError("this marker says that the file ends with the line above, but the hunk goes on. "
                               f"{REWRITE}", at + 1)


def _check_rest(lines: list[bytes], at: int, hunk: Hunk) -> None:
    """No line that looks like a hunk's may follow the last hunk: GNU patch would leave it out without a word."""
    below = next((number for number in range(at, min(at + 4, len(lines))) if lines[number].strip()), at)
    if below < len(lines) and b"@@" in lines[below] and not lines[below].startswith(ANY_HUNK):
        raise PatchSyntaxError("this looks like a hunk header and cannot be read as one: GNU patch would silently leave the "
                               f"hunk out. {REWRITE}", below + 1)
    begin = at
    while at < len(lines) and lines[at][:1] in (b"", b" ", b"+", b"-", b"\\"):
        line = lines[at]
        if _SIGNATURE.match(line) or line.startswith(b"--- "):
            return
        if line and (at == begin or not _PROSE.match(line)):
            raise PatchSyntaxError(f"the hunk on line {hunk.line} has more lines than its counts say, and GNU patch would "
                                   f"silently leave this one out. {REWRITE}", at + 1)
        at += 1
