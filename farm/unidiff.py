"""The structure of a unified diff: which files, which hunks, on which lines.  Pure; bytes in, values out.

What passes here means to GNU patch what it means to its reader; `farm.diffhead` and `farm.diffhunks` say how strictly.
"""

from __future__ import annotations

from dataclasses import dataclass

from farm.diffhead import REWRITE, Head, read_head
from farm.diffhead import PatchSyntaxError as PatchSyntaxError
from farm.diffhunks import HUNK, Hunk, read_hunks

# No patch of source needs more, and what is read here must not take long whatever it is.
LONGEST = 8 << 20  # bytes of one patch
MOST_LINES = 200_000
MOST_FILES = 1000
_OPENS = (b"d", b"-", b"@", b"B", b"G")  # first bytes of the lines that matter between sections


@dataclass(frozen=True)
class FilePatch:
    """What a patch says about one file.

    `line` is the first line of its headers, `last` the line after its last hunk, and `end` the line before which the next
    one's headers begin, all from 1.  `old` and `new` are the names as written (a/…, b/…; None for /dev/null), `moved` the two
    names of a rename or copy (without a/ and b/), `words` git's extended header lines.
    """

    line: int
    last: int
    end: int
    old: str | None
    new: str | None
    hunks: tuple[Hunk, ...]
    words: tuple[bytes, ...] = ()
    moved: tuple[str, ...] = ()
    symlink: bool = False

    @property
    def headers(self) -> tuple[str, ...]:
        return tuple(name for name in (self.old, self.new) if name is not None)

    @property
    def paths(self) -> tuple[str, ...]:
        """Names with their first component (a/, b/) taken off, each once; the new name last."""
        return self.stripped(1)

    @property
    def creates(self) -> bool:
        return self.old is None

    @property
    def deletes(self) -> bool:
        return self.new is None

    def stripped(self, level: int) -> tuple[str, ...]:
        names = (name.split("/", level)[-1] for name in self.headers if name.count("/") >= level)
        return tuple(dict.fromkeys(names))


def parse_patch(data: bytes) -> tuple[FilePatch, ...]:
    """Sections of a patch, in its order.

    Raises PatchSyntaxError: empty, too long, binary, another form of diff or none; a hunk whose counts do not fit its
    lines, that is cut off, stands apart, or comes out of order; headers that are cut off or contradict each other.
    """
    if not data:
        raise PatchSyntaxError("it is empty (0 bytes); GNU patch would accept it and change nothing. Restore it or take it out "
                               "of the series")
    for number, most, what in ((len(data), LONGEST, "bytes"), (data.count(b"\n"), MOST_LINES, "lines")):
        if number > most:
            raise PatchSyntaxError(f"it has more than {most:,} {what}, which no patch of source needs; split it")
    lines = data.split(b"\n")
    whole = lines[-1] == b""
    if whole:
        lines.pop()
    found: list[tuple[int, int, Head, tuple[Hunk, ...]]] = []
    at = 0
    while at < len(lines):
        if lines[at][:1] not in _OPENS:
            at += 1
            continue
        head = read_head(lines, at)
        if head is None:
            if HUNK.match(lines[at]):
                raise PatchSyntaxError("this hunk belongs to no file, and GNU patch would leave it out or guess its file: its "
                                       "`---` and `+++` lines are not right above it, or the hunk before has line counts that "
                                       "are too small", at + 1)
            at += 1
            continue
        hunks, last = read_hunks(lines, head.end, head)
        if not whole and last == len(lines) and not lines[-1].startswith(b"\\"):
            raise PatchSyntaxError(f"it is cut off in the middle of its last line. {REWRITE}", len(lines))
        if len(found) == MOST_FILES:
            raise PatchSyntaxError(f"it names more than {MOST_FILES:,} files; split it", at + 1)
        found.append((at, last, head, hunks))
        at = last
    if not found:
        raise PatchSyntaxError("it holds no unified diff (`---`, `+++`, `@@` lines); write it with diff -u or git diff")
    ends = [begin for begin, *_ in found[1:]] + [len(lines)]
    return tuple(FilePatch(begin + 1, last + 1, end + 1, head.old, head.new, hunks, head.words, head.moved, head.symlink)
                 for end, (begin, last, head, hunks) in zip(ends, found, strict=True))
