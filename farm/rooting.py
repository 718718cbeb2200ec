"""Where a patch is rooted in a package, and which of its parts concern it: looks at names, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from farm.diffhead import PACKAGE
from farm.findings import Application, Rejected, Status
from farm.patchfile import PatchFile
from farm.unidiff import FilePatch

# First path components of vLLM's repository whose change asks for a compile, and what is compiled wherever it lies.
COMPILED = ("csrc", "cmake", "CMakeLists.txt", "rust")
SOURCES = (".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".rs")
# Other first components of the repository: put aside, since a tree is the package alone.
REPOSITORY = ("tests", "docs", "examples", "benchmarks", "tools", "scripts", "docker", "requirements", ".github", ".buildkite",
              "setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "mkdocs.yaml", "RELEASE.md")


@dataclass(frozen=True)
class Rooted:
    """The sections of a patch that concern the package, and how many leading components GNU patch takes off."""

    patch: PatchFile
    strip: int
    inside: tuple[FilePatch, ...]

    @property
    def hunks(self) -> int:
        return sum(len(section.hunks) for section in self.inside)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Every file that they name, relative to the package."""
        return tuple(dict.fromkeys(name for section in self.inside for name in self.names(section)))

    def names(self, section: FilePatch) -> tuple[str, ...]:
        """Old and new name of one section, relative to the package; one where they are the same."""
        return section.stripped(self.strip)

    @cached_property
    def data(self) -> bytes:
        """The patch with the other sections blotted out, every line in its old place (errors name lines)."""
        if len(self.inside) == len(self.patch.sections):
            return self.patch.data
        keep = {number for section in self.inside for number in range(section.line, section.end)}
        lines = self.patch.data.split(b"\n")
        return b"\n".join(line if number in keep else b"#" for number, line in enumerate(lines, 1)) + b"\n"

    @cached_property
    def reversed_data(self) -> bytes:
        """The sections from last to first, without the words between: to un-apply them one after the other."""
        lines = self.patch.data.split(b"\n")
        return b"".join(b"\n".join(lines[s.line - 1:s.last - 1]) + b"\n" for s in reversed(self.inside))


def root_in(package: Path, patch: PatchFile) -> Rooted | Application:
    """How a faultless patch is rooted, or why it cannot be applied whatever its hunks say.

    Reads no file: it looks at what stands at the names.
    """
    sections = patch.sections
    for section in sections:
        if path := _compiled(package, patch, section):
            return Application(Status.NEEDS_COMPILE, f"it touches {path}, which is compiled into the wheel's extensions "
                               "(needs-compile): an overlay cannot give that. Take that part out, or use a pin of kind "
                               "`installed` whose wheel was built with it", section.line)
    rooted = _rooted(package, patch, sections)
    if isinstance(rooted, Application):
        return rooted
    if not rooted.inside:
        return Application(Status.NO_CHANGE, "it names no file of the vllm package: no evidence could come of it. Check that "
                           "its paths are rooted at the package (a/v1/…) or the repository (a/vllm/v1/…)", sections[0].line)
    for section in rooted.inside:
        for look in (_through_link, _level_missing, _clash):
            if found := look(package, rooted, section):
                return found
    return rooted


def _rooted(package: Path, patch: PatchFile, sections: Sequence[FilePatch]) -> Rooted | Application:
    tops = {path.split("/", 1)[0] for section in sections for path in section.paths}
    if PACKAGE not in tops:
        if all(top in REPOSITORY and not os.path.lexists(package / top) for top in tops):
            return Rooted(patch, 1, ())
        return Rooted(patch, 1, tuple(sections))
    for section in sections:
        below = [path.startswith(f"{PACKAGE}/") for path in section.paths]
        if any(below) and not all(below) and (section.moved or len(section.stripped(2)) > 1):
            return Application(Status.MALFORMED, f"it moves a file between the vllm package and the rest of the repository "
                               f"({' to '.join(section.paths)}): a tree is the package alone, so write the new or the deleted "
                               "file out", section.line)
        if not any(below) and any(_of_package(package, path) for path in section.paths):
            return Application(Status.MALFORMED, f"{section.paths[-1]} is rooted at the vllm package, other parts at the "
                               "repository (a/vllm/…): it would be left out. Root all of it alike", section.line)
    return Rooted(patch, 2, tuple(s for s in sections if any(path.startswith(f"{PACKAGE}/") for path in s.paths)))


