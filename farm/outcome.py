"""What a patch's hunks make of a file by their own words: GNU patch's work is held against it.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from farm.diffhunks import Hunk

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")


def applied(content: bytes, hunks: Sequence[tuple[Hunk, int]]) -> bytes | None:
    """`content` with these hunks applied, each (hunk, lines by which it moved); None where one does not fit exactly."""
    lines: list[bytes] = _LINE.findall(content)
    made: list[bytes] = []
    at = 0
    for hunk, moved in hunks:
        begin, written = hunk.span[0] + moved - 1, list(_lines(hunk))
        before = [line for sign, line in written if sign != b"+"]
        if begin < at or lines[begin:begin + len(before)] != before:
            return None
        made += lines[at:begin]
        made += [line for sign, line in written if sign != b"-"]
        at = begin + len(before)
    return b"".join([*made, *lines[at:]])


def _lines(hunk: Hunk) -> Iterator[tuple[bytes, bytes]]:
    """(sign, line) of a hunk, the line with its newline unless the marker below says that the file has none there."""
    for line, below in zip(hunk.body, (*hunk.body[1:], b""), strict=True):
        if line[:1] != b"\\":
            yield line[:1], line[1:] + (b"" if below[:1] == b"\\" else b"\n")
