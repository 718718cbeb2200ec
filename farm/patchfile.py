"""The structure of a patch file: which files, which hunks, on which lines.  Pure; bytes in, values out.

Only unified diffs, plain or as git writes them.  Line counts of a hunk
header are taken at their word to find a hunk's end, so that a removed line
`-- x` is not mistaken for a file header; whether the counts are right is
GNU patch's to say (and the linter's).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NOWHERE = "/dev/null"
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_BODY = re.compile(rb"[+ ].|-[^-]")  # a hunk's line; not `-- `, which comes before a mail's signature
_GIT = re.compile(rb"diff --git (\S+) (\S+)")
_BINARY = (b"GIT binary patch", b"Binary files ")
_GIT_WORDS = (b"index ", b"old mode ", b"new mode ", b"deleted file mode ", b"new file mode ", b"similarity index ",
              b"dissimilarity index ", b"rename from ", b"rename to ", b"copy from ", b"copy to ")


class PatchSyntaxError(ValueError):
    """The bytes are no patch that a tree can take; `line` is where (from 1)."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Hunk:
    """One hunk header: its line in the patch file (from 1), and (start, line count) before and after."""

    line: int
    old: tuple[int, int]
    new: tuple[int, int]


@dataclass(frozen=True)
class FilePatch:
    """What a patch says about one file.

    `line` is the first line of its headers and `end` the line after its last, from 1.  `headers` are the
    names as written (a/… and b/…, `/dev/null` left out; a rename's two names without prefix stay out too).
    """

    line: int
    end: int
    headers: tuple[str, ...]
    hunks: tuple[Hunk, ...]
    symlink: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """Names with their first component (a/, b/) taken off, each once; the new name last."""
        return self.stripped(1)

    def stripped(self, level: int) -> tuple[str, ...]:
        names = (name.split("/", level)[-1] for name in self.headers if name.count("/") >= level)
        return tuple(dict.fromkeys(names))


def parse_patch(data: bytes) -> tuple[FilePatch, ...]:
    """Sections of a patch, in its order.  Raises PatchSyntaxError for a binary patch and for one without a diff."""
    lines = data.split(b"\n")
    starts: list[int] = []
    found: list[tuple[tuple[str, ...], tuple[Hunk, ...], bool]] = []
    at = 0
    while at < len(lines):
        begin = at
        headers, symlink, at = _headers(lines, at)
        if at == begin:
            if _HUNK.match(lines[at]):
                raise PatchSyntaxError("this hunk belongs to no file, and GNU patch would silently leave it out: a line stands "
                                       "between it and the hunk before, or that one's line counts are too small", at + 1)
            at += 1
            continue
        hunks: list[Hunk] = []
        while at < len(lines) and (match := _HUNK.match(lines[at])):
            old, new = (_span(match[1], match[2]), _span(match[3], match[4]))
            hunks.append(Hunk(at + 1, old, new))
            at = _body_end(lines, at + 1, old[1], new[1])
        if not hunks and lines[at - 1].startswith(b"+++ "):
            raise PatchSyntaxError("no hunk (`@@ -1,2 +1,2 @@`) follows these headers: the diff was cut off, or is of "
                                   "another form than unified", begin + 1)
        if hunks and at < len(lines) and _BODY.match(lines[at]):
            raise PatchSyntaxError(f"the hunk on line {hunks[-1].line} has more lines than its counts say, and GNU patch would "
                                   "silently leave this one out", at + 1)
        starts.append(begin)
        found.append((headers, tuple(hunks), symlink))
    if not found:
        raise PatchSyntaxError("it holds no unified diff (`---`, `+++`, `@@` lines); write it with diff -u or git diff")
    ends = [*starts[1:], len(lines)]
    return tuple(FilePatch(start + 1, end + 1, headers, hunks, symlink)
                 for start, end, (headers, hunks, symlink) in zip(starts, ends, found, strict=True))


def _headers(lines: list[bytes], at: int) -> tuple[tuple[str, ...], bool, int]:
    """Headers that begin at line index `at`: (names, makes a symbolic link, index after them), or `at` itself."""
    names: tuple[str, ...] = ()
    symlink = False
    start = at
    if git := _GIT.match(lines[at]):
        names = (_name(git[1]), _name(git[2]))
        at += 1
        while at < len(lines) and lines[at].startswith(_GIT_WORDS):
            symlink |= lines[at].rstrip().endswith(b" 120000")
            at += 1
    if at < len(lines) and lines[at].startswith(_BINARY):
        raise PatchSyntaxError("it holds a binary change, which GNU patch skips; a tree takes text alone", at + 1)
    if at + 1 < len(lines) and lines[at].startswith(b"--- ") and lines[at + 1].startswith(b"+++ "):
        names = tuple(n for n in (_name(lines[at][4:]), _name(lines[at + 1][4:])) if n != NOWHERE)
        at += 2
    return names, symlink, at if names else start


def _name(written: bytes) -> str:
    """A header's file name: what stands before a tab (a time stamp follows), quotes taken off."""
    return written.split(b"\t", 1)[0].strip().strip(b'"').decode("utf-8", errors="surrogateescape")


def _span(start: bytes, count: bytes | None) -> tuple[int, int]:
    return int(start), 1 if count is None else int(count)


def _body_end(lines: list[bytes], at: int, old: int, new: int) -> int:
    """Index after a hunk's lines, of which `old` belong to the file before and `new` to the file after."""
    while at < len(lines) and (old > 0 or new > 0):
        kind = lines[at][:1]
        if kind in (b" ", b""):  # editors trim a blank context line's space; GNU patch takes that
            if kind == b"" and at == len(lines) - 1:
                break
            old, new = old - 1, new - 1
        elif kind == b"-":
            old -= 1
        elif kind == b"+":
            new -= 1
        elif kind != b"\\":
            break
        at += 1
    while at < len(lines) and lines[at].startswith(b"\\"):
        at += 1
    return at
