"""What a series looks like after branches are merged: each alone onto BASE, every pair, and all together.

Two changes may each be green alone and break the series between them, merged within seconds.  Every merge is made
beside the repository (`farm.gitrepo`), and every series in its result is judged as `farm check` does.  A pair is merged
in one order alone: where git finds no conflict, both orders have the same content.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations
from pathlib import Path, PurePosixPath
from posixpath import normpath

from farm.errors import UsageError
from farm.gitrepo import Conflict, Entry, GitRepository
from farm.gitseries import HERE, Fault, JudgedSeries, PackageFor, SeriesJudge, below, directories, shown
from farm.listing import PATCHES

DEFAULT = "patches"
MOST_REFS = 40  # 780 pairs


class Outcome(str, Enum):
    """What a merge gives.  A conflict is git's: nothing is merged until a person has settled it."""

    GREEN = "green"
    CONFLICT = "conflict"
    BROKEN = "broken"


@dataclass(frozen=True)
class Side:
    """BASE or one REF: as it was asked for, its commit, and what is odd about it."""

    ref: str
    commit: str
    note: str = ""


@dataclass(frozen=True)
class Combination:
    """`refs` merged onto BASE in this order (none: BASE alone), and what came of it.

    `stopped_at` is the ref at which git found `conflicts`; `inherited_from` the smaller combination that has them too.
    Faults beside a conflict are those of a series that no conflict touches.
    `gone` are series directories of BASE or of one of the refs that the merge has no more, patches and all.
    """

    label: str
    refs: tuple[str, ...]
    outcome: Outcome
    judged: tuple[JudgedSeries, ...] = ()
    faults: tuple[Fault, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    stopped_at: str | None = None
    inherited_from: str | None = None
    gone: tuple[str, ...] = ()

    @property
    def own_faults(self) -> tuple[Fault, ...]:
        return tuple(fault for fault in self.faults if fault.inherited_from is None)

    @property
    def own_conflict(self) -> bool:
        return bool(self.conflicts) and self.inherited_from is None

    @property
    def culprit(self) -> bool:
        """Whether this very combination makes trouble that none of its parts has."""
        return bool(self.own_faults) or self.own_conflict


@dataclass(frozen=True)
class MergeReport:
    """All combinations, small ones first; `series` is the directory below which series were looked for."""

    base: Side
    refs: tuple[Side, ...]
    series: str
    combinations: tuple[Combination, ...]
    notes: tuple[str, ...] = ()

    @property
    def culprits(self) -> tuple[Combination, ...]:
        return tuple(c for c in self.combinations if c.culprit)

    @property
    def exit_code(self) -> int:
        """0 all green, 1 some merge gives a broken series, 2 conflicts only."""
        if any(c.faults for c in self.combinations):
            return 1
        return 2 if any(c.conflicts for c in self.combinations) else 0


def _list_alone(directory: PurePosixPath) -> Path | None:
    return None


def _say_nothing(line: str) -> None:
    pass


def merge_check(base: str, refs: Sequence[str], cache: Path, *, repo: Path = Path("."), series: str | None = None,
                package_for: PackageFor = _list_alone, say: Callable[[str], None] = _say_nothing) -> MergeReport:
    """Judge the series after merges of `refs` onto `base`.

    Names are what git takes for a commit; `series` is relative to `repo`, and `patches` there or at the repository's
    root unless given.  `package_for(directory of a series, from the repository's root)` names the package that judges
    it, None: the list and the syntax alone.  `cache` is farm's; `say` gets a line for each merge.

    Raises UsageError: no repository, an unknown or unrelated ref, one named twice, too many, no series anywhere.
    """
    if not refs:
        raise UsageError("no REF; name the branches that are to be merged onto BASE")
    if len(refs) > MOST_REFS:
        raise UsageError(f"{len(refs)} refs make {len(refs) * (len(refs) - 1) // 2} pairs; give {MOST_REFS} refs at most, "
                         "those that are about to be merged")
    with tempfile.TemporaryDirectory(prefix="farm-merge-") as scratch:
        (own := Path(scratch, "git")).mkdir()
        repository = GitRepository(repo, own)
        start, sides = _sides(repository, base, refs)
        repository.heed_attributes(repository.tree_of(start.commit))
        root = _root(repository, series, (start, *sides))
        judge = SeriesJudge(repository, Path(scratch, "series"), cache, package_for)
        judged = _Merging(repository, start, sides, root, judge, say).all()
        shallow = "the clone is shallow: common ancestors were looked for in what it has" if repository.shallow else ""
        notes = tuple(note for note in (*(side.note for side in sides), shallow) if note)
        return MergeReport(start, sides, shown(str(root)), judged, notes)


# --- what is asked --------------------------------------------------------------------------


def _sides(repository: GitRepository, base: str, refs: Sequence[str]) -> tuple[Side, tuple[Side, ...]]:
    start = Side(shown(base), repository.commit_of(base))
    sides: dict[str, Side] = {}
    for ref in refs:
        commit, name = repository.commit_of(ref), shown(ref)
        if name in sides:
            raise UsageError(f"{name} is named twice; name each branch once")
        note = ""
        if repository.contains(start.commit, commit):
            note = f"{start.ref} holds {name} already: nothing of it is left to merge"
        elif twin := next((side.ref for side in sides.values() if side.commit == commit), None):
            note = f"{name} is the same commit as {twin}"
        elif not repository.related(start.commit, commit):
            deeper = "; this clone is shallow, so get all of it: git fetch --unshallow" if repository.shallow else ""
            raise UsageError(f"{start.ref} and {name} have no history in common, so git does not merge them{deeper}")
        sides[name] = Side(name, commit, note)
    return start, tuple(sides.values())


def _root(repository: GitRepository, series: str | None, sides: Sequence[Side]) -> PurePosixPath:
    """The directory below which series are looked for, from the repository's root."""
    asked = (repository.prefix / DEFAULT, PurePosixPath(DEFAULT)) if series is None else (repository.prefix / series,)
    roots = tuple(dict.fromkeys(PurePosixPath(normpath(path)) for path in asked))
    trees = tuple(dict.fromkeys(repository.tree_of(side.commit) for side in sides))
    for root in roots:
        if root.is_absolute() or ".." in root.parts:
            raise UsageError(f"--series {series} leads out of the repository; name a directory in it, relative to --repo")
        if any(directories(repository.entries(tree, root)) for tree in trees):
            return root
    link = "" if all(repository.kind_of(tree, root) != "120000" for tree in trees for root in roots) else (
        " (it is a symbolic link there: name what it points to)")
    raise UsageError(f"neither {sides[0].ref} nor a REF has a file called series below {' or '.join(map(str, roots))}{link}. "
                     "Name the directory with --series DIR, relative to --repo")


# --- merging --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Merged:
    commit: str
    tree: str
    conflicts: tuple[Conflict, ...] = ()
    stopped_at: str | None = None


class _Merging:
    """Merges and their verdicts by combination, small ones first: what a part has already is not the whole's own."""

    def __init__(self, repository: GitRepository, base: Side, sides: Sequence[Side], root: PurePosixPath, judge: SeriesJudge,
                 say: Callable[[str], None]) -> None:
        self._repository, self._base, self._root, self._judge, self._say = repository, base, root, judge, say
        self._commits = {side.ref: side.commit for side in sides}
        self._merges = {(): _Merged(base.commit, repository.tree_of(base.commit))}
        self._files: dict[str, tuple[Entry, ...]] = {}
        self._done: dict[tuple[str, ...], Combination] = {}

    def all(self) -> tuple[Combination, ...]:
        refs = tuple(self._commits)
        for size in (0, 1, 2):
            for some in combinations(refs, size):
                self._done[some] = self._verdict(some)
        if len(refs) > 2:
            whole = self._verdict(refs)
            fewest = self._fewest(whole) if whole.own_faults else refs
            if fewest != refs:
                self._done[fewest] = self._verdict(fewest)
                whole = self._verdict(refs)
            self._done[refs] = whole
        return tuple(self._done.values())

    def _fewest(self, whole: Combination) -> tuple[str, ...]:
        """No pair has what breaks the whole: leave out one ref after the other for as long as something breaks that way."""
        refs = whole.refs
        for ref in whole.refs:
            fewer = tuple(r for r in refs if r != ref)
            if len(fewer) > 2 and self._verdict(fewer).own_faults:
                refs = fewer
        return refs

    def _verdict(self, refs: tuple[str, ...]) -> Combination:
        label = " + ".join(refs) or self._base.ref
        self._say(label)
        merged = self._merge(refs)
        smaller = [c for known, c in self._done.items() if set(known) < set(refs)]
        judged, gone = self._series_of(refs, merged)
        known = {fault.key: fault.inherited_from or c.label for c in reversed(smaller) for fault in c.faults}
        faults = tuple(replace(f, inherited_from=known.get(f.key)) for series in judged for f in series.faults)
        conflicts = tuple(replace(conflict, path=shown(conflict.path)) for conflict in merged.conflicts)
        older = next((c.inherited_from or c.label for c in smaller if set(conflicts) & set(c.conflicts)), None)
        outcome = Outcome.CONFLICT if conflicts else Outcome.BROKEN if faults else Outcome.GREEN
        return Combination(label, refs, outcome, judged, faults, conflicts, merged.stopped_at, older, gone)

    def _merge(self, refs: tuple[str, ...]) -> _Merged:
        if refs not in self._merges:
            before, theirs = self._merge(refs[:-1]), self._commits[refs[-1]]
            if before.conflicts:
                self._merges[refs] = before
            else:
                merge = self._repository.merge(before.commit, theirs)
                commit = self._repository.commit(merge.tree, (before.commit, theirs))
                self._merges[refs] = _Merged(commit, merge.tree, merge.conflicts, refs[-1] if merge.conflicts else None)
        return self._merges[refs]

    def _series_of(self, refs: tuple[str, ...], merged: _Merged) -> tuple[tuple[JudgedSeries, ...], tuple[str, ...]]:
        """(series that are judged, directories that are gone) of a merge.

        A series that a part had and the merge has not is judged, too, where its patches are still there, at the root,
        and where no other is left; a version's directory may go as a whole.
        """
        if merged.conflicts and (merged.stopped_at != refs[-1] or any(self._within(c.path) for c in merged.conflicts)):
            return (), ()
        files = self._listed(merged.tree)
        here = directories(files)
        parts = [(), *((ref,) for ref in refs if len(refs) > 1)] if refs else []
        lost = {d for part in parts for d in directories(self._listed(self._merge(part).tree))} - here
        patched = {PurePosixPath(entry.path).parent for entry in files if entry.path.endswith(PATCHES)}
        wrongly = lost & {HERE, *patched} or ({HERE} if lost and not here else set())
        judged = tuple(self._judge.judge(self._root / d, below(files, d)) for d in sorted(here | wrongly))
        return judged, tuple(shown(str(self._root / d)) for d in sorted(lost - wrongly))

    def _listed(self, tree: str) -> tuple[Entry, ...]:
        if tree not in self._files:
            self._files[tree] = self._repository.entries(tree, self._root)
        return self._files[tree]

    def _within(self, path: str) -> bool:
        """Whether a path is of the series' directory; git adds `~BRANCH` to one that cannot keep its name."""
        return self._root == HERE or f"{path}/".startswith((f"{self._root}/", f"{self._root}~"))
