"""A series: patches in order, and the strict reading of the directory that lists them.

Imports neither Ray nor vLLM.  A series is small and picklable: it travels to other nodes by value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farm.errors import SeriesError
from farm.gnupatch import require_gnu_patch as require_gnu_patch  # for those who ask series
from farm.listing import SERIES, read_listing
from farm.patchfile import PatchFile as PatchFile


@dataclass(frozen=True)
class Series:
    """Patches in the order in which they are applied, and the directory that lists them."""

    patches: tuple[PatchFile, ...]
    directory: str = field(default="", compare=False)

    @property
    def sha256(self) -> str:
        return series_sha256(self.patches)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(patch.name for patch in self.patches)

    def select(self, names: Iterable[str]) -> Series:
        """Only these patches, in the series' own order.  Raises SeriesError for a name it does not list."""
        wanted = self._known(names)
        return Series(tuple(p for p in self.patches if p.name in wanted), self.directory)

    def without(self, names: Iterable[str]) -> Series:
        """All patches but these.  Raises SeriesError for a name it does not list."""
        unwanted = self._known(names)
        return Series(tuple(p for p in self.patches if p.name not in unwanted), self.directory)

    def _known(self, names: Iterable[str]) -> frozenset[str]:
        asked = frozenset(names)
        if strange := sorted(asked - set(self.names)):
            raise SeriesError(f"no patch {', '.join(strange)} here; listed are: {', '.join(self.names) or 'none'}",
                              file=Path(self.directory, SERIES))
        return asked


def series_sha256(patches: Sequence[PatchFile]) -> str:
    """Hash of an ordered patch list: names and contents."""
    lines = "".join(f"{patch.sha256}  {patch.name}\n" for patch in patches)
    return hashlib.sha256(lines.encode()).hexdigest()


def series_directory(root: str | Path, version: str) -> Path:
    """The directory that holds the series of a vLLM version: `root/VERSION` where it exists, else `root`."""
    own = Path(root, version)
    return own if own.is_dir() else Path(root)


def load_series(directory: str | Path) -> Series:
    """The series of a directory, where nothing is wrong with its list nor, by its text, with any of its patches.

    Raises SeriesError with file and line for the first thing that is (`farm.listing`, `PatchFile.fault`).  A patch that
    the series does not list is an error, never appended by itself: two changes may each be green alone.
    """
    listing = read_listing(directory)
    for problem in listing.problems:
        if not problem.problem.is_note:
            raise SeriesError(problem.detail, file=listing.file, line=problem.line)
    for patch in listing.patches:
        if fault := patch.fault:
            raise patch.error(fault.detail, fault.line)
    return Series(listing.patches, listing.directory)
