"""The series that a git tree holds: where they are, and what `farm check` says of each.

Files come straight from git's objects into a scratch directory.  A symbolic link or a submodule is never followed:
where a list names one, or it is called like a patch, it is unreadable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from posixpath import normpath

from farm.check import check
from farm.diffhead import printable
from farm.findings import CheckReport, ListProblem, PatchResult, Problem
from farm.gitrepo import Entry, GitRepository
from farm.listing import PATCHES, SERIES

HERE = PurePosixPath(".")
PackageFor = Callable[[PurePosixPath], Path | None]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a series.

    `directory` is that of the series, from the repository's root; `name` a patch, or what the list names; `what` a word
    of `farm.findings` (Problem, Status, Kind); `line` of the list or of the patch, from 1; `places` are files with their
    hunk or name.  `inherited_from` is the smaller combination of branches that has the same fault; None: there is none.
    """

    directory: str
    name: str
    what: str
    detail: str
    line: int | None = None
    places: tuple[str, ...] = ()
    inherited_from: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two faults the same; lines move from merge to merge."""
        return self.directory, self.name, self.what, self.places


@dataclass(frozen=True)
class JudgedSeries:
    """One directory with a series; `tree` is the package that judged it, None: the list and the syntax alone."""

    directory: str
    tree: str | None
    patches: int
    faults: tuple[Fault, ...]


class SeriesJudge:
    """Judges series directories of git trees; one with the same files is checked once.

    `scratch` is a directory of the caller's, who removes it; `package_for(directory from the repository's root)` names
    the package that judges a series.
    """

    def __init__(self, repository: GitRepository, scratch: Path, cache: Path, package_for: PackageFor) -> None:
        self._repository, self._scratch, self._cache, self._package_for = repository, scratch, cache, package_for
        self._packages: dict[PurePosixPath, Path | None] = {}
        self._known: dict[tuple[object, ...], JudgedSeries] = {}

    def judge(self, directory: PurePosixPath, files: Sequence[Entry]) -> JudgedSeries:
        """A directory by its path from the repository's root and all files below it, their paths relative to it."""
        own = self._own(files)
        key = (directory, *own)
        if key not in self._known:
            if directory not in self._packages:
                self._packages[directory] = self._package_for(directory)
            folder = self._scratch / str(len(self._known)) / directory
            folder.mkdir(parents=True)
            refused = self._repository.write(own, folder)
            report = _readable(check(folder, self._packages[directory], self._cache), refused)
            faults = tuple(_shown(fault, str(folder), directory) for fault in _faults(report))
            self._known[key] = JudgedSeries(shown(str(directory)), report.tree, len(report.patches), faults)
        return self._known[key]

    def _own(self, files: Sequence[Entry]) -> tuple[Entry, ...]:
        """Files of the directory itself, and those further down that its list names."""
        listing = [e.oid for e in files if e.path == SERIES and e.is_file]
        words = b" ".join(self._repository.blobs(listing).values()).decode("utf-8", "surrogateescape").split()
        named = {normpath(word) for word in words}
        return tuple(e for e in files if "/" not in e.path or e.path in named)


def directories(files: Iterable[Entry]) -> frozenset[PurePosixPath]:
    """The directories that hold something called `series`."""
    return frozenset(path.parent for path in (PurePosixPath(e.path) for e in files) if path.name == SERIES)


def below(files: Iterable[Entry], directory: PurePosixPath) -> tuple[Entry, ...]:
    """The files below a directory, their paths relative to it."""
    start = "" if directory == HERE else f"{directory}/"
    return tuple(replace(e, path=e.path[len(start):]) for e in files if e.path.startswith(start))


def shown(text: str) -> str:
    """Text that a terminal and a JSON reader take: bytes that are no UTF-8 and controls escaped."""
    return printable(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def _readable(report: CheckReport, refused: Mapping[str, str]) -> CheckReport:
    """The report with what lies in git and could not be written called unreadable; to `check` it was missing."""
    lines = {p.name: p.line for p in report.problems if p.problem is Problem.MISSING}
    unreadable = {name: ListProblem(Problem.UNREADABLE, name, lines.get(name), f"{name} {why}")
                  for name, why in refused.items() if name in lines or name == SERIES or name.endswith(PATCHES)}
    kept = (p for p in report.problems if not (p.problem is Problem.MISSING and p.name in unreadable)
            and not (p.problem is Problem.NO_SERIES and SERIES in unreadable))
    return replace(report, problems=(*unreadable.values(), *kept))


def _faults(report: CheckReport) -> Iterator[Fault]:
    for problem in report.problems:
        if not problem.problem.is_note:
            yield Fault("", problem.name or SERIES, problem.problem.value, problem.detail, problem.line)
    for patch in report.patches:
        yield from _patch_faults(patch)


def _patch_faults(patch: PatchResult) -> Iterator[Fault]:
    went = patch.application
    if not went.status.good:
        yield Fault("", patch.name, went.status.value, went.detail, went.line,
                    tuple(f"{r.file} hunk {r.hunk}" for r in went.rejected))
    for found in patch.findings:
        yield Fault("", patch.name, found.kind.value, found.detail, None, (f"{found.file}: {found.name}",))


def _shown(fault: Fault, folder: str, directory: PurePosixPath) -> Fault:
    """The fault as if its series lay in the repository."""
    return replace(fault, directory=shown(str(directory)), name=shown(fault.name), places=tuple(map(shown, fault.places)),
                   detail=shown(" ".join(fault.detail.replace(folder, str(directory)).split())))
