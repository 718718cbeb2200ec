"""Trying a patch on copies: one run of GNU patch, and what became of the files that the patch names."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farm.gnupatch import PatchReport, run_patch
from farm.rooting import Rooted
from farm.scratch import copy_named

State = tuple[bytes, int] | None  # a plain file's content and permission bits; None: no plain file is there


@dataclass(frozen=True)
class Run:
    """What GNU patch said; the named files before and after it, by path relative to the package; files that it made unasked."""

    report: PatchReport
    before: Mapping[str, State]
    after: Mapping[str, State]
    strays: frozenset[str]

    @property
    def changed(self) -> tuple[str, ...]:
        return tuple(path for path, state in self.after.items() if state != self.before[path])


@dataclass(frozen=True)
class Trial:
    """A patch and the package that it is tried on; `folder` takes the copies, a fresh set for each run."""

    package: Path
    rooted: Rooted
    folder: Path

    def run(self, how: Sequence[str], data: bytes) -> Run:
        """Raises UsageError without GNU patch, TimeoutError where it does not finish."""
        target = Path(tempfile.mkdtemp(dir=self.folder))
        paths = self.rooted.paths
        copy_named(self.package, paths, target)
        before, there = {path: _state(target / path) for path in paths}, _files(target)
        report = run_patch(target, data, strip=self.rooted.strip, how=how)
        return Run(report, before, {path: _state(target / path) for path in paths}, _files(target) - there - set(paths))


def _state(path: Path) -> State:
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # not there, or below something that is no directory
        return None
    return (path.read_bytes(), stat.S_IMODE(mode)) if stat.S_ISREG(mode) else None


def _files(folder: Path) -> frozenset[str]:
    return frozenset(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)
