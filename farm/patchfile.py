"""One patch of a series: its name, its bytes, and what they say.  Pure; see `farm.unidiff` and `farm.faults`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from farm.errors import SeriesError
from farm.faults import Fault, escapes, find_fault, is_plain
from farm.unidiff import FilePatch, PatchSyntaxError, parse_patch


@dataclass(frozen=True)
class PatchFile:
    """One patch: its name in the series, its bytes, and the directory it was read from (for messages only)."""

    name: str
    data: bytes = field(repr=False)
    directory: str = field(default="", compare=False)

    def __getstate__(self) -> dict[str, object]:
        return {"name": self.name, "data": self.data, "directory": self.directory}  # not what is cached

    @property
    def path(self) -> str:
        return str(Path(self.directory, self.name))

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def fault(self) -> Fault | None:
        """The first thing that is wrong with it whatever the tree, or None.  Never raises."""
        try:
            sections = self._parsed
        except PatchSyntaxError as error:
            return Fault(error.status, str(error), error.line)
        return find_fault(self.data, sections)

    @property
    def sections(self) -> tuple[FilePatch, ...]:
        """What it says per file, in its order.  Raises SeriesError where it is no clean unified diff."""
        try:
            return self._parsed
        except PatchSyntaxError as error:
            raise self.error(str(error), error.line) from error

    @cached_property
    def _parsed(self) -> tuple[FilePatch, ...]:
        return parse_patch(self.data)

    @property
    def files(self) -> tuple[str, ...]:
        """Files as its headers name them, a/ and b/ taken off, each once."""
        return tuple(dict.fromkeys(path for section in self.sections for path in section.paths))

    @property
    def hunks(self) -> int:
        return sum(len(section.hunks) for section in self.sections)

    def error(self, message: str, line: int | None = None) -> SeriesError:
        return SeriesError(message, file=self.path, line=line)


def named(patches: Iterable[PatchFile]) -> tuple[str, ...]:
    """Every path below a package that these patches may name, however they are rooted (v1/…, a/v1/…, a/vllm/v1/…); unsafe ones
    are left out."""
    levels = (path for patch in patches if patch.fault is None for section in patch.sections
              for level in (0, 1, 2) for path in section.stripped(level))
    return tuple(path for path in dict.fromkeys(levels) if path and not escapes(path) and is_plain(path))
