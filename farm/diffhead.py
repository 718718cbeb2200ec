"""The headers of one file in a unified diff, plain or as git writes them.  Pure.

Sources: git-diff(1) on extended headers and quoted names; GNU patch 2.7.6 on what it reads of them, tried form by form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from farm.findings import Status

NOWHERE = "/dev/null"
PACKAGE = "vllm"
REWRITE = "Write the patch anew with diff; never edit or trim a hunk by hand"
ANY_HUNK = b"@@ -"
LONGEST_LINE = 10_000  # bytes of a header; a path has at most 4096, and quoting makes up to four of one
_GIT = b"diff --git "
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb"\\([0-7]{1,3}|.)")
_ESCAPES = {b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r"}
# A name as GNU patch reads it: quoted, up to a tab, or up to a space with a time stamp or nothing after it.
_NAME = re.compile(rb' *("(?:[^"\\]|\\.)*"|[^\t]*(?=\t)|[^ \t]*)(?:\t.*| +\d.*| +[A-Z][a-z]{2} .*| *)$')
_BINARY = re.compile(rb"GIT binary patch\s*$|Binary files .* differ\s*$")
_MODE = re.compile(rb"(?:old mode|new mode|deleted file mode|new file mode|index \S+) (\d{6})\s*$")
_PLAIN_MODE = re.compile(rb"100[0-7]{3}$|120000$")  # a symbolic link is refused by what is done with it
_MODES = (b"old mode ", b"new mode ", b"deleted file mode ", b"new file mode ")
_MOVES = (b"rename from ", b"rename to ", b"copy from ", b"copy to ")
_EXTENDED = (b"index ", b"similarity index ", b"dissimilarity index ", *_MODES, *_MOVES)


class PatchSyntaxError(ValueError):
    """The bytes are no patch that a tree can take: why, on which line (from 1), and what status that makes."""

    def __init__(self, message: str, line: int | None = None, status: Status = Status.MALFORMED) -> None:
        super().__init__(printable(message))
        self.line, self.status = line, status


def printable(text: str) -> str:
    """A message for a terminal: what a patch or a list holds may be control characters, or no text at all."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


@dataclass(frozen=True)
class Head:
    """The headers of one file; `end` is the line index after them."""

    old: str | None
    new: str | None
    end: int
    words: tuple[bytes, ...] = ()
    moved: tuple[str, ...] = ()
    symlink: bool = False
    plain: bool = False  # `---` and `+++` are there: hunks may follow


def read_head(lines: list[bytes], at: int) -> Head | None:
    """The headers that begin at line index `at`, or None where none do."""
    begin, git, words = at, None, ()
    if lines[at].startswith(_GIT):
        git = _git_names(lines[at], at + 1)
        while (at := at + 1) < len(lines) and lines[at].startswith(_EXTENDED):
            _check_line(lines[at], at + 1)
        words = tuple(lines[begin + 1:at])
    if at < len(lines) and _BINARY.match(lines[at]):
        raise PatchSyntaxError("it holds a binary change, which GNU patch skips; a tree takes text alone", at + 1)
    if not _is_pair(lines, at):
        return None if git is None else _git_only(lines, git, words, begin, at)
    if git is None and _is_prose(lines, at):
        return None
    old, new = _written(lines[at], at + 1), _written(lines[at + 1], at + 2)
    if old is None and new is None:
        raise PatchSyntaxError("both names are /dev/null, so this part concerns no file", at + 1)
    if git is not None and git != (None, None) and (old not in (git[0], None) or new not in (git[1], None)):
        raise PatchSyntaxError(f"its `diff --git` line names {git[0]} and {git[1]}, its `---` and `+++` lines {old or NOWHERE} "
                               f"and {new or NOWHERE}: GNU patch would pick one. {REWRITE}", at + 1, _status(*git, old, new))
    return _checked(Head(old, new, at + 2, words, _moved(words, old, new, begin + 1), _symlink(words), plain=True), begin + 1)


def _is_pair(lines: list[bytes], at: int) -> bool:
    return at + 1 < len(lines) and lines[at].startswith(b"--- ") and lines[at + 1].startswith(b"+++ ")


def _is_prose(lines: list[bytes], at: int) -> bool:
    """Words that happen to begin like a pair of headers: no hunk below, and no path with a level on one of the lines."""
    hunk_below = at + 2 < len(lines) and lines[at + 2].startswith(ANY_HUNK)
    names = [_NAME.match(line[4:]) for line in lines[at:at + 2]]
    return not hunk_below and any(name is None or b"/" not in name[1] for name in names)


def _git_only(lines: list[bytes], git: tuple[str | None, str | None], words: tuple[bytes, ...], begin: int, at: int) -> Head:
    """A git header without `---` and `+++`: a mode, a rename, a copy, or an empty file that comes or goes."""
    if at < len(lines) and lines[at].startswith(ANY_HUNK):
        raise PatchSyntaxError(f"`---` and `+++` lines are missing above this hunk. {REWRITE}", at + 1)
    if at < len(lines) and lines[at].startswith((b"--- ", b"+++ ")):
        raise PatchSyntaxError(f"`---` and `+++` lines come in pairs, and one is missing here. {REWRITE}", at + 1)
    if not any(word.startswith(_MODES + _MOVES) for word in words):
        raise PatchSyntaxError("nothing follows this `diff --git` line: no mode, no new name, no hunks. The diff was cut off",
                               begin + 1)
    if git == (None, None):
        raise PatchSyntaxError("GNU patch cannot read these names, which have a space in them and no `---` and `+++` lines; "
                               "rename the file without spaces, or leave this part out", begin + 1)
    old = None if any(word.startswith(b"new file mode ") for word in words) else git[0]
    new = None if any(word.startswith(b"deleted file mode ") for word in words) else git[1]
    return _checked(Head(old, new, at, words, _moved(words, *git, begin + 1), _symlink(words)), begin + 1)


