"""A series tried on one release, patch by patch, on a scratch of the files that it names.  Feeds `farm.triage`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

from packaging.version import InvalidVersion

from farm import dep3
from farm.apply import judge
from farm.errors import SeriesError
from farm.findings import Application, Status
from farm.gnupatch import EACH, HunkReport, run_patch
from farm.hunks import NAME, HunkText, code, hunk_texts
from farm.moved import Scope, bound_names, scopes, text_lines
from farm.patchfile import PatchFile
from farm.rooting import Rooted, root_in
from farm.scratch import scratch

MOST_HUNKS = 300  # of one patch that are looked at one by one
TRIAL = "trial"  # below a pin's work directory: copies for GNU patch, laid out anew for each use
_BIGGEST = 4 << 20  # bytes of a file that is read line by line
# Statuses of which GNU patch has something to say hunk by hunk.
TOLD_BY_HUNK = (Status.CLEAN, Status.OFFSET, Status.FUZZ, Status.REJECTED)


@dataclass(frozen=True)
class SourceFile:
    """A file's bytes, and what is read from them when somebody asks."""

    path: str
    data: bytes = field(repr=False)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        return text_lines(self.data)

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        return scopes(self.data) if self.path.endswith(".py") else ()

    @cached_property
    def free(self) -> frozenset[str]:
        """Words that stand by themselves, as the name of something would: no attributes, no keywords of calls."""
        return frozenset(NAME.findall("\n".join(map(code, self.lines))))

    @cached_property
    def bound(self) -> frozenset[str]:
        return bound_names(self.data) if self.path.endswith(".py") else frozenset()


class Release:
    """A release's pristine package; each file is read once, and None where it is not there."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self._files: dict[str, SourceFile | None] = {}

    def file(self, path: str) -> SourceFile | None:
        if path not in self._files:
            self._files[path] = read_file(self.package, path)
        return self._files[path]

    def namesakes(self, path: str, most: int = 40) -> dict[str, SourceFile]:
        """Files of the same name elsewhere in the package: where a file that is gone may have gone."""
        found: dict[str, SourceFile] = {}
        for place in sorted(self.package.rglob(Path(path).name)):
            other = place.relative_to(self.package).as_posix()
            if other != path and len(found) < most and (file := self.file(other)):
                found[other] = file
        return found


@dataclass(frozen=True)
class Tried:
    """One patch on one release, with those before it applied that could be.

    `rooted` is None where it is not fit to be looked at.  `reports` has GNU patch's word on each of `hunks`, None where it
    has none.  `before` and `after` are the files that it names, by path in the package, as they stood then; `after` only
    where it applies.  `claim` is the release that its own header names as the first to carry it, where this one is that
    new; `missing` are the earlier patches that could not go in and change a file of this one too.
    """

    patch: PatchFile
    application: Application
    rooted: Rooted | None = None
    hunks: tuple[HunkText, ...] = ()
    reports: tuple[HunkReport | None, ...] = ()
    before: Mapping[str, SourceFile | None] = field(default_factory=dict)
    after: Mapping[str, SourceFile | None] = field(default_factory=dict)
    claim: str | None = None
    missing: tuple[str, ...] = ()

    @property
    def applies(self) -> bool:
        return self.application.status.good

    @cached_property
    def diff(self) -> bytes:
        """The patch without its preamble: what counts as the same patch."""
        try:
            return self.patch.data[sum(map(len, self.patch.data.splitlines(True)[:self.patch.sections[0].line - 1])):]
        except SeriesError:
            return self.patch.data


def try_series(package: Path, version: str, patches: Sequence[PatchFile], work: Path) -> Iterator[Tried]:
    """Each patch in its order.  One that fails, or that its header says is upstream by `version`, is left out for the rest.

    `work` is an empty directory for what this writes.  Raises UsageError without GNU patch.
    """
    (work / TRIAL).mkdir()
    tree = scratch(package, patches, work)
    left_out: dict[str, frozenset[str]] = {}
    for patch in patches:
        found = root_in(tree, patch) if patch.fault is None else None
        rooted = found if isinstance(found, Rooted) else None
        before = _files(tree, rooted)
        application = judge(tree, patch)
        after = _files(tree, rooted) if application.status.good else {}
        hunks: tuple[HunkText, ...] = ()
        reports: tuple[HunkReport | None, ...] = ()
        if rooted is not None and application.status in TOLD_BY_HUNK:
            lines = patch.data.split(b"\n")
            hunks = tuple(islice((hunk for section in rooted.inside
                                  for hunk in hunk_texts(lines, section, rooted.names(section))), MOST_HUNKS))
            reports = _reports(rooted, application, before, work / TRIAL)[:len(hunks)]
        missing = tuple(name for name, files in left_out.items() if files & before.keys())
        claim = claimed(patch, version)
        yield Tried(patch, application, rooted, hunks, reports, before, after, claim, missing)
        if claim is not None or not application.status.good:
            left_out[patch.name] = frozenset(before)
        if claim is not None and application.status.good:
            lay_out(tree, before)


def claimed(patch: PatchFile, version: str) -> str | None:
    """The release that the patch's own header names, where `version` is that one or a later one."""
    try:
        return str(dep3.applied_upstream(patch)) if dep3.carried(patch, version) else None
    except InvalidVersion:
        return None  # a version of one's own: nothing can be said of its order


def read_file(root: Path, name: str) -> SourceFile | None:
    """A plain file below `root`; None for one that is not there or too big to be read line by line."""
    path = root / name
    try:
        return SourceFile(name, path.read_bytes()) if path.is_file() and path.stat().st_size <= _BIGGEST else None
    except OSError:
        return None


def lay_out(root: Path, files: Mapping[str, SourceFile | None]) -> None:
    """Make the files below `root` what they are here; None takes one away.  The names are a checked patch's."""
    for name, file in files.items():
        if file is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(file.data)
        elif (root / name).is_file():
            (root / name).unlink()


def _files(root: Path, rooted: Rooted | None) -> dict[str, SourceFile | None]:
    return {name: read_file(root, name) for name in rooted.paths} if rooted else {}


def _reports(rooted: Rooted, application: Application, before: Mapping[str, SourceFile | None],
             folder: Path) -> tuple[HunkReport | None, ...]:
    """What GNU patch says of each hunk alone: it goes on after one that fails.  Asked again only where that is not known."""
    hunks = [(rooted.names(section)[-1], number) for section in rooted.inside for number in range(1, len(section.hunks) + 1)]
    if application.status is Status.CLEAN:
        return tuple(HunkReport(file, number, "succeeded") for file, number in hunks)
    lay_out(folder, before)
    try:
        told = run_patch(folder, rooted.data, strip=rooted.strip, how=EACH).hunks
    except TimeoutError:
        told = ()
    return told if len(told) == len(hunks) else (None,) * len(hunks)
