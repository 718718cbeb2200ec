"""What is wrong with a patch by its text alone, its syntax aside: names, what hides in its words, what comes twice.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from farm.diffhead import PACKAGE, printable
from farm.findings import Status
from farm.unidiff import FilePatch, Hunk

LEFT_OVERS = (".orig", ".rej")
_KEPT = re.compile(r"[.~_-]\w*$")  # what one appends to the name of a file that is kept: .orig, .old, ~
# GNU patch takes a diff that is indented by any of these, and takes the indentation off.
_INDENTS = (b" ", b"\t", b"X")
# A line with any other beginning means nothing to GNU patch.
_TELLING = re.compile(rb"@@ -|--- |\+\+\+ |\*\*\*|Index:|diff --git |old |new |deleted |rename |copy |\d|[<>] |\.")
_NAMES = (b"--- ", b"+++ ", b"*** ", b"Index:", b"diff --git ")
_MODE = re.compile(rb"(?:old|new|new file|deleted file) mode \d{6}\s*$")
_MOVES = ((b"rename from ", b"rename to "), (b"copy from ", b"copy to "))
_STARS = b"*" * 15
_NORMAL = re.compile(rb"\d[\d,]*[acd][\d,]*(?P<ends>[ \t]*\r?$)?")
_ED = re.compile(rb"\d+(?:,\d+)?[acds]\s*$")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a patch, by its text alone: never a good status.  `line` is of the patch, from 1."""

    status: Status
    detail: str
    line: int | None = None


def find_fault(data: bytes, sections: Sequence[FilePatch]) -> Fault | None:
    """The first thing that is wrong with a patch of these sections, or None."""
    for section in sections:
        if fault := _name_fault(section):
            return fault
    return _hidden(data.split(b"\n"), sections) or _twice(sections)


def escapes(path: str) -> bool:
    """Whether a path leads out of the directory that it is relative to, by its text."""
    return path.startswith("/") or ".." in PurePosixPath(path).parts


def is_plain(path: str) -> bool:
    """Whether a path is spelt in the one plain way: no //, no ./, printable, in UTF-8, of a length that file systems take."""
    return (path == str(PurePosixPath(path)) and path.isprintable() and len(path.encode()) <= 1000
            and all(len(part.encode()) <= 255 for part in path.split("/")))


# --- names ----------------------------------------------------------------------------------


def _name_fault(section: FilePatch) -> Fault | None:
    for path in (*section.headers, *section.paths, *section.moved):
        if escapes(path):
            return Fault(Status.ESCAPES, f"{printable(path[:200])} leads out of the tree; a patch may only name files below "
                         "its root", section.line)
    if section.symlink:
        return Fault(Status.ESCAPES, f"it makes {printable(section.headers[-1])} a symbolic link; trees hold plain files only",
                     section.line)
    for path in section.headers:
        if not is_plain(path):
            return Fault(Status.MALFORMED, f"{path[:80]!a} is not a plain path; write it without //, ./ and odd characters, in "
                         "UTF-8, and shorter", section.line)
        if "/" not in path:
            return Fault(Status.MALFORMED, f"{path} has no leading directory (a/, b/): patches are applied with -p1; write it "
                         "with `diff -u` or `git diff` from the root's parent", section.line)
    if section.old and section.new and not section.moved and not _same_file(section.old, section.new):
        return Fault(Status.MALFORMED, f"its headers name two files, {section.old} and {section.new}, and no rename: GNU patch "
                     "would pick one. Write the patch anew with diff", section.line)
    carried = (section.headers[-1], *section.moved)  # `diff -u x.py.orig x.py` patches x.py
    for path in carried:
        if path.endswith(LEFT_OVERS):
            return Fault(Status.MALFORMED, f"it carries {path}, a left-over of an earlier patch run; take that part out",
                         section.line)
    return None


def _same_file(old: str, new: str) -> bool:
    """Whether two names are one file's in two directories (a/, b/; a/vllm.orig/, b/vllm/), or one a kept copy (x.py.orig)."""
    one, other = sorted((name.split("/", 1)[-1] for name in (old, new)), key=len)
    (top, _, rest), (other_top, _, other_rest) = one.partition("/"), other.partition("/")
    return one == other or (other.startswith(one) and _KEPT.match(other, len(one)) is not None) or (
        rest != "" and rest == other_rest and PACKAGE in (top, other_top))


