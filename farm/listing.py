"""A series directory as it lies there: what its list names, and everything that is wrong between list and directory.

Quilt form: one patch a line, applied with -p1; comments (a whole line, or after ` #`) and blank lines pass.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from farm.diffhead import printable
from farm.faults import LEFT_OVERS, escapes
from farm.findings import ListProblem, Problem
from farm.patchfile import PatchFile
from farm.unidiff import LONGEST

SERIES = "series"
PATCHES = (".patch", ".diff")
LONGEST_LIST = 2**20  # bytes; quilt series of whole distributions have some hundred kilobytes
_MOST_SOUGHT = 20  # missing names for which a similar one is sought, each against all files


@dataclass(frozen=True)
class Listing:
    """The patches that can be read, each once, in the list's order, and the problems in the order of its lines."""

    directory: str
    patches: tuple[PatchFile, ...]
    problems: tuple[ListProblem, ...]

    @property
    def file(self) -> Path:
        return Path(self.directory, SERIES)


def read_listing(directory: str | Path) -> Listing:
    """Read `directory/series` and the patches that it lists.  Never raises for what it finds there."""
    folder = Path(directory)
    try:
        data = _read(folder / SERIES, LONGEST_LIST)
        if len(data) > LONGEST_LIST:
            raise OSError(f"it is longer than {LONGEST_LIST} bytes, so that it is no list of patches")
        lines = data.decode("utf-8").split("\n")
    except FileNotFoundError:
        return Listing(str(folder), (), (ListProblem(
            Problem.NO_SERIES, SERIES, None, "no series file; write one with a patch name on each line, in the order in which "
            "they apply (an empty file is a series without patches)"),))
    except (OSError, UnicodeDecodeError) as error:
        return Listing(str(folder), (), (ListProblem(Problem.UNREADABLE, SERIES, None, f"cannot read the series: {error}"),))
    if lines[-1] == "":
        lines.pop()
    reader = _Reader(folder)
    for number, line in enumerate(lines, 1):
        reader.line(number, line)
    return Listing(str(folder), tuple(reader.patches), (*reader.problems, *_beside(folder, reader.lines_of)))


class _Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.patches: list[PatchFile] = []
        self.problems: list[ListProblem] = []
        self.lines_of: dict[str, int] = {}
        self._crlf = False
        self._sought = 0

    def line(self, number: int, text: str) -> None:
        if "\r" in text and not self._crlf:
            self._crlf = True
            self._problem(Problem.CRLF, SERIES, number, "the list has CRLF line ends, so that to a plain reader every name "
                          "ends in a carriage return; turn it to LF")
        for part in text.removesuffix("\r").split("\r"):
            self._entry(number, part)

    def _entry(self, number: int, text: str) -> None:
        if not text.strip():
            self._problem(Problem.BLANK_LINE, "", number, "a blank line; it does no harm")
            return
        found = re.search(r"(?:^|\s)#", text)
        words = text[:found.start()].split() if found else text.split()
        if not words:
            return
        name = str(PurePosixPath(words[0]))
        if found:
            self._problem(Problem.TRAILING_COMMENT, name, number, f"a comment stands behind {name}; it does no harm here, but "
                          "plain readers of the list take it for options")
        if len(words) > 1:
            self._problem(Problem.OPTIONS, name, number, f"{name} has options ({' '.join(words[1:])}), which are not "
                          "supported: every patch is applied with -p1. Take them off, and re-root the patch if it needs "
                          "another level")
        if escapes(name):
            self._problem(Problem.ESCAPES, name, number, f"{name} lies outside of the series' directory; move the patch beside "
                          "the series")
        elif name in self.lines_of:
            self._problem(Problem.DUPLICATE, name, number, f"{name} is listed twice, first on line {self.lines_of[name]}; take "
                                                           "one out")
        else:
            self.lines_of[name] = number
            self._patch(number, name)

    def _patch(self, number: int, name: str) -> None:
        path = self.folder / name
        try:
            self.patches.append(PatchFile(name, _read(path, LONGEST), str(self.folder)))
        except FileNotFoundError:
            self._problem(Problem.MISSING, name, number, f"{name} is listed but {path} does not exist; add the file or take "
                          f"the line out{self._similar(name)}")
        except (OSError, ValueError) as error:
            self._problem(Problem.UNREADABLE, name, number, f"{name} cannot be read: {error}")

    def _similar(self, name: str) -> str:
        self._sought += 1
        if self._sought > _MOST_SOUGHT:
            return ""
        close = difflib.get_close_matches(name, [n for n in _names(self.folder) if n.endswith(PATCHES)], n=1, cutoff=0.8)
        return f" (there is {close[0]})" if close else ""

    def _problem(self, problem: Problem, name: str, line: int | None, detail: str) -> None:
        self.problems.append(ListProblem(problem, name, line, printable(detail)))


def _read(path: Path, most: int) -> bytes:
    """A plain file's bytes, `most` and one more, so that the reader says it.  Raises OSError where it is none: a pipe
    would never end.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} is no plain file")
    with open(path, "rb") as file:
        return file.read(most + 1)


def _names(folder: Path) -> list[str]:
    """Names of the plain files, and of broken links, beside the list."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
    except OSError:
        return []


def _beside(folder: Path, listed: dict[str, int]) -> Sequence[ListProblem]:
    found = []
    for name in _names(folder):
        if name in listed:
            continue
        if name.endswith(LEFT_OVERS):
            found.append(ListProblem(Problem.LEFTOVER, name, None, f"{printable(name)} is a left-over of an earlier patch run; "
                                     "take it away"))
        elif name.endswith(PATCHES):
            found.append(ListProblem(Problem.UNLISTED, name, None, f"{printable(name)} lies in the directory but the series "
                                     "does not list it; list it where it belongs in the order, or take the file away"))
    return found