def _of_package(package: Path, path: str) -> bool:
    """Whether a path that does not begin with vllm/ is the package's: a file of it, or a new one in one of its directories."""
    top = path.split("/", 1)[0]
    return (package / path).is_file() or (top not in REPOSITORY and "/" in path and (package / top).is_dir())


def _compiled(package: Path, patch: PatchFile, section: FilePatch) -> str | None:
    """A path of this section that only a compile brings into effect.

    Sources that the package ships are compiled at run time by the Python beside them; so is a new one that this patch's
    own lines name.
    """
    for path in section.paths:
        top, name = path.split("/", 1)[0], path.rsplit("/", 1)[-1]
        inside = package / path.removeprefix(f"{PACKAGE}/")
        if top in REPOSITORY or os.path.lexists(package / path) or os.path.lexists(inside):
            continue
        if top in COMPILED:
            return path
        if path.endswith(SOURCES) and not (section.creates and _names(patch, section, name)):
            return path
    return None


def _names(patch: PatchFile, but: FilePatch, name: str) -> bool:
    wanted = name.encode()
    return any(line.startswith(b"+") and wanted in line for section in patch.sections if section is not but
               for hunk in section.hunks for line in hunk.changes)


def _through_link(package: Path, rooted: Rooted, section: FilePatch) -> Application | None:
    for path in rooted.names(section):
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            if (package / "/".join(parts[:depth])).is_symlink():
                what = "is" if depth == len(parts) else f"leads through {'/'.join(parts[:depth])},"
                return Application(Status.ESCAPES, f"{path} {what} a symbolic link of this tree: what it writes would land "
                                                   "elsewhere",
                                   section.line)
    return None


def _level_missing(package: Path, rooted: Rooted, section: FilePatch) -> Application | None:
    """Headers without the a/ and b/ level, which -p1 takes a directory of the package from."""
    written = section.headers[-1]
    if any(os.path.lexists(package / name) for name in rooted.names(section)):
        return None
    top = written.split("/", 1)[0]
    if (package / written).is_file() or (section.creates and rooted.strip == 1 and (package / top).is_dir()):
        return Application(Status.MALFORMED, f"{written} has no leading a/ or b/: patches are applied with -p1, which would "
                           f"take {top}/ off. Write it with `git diff`, or with `diff -u` from the parent of the root",
                           section.line)
    return None


def _clash(package: Path, rooted: Rooted, section: FilePatch) -> Application | None:
    """A rename or copy whose files do not stand as it says; two names of which GNU patch would pick one."""
    names = rooted.names(section)
    if len(names) < 2 or any(set(names) & set(rooted.names(other)) for other in rooted.inside if other is not section):
        return None  # one name; or an earlier part of this patch may make or move the file
    old, new = names
    there = [(package / name).is_file() for name in names]
    if not section.moved:
        if all(there):
            return Application(Status.MALFORMED, f"its headers name {old} and {new}, both of which are there, and it is no "
                               "rename: GNU patch would pick one. Name the same file twice", section.line)
        return None
    rejected = (Rejected(new, 0, section.line),)
    if there[1]:
        why = ("its change is there already" if not there[0] else "GNU patch would write over it")
        return Application(Status.REJECTED, f"it makes {new} from {old}, but {new} exists already ({why}); take that part out "
                           "for this pin", section.line, hunks=rooted.hunks, rejected=rejected, already=True)
    if not there[0]:
        return Application(Status.REJECTED, f"{old}, which it makes {new} from, is not in this pin's package; rebase the patch "
                           "onto this pin", section.line, hunks=rooted.hunks, rejected=rejected)
    return None