def _git_names(line: bytes, number: int) -> tuple[str | None, str | None]:
    """Both names of a `diff --git` line; (None, None) where it has spaces that GNU patch cannot tell from the one between."""
    _check_line(line, number)
    rest, names = line[len(_GIT):].strip(), []
    while rest and len(names) < 2:
        if quoted := _QUOTED.match(rest):
            names.append(_unquoted(quoted[1]))
            rest = rest[quoted.end():].lstrip()
        else:
            name, _, rest = rest.partition(b" ")
            names.append(_text(name))
            rest = rest.lstrip()
    if rest or len(names) < 2:
        return None, None
    return names[0], names[1]


def _written(line: bytes, number: int) -> str | None:
    """The file name of a `---` or `+++` line as GNU patch reads it; None for /dev/null."""
    _check_line(line, number)
    rest = line[4:].lstrip(b" ")
    if quoted := _QUOTED.match(rest):
        return _unquoted(quoted[1])
    name, tab, _ = rest.partition(b"\t")
    if not tab:
        if (match := _NAME.match(rest)) is None:
            raise PatchSyntaxError("GNU patch reads a name up to its first space unless a tab follows it, as diff and git "
                                   f"write it: {_text(rest)!a}. {REWRITE}", number)
        name = match[1]
    text = _text(name.rstrip(b" "))
    return None if text == NOWHERE else text


def _moved(words: tuple[bytes, ...], old: str | None, new: str | None, number: int) -> tuple[str, ...]:
    """The names of a rename or copy, old before new; they must be those that the other headers give."""
    names = {kind: _name(word[len(kind):]) for word in words for kind in _MOVES if word.startswith(kind)}
    if not names:
        return ()
    if tuple(sorted(names)) not in (_MOVES[2:], _MOVES[:2]):
        raise PatchSyntaxError(f"a rename or copy needs one name from and one name to. {REWRITE}", number)
    moved = tuple(names[kind] for kind in sorted(names))  # from, to
    for said, written in zip(moved, (old, new), strict=True):
        if written is None or (written != said and not written.endswith(f"/{said}")):
            raise PatchSyntaxError(f"it says that it moves {moved[0]} to {moved[1]}, but its other headers name {old} and "
                                   f"{new}, which GNU patch takes. {REWRITE}", number,
                                   _status(said))
    return moved


def _checked(head: Head, number: int) -> Head:
    """Its modes are a plain file's, and say what its names say."""
    for word in head.words:
        match = _MODE.match(word)
        has_mode = word.startswith(_MODES) or (word.startswith(b"index ") and len(word.split()) > 2)
        if has_mode and (match is None or not _PLAIN_MODE.match(match[1])):
            raise PatchSyntaxError(f"{_text(word.strip())!a} is no mode of a plain file (100644, 100755); trees hold plain "
                                   "files only",
                                   number)
    kinds = [kind for word in head.words for kind in _MODES if word.startswith(kind)]
    if (_MODES[0] in kinds) != (_MODES[1] in kinds) or len(set(kinds)) != len(kinds):
        raise PatchSyntaxError(f"a change of mode needs one `old mode` and one `new mode` line. {REWRITE}", number)
    if (_MODES[3] in kinds and head.old is not None) or (_MODES[2] in kinds and head.new is not None):
        raise PatchSyntaxError("its git header says that the file comes or goes, its `---` and `+++` lines do not. "
                               f"{REWRITE}", number)
    return head


def _status(*names: str | None) -> Status:
    """What a contradiction between names makes: the worse of the two where one leads out of the tree."""
    out = any(name and (name.startswith("/") or ".." in name.split("/")) for name in names)
    return Status.ESCAPES if out else Status.MALFORMED


def _symlink(words: tuple[bytes, ...]) -> bool:
    return any(match[1] == b"120000" for word in words if (match := _MODE.match(word)))


def _check_line(line: bytes, number: int) -> None:
    if len(line) > LONGEST_LINE:
        raise PatchSyntaxError(f"this header line has {len(line):,} bytes, more than the names of files can", number)
    if line.endswith(b"\r"):
        raise PatchSyntaxError("its header lines end in a carriage return: the whole patch was turned to CRLF (by an editor, a "
                               "mail or git's autocrlf), and GNU patch would guess. Restore its line ends; the lines of a hunk "
                               "alone may end in CRLF, where the file does", number)


def _name(written: bytes) -> str:
    quoted = _QUOTED.match(written)
    return _unquoted(quoted[1]) if quoted else _text(written.strip())


def _unquoted(inside: bytes) -> str:
    """A name that git or diff quoted as C does."""
    def byte(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 8) & 0xFF]) if match[1][:1] in b"01234567" else _ESCAPES.get(match[1], match[1])

    return _text(_ESCAPED.sub(byte, inside))


def _text(name: bytes) -> str:
    return name.decode("utf-8", errors="surrogateescape")
