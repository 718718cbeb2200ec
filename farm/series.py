"""Series and patch files: parse, check, apply.

Pure but for `load_series` (reads a directory) and `apply_patch` (runs GNU
patch on a tree under construction); imports neither Ray nor vLLM.  A series
is small and picklable: it travels to other nodes by value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from farm.errors import SeriesError
from farm.gnupatch import HunkReport, PatchReport, run_patch
from farm.gnupatch import require_gnu_patch as require_gnu_patch  # for those who ask series
from farm.patchfile import FilePatch, PatchSyntaxError, parse_patch
from farm.records import PatchRow, Reason, Verdict

SERIES = "series"
PACKAGE, TESTS = "vllm", "tests"
# First path components of vLLM's repository whose change asks for a compile.
COMPILED = ("csrc", "cmake", "CMakeLists.txt", "rust")


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
    def sections(self) -> tuple[FilePatch, ...]:
        """What it says per file, in its order.  Raises SeriesError where it is no clean unified diff."""
        try:
            return parse_patch(self.data)
        except PatchSyntaxError as error:
            raise self.error(str(error), error.line) from error

    @property
    def files(self) -> tuple[str, ...]:
        """Files as its headers name them, a/ and b/ taken off, each once."""
        return tuple(dict.fromkeys(path for section in self.sections for path in section.paths))

    @property
    def hunks(self) -> int:
        return sum(len(section.hunks) for section in self.sections)

    def error(self, message: str, line: int | None = None) -> SeriesError:
        return SeriesError(message, file=self.path, line=line)


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


# --- reading --------------------------------------------------------------------------------


def series_directory(root: str | Path, version: str) -> Path:
    """The directory that holds the series of a vLLM version: `root/VERSION` where it exists, else `root`."""
    own = Path(root, version)
    return own if own.is_dir() else Path(root)


def load_series(directory: str | Path) -> Series:
    """Read `directory/series` (quilt form) and the patches that it lists, and check both against each other.

    One patch a line, applied with -p1; blank lines and comments (a whole line, or after ` #`) pass.
    Raises SeriesError with file and line: no series file, a listed file that is missing, listed twice,
    outside the directory, empty, binary or no unified diff; a `.patch` file in the directory that the
    series does not list (it is never appended by itself: two changes may each be green alone).
    """
    folder = Path(directory)
    listing = folder / SERIES
    lines = _lines(listing)
    patches: dict[str, PatchFile] = {}
    lines_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = re.split(r"(?:^|\s)#", line, maxsplit=1)[0].split()
        if not words:
            continue
        name = str(PurePosixPath(words[0]))
        if len(words) > 1:
            raise SeriesError(f"{name} has options ({' '.join(words[1:])}), which are not supported: every patch is applied "
                              "with -p1. Take them off, and re-root the patch if it needs another level",
                              file=listing, line=number)
        if _escapes(name):
            raise SeriesError(f"{name} lies outside of the series' directory; move the patch beside the series",
                              file=listing, line=number)
        if name in patches:
            raise SeriesError(f"{name} is listed twice, first on line {lines_of[name]}; take one out",
                              file=listing, line=number)
        patches[name] = _read_patch(folder, name, listing, number)
        lines_of[name] = number
    for file in sorted(folder.glob("*.patch")):
        if file.name not in patches:
            raise SeriesError(f"{file.name} lies in the directory but the series does not list it; list it where it "
                              "belongs in the order, or take the file away", file=listing)
    return Series(tuple(patches.values()), str(folder))


def _lines(listing: Path) -> list[str]:
    try:
        return listing.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SeriesError("no series file; write one with a patch name on each line, in the order in which they apply "
                          "(an empty file is a series without patches)", file=listing) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SeriesError(f"cannot read the series: {error}", file=listing) from error


def _read_patch(folder: Path, name: str, listing: Path, line: int) -> PatchFile:
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise SeriesError(f"{name} is listed but {folder / name} does not exist; add the file or take the line out",
                          file=listing, line=line) from None
    except OSError as error:
        raise SeriesError(f"{name} cannot be read: {error}", file=listing, line=line) from error
    if not data:
        raise SeriesError(f"{name} is empty (0 bytes); GNU patch would accept it and change nothing. "
                          "Restore it or take it out of the series", file=folder / name)
    patch = PatchFile(name, data, str(folder))
    _check_paths(patch)
    return patch


def _check_paths(patch: PatchFile) -> None:
    for section in patch.sections:
        for path in section.headers:
            if _escapes(path):
                raise patch.error(f"{path} leads out of the tree; a patch may only name files below its root",
                                  section.line)
            if path != str(PurePosixPath(path)) or not path.isprintable() or _too_long(path):
                raise patch.error(f"{path[:80]!a} is not a plain path; write it without //, ./ and odd characters, in UTF-8, "
                                  "and shorter", section.line)
        for path in section.paths:
            if path.endswith((".orig", ".rej")):
                raise patch.error(f"it carries {path}, a left-over of an earlier patch run; take that part out",
                                  section.line)
        if section.symlink:
            raise patch.error(f"it makes {section.paths[0]} a symbolic link; trees hold plain files only", section.line)


def _escapes(path: str) -> bool:
    return path.startswith("/") or ".." in PurePosixPath(path).parts


def _too_long(path: str) -> bool:
    return len(path.encode()) > 1000 or any(len(part.encode()) > 255 for part in path.split("/"))


# --- applying -------------------------------------------------------------------------------


def apply_patch(package_root: Path, patch: PatchFile, position: int = 0) -> PatchRow:
    """Apply one patch to a `vllm` package directory by GNU patch, at fuzz 0; the row says how it went.

    Rooted at the package (`a/v1/core/…`), or at vLLM's repository (`a/vllm/v1/core/…`): of the latter only
    what lies under `vllm/` reaches the tree.  What it says of tests, docs and the like is put aside, since a
    tree is the package alone.  Byte code of changed files is removed, no `.orig` or `.rej` is left behind.

    Raises SeriesError: a hunk that does not apply or only would with fuzz, a file that is not there or is
    already, a patch that is already in, that changes nothing (no-change), or that needs a compile.  The
    directory is then half patched: throw it away.
    """
    strip, inside = _rooted(package_root, patch)
    targets = {path: section.line for section in inside for path in section.stripped(strip)}
    before = {path: _content(package_root / path) for path in targets}
    if not inside:
        raise _no_change(patch, "it names no file of the vllm package")
    try:
        report = run_patch(package_root, _only(patch, inside), strip=strip)
    except TimeoutError as error:
        raise patch.error(str(error)) from error
    _refuse(patch, inside, report)
    changed = tuple(path for path in targets if _content(package_root / path) != before[path])
    if not changed:
        raise _no_change(patch, "it applies and changes no byte")
    for path in changed:
        _drop_bytecode(package_root / path)
    offsets = [abs(hunk.offset) for hunk in report.hunks if hunk.offset]
    return PatchRow(patch=patch.name, sha256=patch.sha256, position=position, hunks=len(report.hunks),
                    offset_hunks=len(offsets), max_offset=max(offsets, default=0), files=changed)


def _rooted(package_root: Path, patch: PatchFile) -> tuple[int, tuple[FilePatch, ...]]:
    """(strip level, sections that concern the package)."""
    sections = patch.sections
    for section in sections:
        for path in section.paths:
            if path.split("/", 1)[0] in COMPILED and not (package_root / path).exists():
                raise patch.error(f"it touches {path}, which is compiled into the wheel's extensions (needs-compile): an "
                                  "overlay cannot give that. Take that part out, or use a pin of kind `installed` whose "
                                  "wheel was built with it", section.line)
        for path in section.headers:
            if "/" not in path:
                raise patch.error(f"{path} has no leading directory (a/, b/): patches are applied with -p1; write it "
                                  "with `diff -u` or `git diff` from the root's parent", section.line)
    tops = {path.split("/", 1)[0] for section in sections for path in section.paths}
    if PACKAGE not in tops and tops != {TESTS}:
        return 1, sections
    for section in sections:
        for path in section.paths:
            if not path.startswith(f"{PACKAGE}/") and (package_root / path).is_file():
                raise patch.error(f"{path} is rooted at the vllm package, other parts at the repository (a/vllm/…): it "
                                  "would be left out. Root all of it alike", section.line)
    return 2, tuple(s for s in sections if any(path.startswith(f"{PACKAGE}/") for path in s.paths))


def _only(patch: PatchFile, inside: Sequence[FilePatch]) -> bytes:
    """The patch with the other sections blotted out, every line in its old place (errors name lines)."""
    if len(inside) == len(patch.sections):
        return patch.data
    keep = {number for section in inside for number in range(section.line, section.end)}
    lines = patch.data.split(b"\n")
    return b"\n".join(line if number in keep else b"#" for number, line in enumerate(lines, 1)) + b"\n"


def _refuse(patch: PatchFile, inside: Sequence[FilePatch], report: PatchReport) -> None:
    expected = sum(len(section.hunks) for section in inside)
    if report.strange_form is not None:
        raise patch.error(f"GNU patch took a part of it for {report.strange_form}, which it applies too, unseen by any check "
                          "here; a patch holds unified diffs alone")
    if report.malformed is not None:
        line, said = report.malformed
        raise patch.error(f"GNU patch calls it malformed here ({said}): a hunk's line counts do not fit its lines. "
                          "Write the patch anew with diff; never edit or trim a hunk by hand", line)
    if report.missing_file is not None:
        section = next((s for s in inside if s.line <= report.missing_file < s.end), inside[0])
        raise patch.error(f"{section.paths[-1]} is not in this pin's package; rebase the patch onto this pin",
                          section.line)
    failed = report.failed or report.fuzzy
    if report.already:
        raise patch.error(f"{report.already} ({failed[0].file if failed else inside[0].paths[-1]}), from this pin or an "
                          "earlier patch; take it out of the series for this pin",
                          _hunk_line(inside, failed[0]) if failed else inside[0].line)
    if failed:
        words = ", ".join(f"hunk #{hunk.number} of {hunk.file}" for hunk in failed)
        raise patch.error(f"{words} {'does' if len(failed) == 1 else 'do'} not apply at fuzz 0 ({expected} hunks in all). "
                          f"Open the patch there and rebase it onto this pin's {failed[0].file}, with the patches before "
                          "it applied", _hunk_line(inside, failed[0]))
    if report.code:
        raise patch.error(f"GNU patch ended with status {report.code}: {report.last_words}")
    if len(report.hunks) != expected:
        raise patch.error(f"GNU patch saw {len(report.hunks)} hunks where the patch's own diff has {expected}: a second "
                          "copy of the diff stands in it, perhaps indented in its preamble; take it out")


def _hunk_line(inside: Sequence[FilePatch], hunk: HunkReport) -> int | None:
    """Line of a hunk's header in the patch file."""
    named = [section for section in inside
             if any(path == hunk.file or path.endswith(f"/{hunk.file}") for path in section.paths)]
    return next((h.line for section in named[hunk.visit:] for h in section.hunks[hunk.number - 1:]), None)


def _no_change(patch: PatchFile, why: str) -> SeriesError:
    error = patch.error(f"{why}: no evidence could come of it (no-change). Check that its paths are rooted at the vllm "
                        "package (a/v1/…) or the repository (a/vllm/v1/…)")
    error.verdict, error.reason = Verdict.INVALID, Reason.NO_CHANGE
    return error


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _drop_bytecode(source: Path) -> None:
    for stale in source.parent.glob(f"__pycache__/{source.stem}.*.pyc") if source.suffix == ".py" else ():
        stale.unlink()