# --- what GNU patch sees and a reader does not ----------------------------------------------


def _hidden(lines: Sequence[bytes], sections: Sequence[FilePatch]) -> Fault | None:
    """A live diff among the words before, between and after the sections."""
    for begin, end in zip([0, *(s.last - 1 for s in sections)], [*(s.line - 1 for s in sections), len(lines)], strict=True):
        if fault := _live(lines, begin, end, sections):
            return fault
    return None


def _live(lines: Sequence[bytes], begin: int, end: int, sections: Sequence[FilePatch]) -> Fault | None:
    """Lines [begin, end) are words: is there one among them at which GNU patch would begin to patch?"""
    named, command, normal, before = False, 0, False, b""
    for at in range(begin, end):
        line = lines[at]
        if line[:1] in _INDENTS:
            line = line.lstrip(b"".join(_INDENTS))
        if not _TELLING.match(line):
            before = b""
            continue
        if named and line.startswith(b"@@ -"):
            return _indented(lines, at, end, sections)
        if _MODE.match(line) or any(before.startswith(old) and line.startswith(new) for old, new in _MOVES):
            return Fault(Status.MALFORMED, "this line of a git header stands apart from its `diff --git` line, or is indented: "
                         "GNU patch would lose it, or act on it unseen. Write the patch anew with git diff, or quote it with "
                         "`> `", at + 1)
        other = (("a context diff", at) if before.startswith(_STARS) and line.startswith(b"*** ") else
                 ("a normal diff", at) if normal and line.startswith((b"< ", b"> ")) and (named or _NORMAL.match(before)) else
                 ("an ed script", command) if command and line.rstrip() == b"." else None)
        if other:
            return Fault(Status.MALFORMED, f"GNU patch would take this for {other[0]} and apply it too, unseen by any check "
                         "here; a patch holds unified diffs alone", other[1])
        if match := _NORMAL.match(line):
            normal = match["ends"] is not None
        if _ED.match(line) and not command:
            command = at + 1
        named = named or line.startswith(_NAMES)
        before = line
    return None


def _indented(lines: Sequence[bytes], at: int, end: int, sections: Sequence[FilePatch]) -> Fault:
    indent = lines[at][:lines[at].index(b"@")]
    changes = tuple(bare for line in lines[at:end] if (bare := line.removeprefix(indent))[:1] in (b"+", b"-"))
    if any(changes[:len(hunk.changes)] == hunk.changes for section in sections for hunk in section.hunks):
        return Fault(Status.DUPLICATE_DIFF, "an indented copy of its own diff stands here, and GNU patch applies that too (it "
                     "takes the indentation off); take it out, or quote it with `> `", at + 1)
    return Fault(Status.MALFORMED, "GNU patch takes this for a hunk, indented as it is, and would apply it to the file that "
                 "the lines above name; take it out, or quote it with `> `", at + 1)


def _twice(sections: Sequence[FilePatch]) -> Fault | None:
    """The same change of the same file, at the same place, a second time."""
    hunks: dict[object, Hunk] = {}
    parts: dict[object, FilePatch] = {}
    for section in sections:
        if not section.hunks and (first := parts.setdefault((section.paths, section.words), section)) is not section:
            return _duplicate(section, first.line, section.line)
        for hunk in section.hunks:
            if (other := hunks.setdefault((section.paths, hunk.old, hunk.body), hunk)) is not hunk:
                return _duplicate(section, other.line, hunk.line)
    return None


def find_repeat(sections: Sequence[FilePatch]) -> Fault | None:
    """A part whose hunks an earlier part of the same file has too, on other lines: a fault where it does not apply."""
    parts: dict[object, FilePatch] = {}
    for section in sections:
        bodies = tuple(hunk.body for hunk in section.hunks)
        if bodies and (first := parts.setdefault((section.paths, bodies), section)) is not section:
            return _duplicate(section, first.line, section.hunks[0].line)
    return None


def _duplicate(section: FilePatch, first: int, second: int) -> Fault:
    return Fault(Status.DUPLICATE_DIFF, f"it changes {section.paths[-1]} twice in the same way, first on line {first}: the "
                 "diff stands in it twice; take one out", second)
