"""What looking at a series can find: the words, and the values that carry them.  Pure; see `farm.check`, `farm.triage`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(str, Enum):
    """How one patch fares on one tree, with the patches before it applied.  CLEAN and OFFSET alone are good."""

    CLEAN = "clean"
    OFFSET = "offset"  # applies at fuzz 0, some hunks on other lines than they say: a note
    FUZZ = "fuzz"  # would apply only with fuzz
    REJECTED = "rejected"  # a hunk does not apply, its file is not there, or its change is there already
    MALFORMED = "malformed"  # no unified diff that means what it says: counts, 0 bytes, binary, CRLF, trimmed, left-overs
    NO_CHANGE = "no-change"  # well formed, and not a byte, name or mode of the package changes
    DUPLICATE_DIFF = "duplicate-diff"  # the same change twice in one patch, also indented in its preamble
    ESCAPES = "escapes"  # a path outside the tree: absolute, `..`, through or as a symbolic link
    NEEDS_COMPILE = "needs-compile"  # touches what is compiled into the wheel's extensions

    @property
    def good(self) -> bool:
        return self in (Status.CLEAN, Status.OFFSET)


class Problem(str, Enum):
    """What can be wrong with the list itself, or with what lies beside it."""

    UNLISTED = "unlisted"
    MISSING = "missing"
    DUPLICATE = "duplicate"
    NO_SERIES = "no-series"
    UNREADABLE = "unreadable"  # the series or a listed patch cannot be read
    ESCAPES = "escapes"  # a listed name outside of the directory
    OPTIONS = "options"  # words after a name, as in `x.patch -p0`
    CRLF = "crlf"  # the list has CRLF line ends: to a plain reader every name ends in a carriage return
    LEFTOVER = "leftover"  # a .orig or .rej beside the patches
    TRAILING_COMMENT = "trailing-comment"  # a note
    BLANK_LINE = "blank-line"  # a note

    @property
    def is_note(self) -> bool:
        return self in (Problem.TRAILING_COMMENT, Problem.BLANK_LINE)


@dataclass(frozen=True)
class ListProblem:
    """One problem of the list: which name, on which line of the series (from 1) where it is on one, and what to do."""

    problem: Problem
    name: str
    line: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class Rejected:
    """A hunk that does not apply.

    `file` is relative to the package, `hunk` its number within that file's part (from 1), `line` that of its header
    in the patch.  `wanted` are the lines that it expects (context and removed), `stands` those of the tree at the most
    similar place, which begins on line `at` (from 1); both None and empty where the file is not there.
    """

    file: str
    hunk: int
    line: int | None
    wanted: tuple[str, ...] = ()
    stands: tuple[str, ...] = ()
    at: int | None = None
    already: bool = False  # this hunk's change stands there already


class Kind(str, Enum):
    """What is wrong with code that applies."""

    DOES_NOT_COMPILE = "does-not-compile"
    UNDEFINED_NAME = "undefined-name"
    UNRESOLVED_IMPORT = "unresolved-import"
    MISSING_ATTRIBUTE = "missing-attribute"  # of a vLLM module
    UNREGISTERED_KNOB = "unregistered-knob"  # read from the environment, unknown to vllm/envs.py


@dataclass(frozen=True)
class Finding:
    """One fault of patched code: where in the patched file (relative to the package, line from 1), and what."""

    kind: Kind
    file: str
    line: int
    name: str
    detail: str


@dataclass(frozen=True)
class Application:
    """What applying one patch gave.  `line` is of the patch file, from 1, where the trouble is.

    `hunks` are those that concern the package; `offsets` the lines (signed) by which hunks moved, moved ones only, in order.
    `files` changed, relative to the package.  Nothing was changed where `status` is not good.
    """

    status: Status
    detail: str = ""
    line: int | None = None
    hunks: int = 0
    offsets: tuple[int, ...] = ()
    files: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    already: bool = False  # its change, or the file that it makes, is there already


@dataclass(frozen=True)
class PatchResult:
    """One patch of a checked series."""

    name: str
    sha256: str
    application: Application
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return self.application.status.good and not self.findings


@dataclass(frozen=True)
class CheckReport:
    """A checked series.  `tree` says which package judged it (None: the list and the syntax alone), `version` its vLLM."""

    directory: str
    tree: str | None
    version: str | None
    patches: tuple[PatchResult, ...]
    problems: tuple[ListProblem, ...]

    @property
    def exit_code(self) -> int:
        """0 clean or offsets, 1 a patch fails, 2 the list and the directory disagree (what fails may follow from that)."""
        if any(not p.problem.is_note for p in self.problems):
            return 2
        return 0 if all(p.ok for p in self.patches) else 1
