"""Trees: hard-linked overlays of a pristine package with patches applied, named by content.

A tree's directory goes on PYTHONPATH as it is.  Building one takes well under
a second; it is immutable after, and reused by whoever asks for the same pin
and patches on this node.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from filelock import FileLock, Timeout

from farm.apply import apply_patch
from farm.errors import EnvironmentBuildError, FarmError, InvalidMeasurement
from farm.manifest import Manifest, is_bytecode, sha256_of, walk
from farm.pristine import PACKAGE, Pristine, link_or_copy, some
from farm.records import PatchRow, Reason
from farm.series import PatchFile, series_sha256

FORMAT = 1  # goes into every id: raise it when trees are built in another way
LOCK_S = 300.0
_FACTS = "tree.json"


@dataclass(frozen=True)
class Tree:
    """A pin with patches.  `root` goes on PYTHONPATH and holds the `vllm` package and its dist-info."""

    id: str
    root: Path
    package: Path
    patches: tuple[PatchRow, ...]
    pin: str
    series_sha256: str


class TreeStore:
    """All trees of this node, below one cache directory."""

    def __init__(self, cache: Path) -> None:
        self._folder = Path(cache).absolute() / "trees"
        self._locks = Path(cache).absolute() / "locks"

    def build(self, pristine: Pristine, patches: Sequence[PatchFile]) -> Tree:
        """The tree of these patches, applied in this order; one that stands whole is reused.

        Raises SeriesError where a patch does not apply, EnvironmentBuildError where the pristine is none.
        """
        tree_id = identity(pristine, patches)
        root = self._folder / tree_id
        if found := _load(root, pristine, patches):
            return found
        self._folder.mkdir(parents=True, exist_ok=True)
        self._locks.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self._locks / f"tree-{tree_id}.lock", timeout=LOCK_S):
                return _load(root, pristine, patches) or self._make(root, pristine, patches)
        except Timeout as error:
            raise EnvironmentBuildError(f"tree {tree_id} was not free within {LOCK_S:.0f} s: another process holds "
                                        f"{error.lock_file}") from error

    def prove(self, pristine: Pristine, patches: Sequence[PatchFile]) -> None:
        """Raise InvalidMeasurement where a file of this tree, or of its pristine, was written to since it was built."""
        changed = pristine.manifest.changed(pristine.package)
        tree_id = identity(pristine, patches)
        if changed or _load(self._folder / tree_id, pristine, patches) is None:
            what = f"{some(changed)} below {pristine.package}" if changed else f"a file below {self._folder / tree_id}"
            raise InvalidMeasurement(f"the tree changed while it was measured: {what} was written to. Trees share "
                                     "their files, so no arm is what it says; look for a test or script that edits vllm, then: "
                                     f"rm -r {pristine.package.parent} {self._folder}", reason=Reason.WRONG_TREE)

    def _make(self, root: Path, pristine: Pristine, patches: Sequence[PatchFile]) -> Tree:
        for left in self._folder.glob(f"{root.name}.*"):
            shutil.rmtree(left)
        beside = Path(tempfile.mkdtemp(prefix=f"{root.name}.", dir=self._folder))
        try:
            overlay(pristine, beside / PACKAGE)
            rows = tuple(apply_patch(beside / PACKAGE, patch, position) for position, patch in enumerate(patches))
            _write_dist_info(beside, pristine, rows)
            _prove_untouched(pristine, rows)
            if _load(beside, pristine, patches) is None:
                raise patches[-1].error("a file of the tree differs that no patch names: GNU patch did more than the patches' "
                                        "own headers say; write them anew with git diff")
            beside.chmod(0o755)
            if root.exists():  # it is not whole: out of the way first, a process may still run from it
                os.rename(root, root.with_name(f"{root.name}.broken"))
            os.rename(beside, root)
        finally:
            for left in self._folder.glob(f"{root.name}.*"):
                shutil.rmtree(left)
        return Tree(root.name, root, root / PACKAGE, rows, pristine.pin, series_sha256(patches))


def identity(pristine: Pristine, patches: Sequence[PatchFile]) -> str:
    """Content hash of a tree, the same on every node: pin, its package's content, patches in order."""
    parts = [FORMAT, pristine.pin, pristine.version, pristine.distribution, pristine.flavour, pristine.fingerprint,
             [patch.sha256 for patch in patches]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def overlay(pristine: Pristine, package: Path) -> None:
    """Link every file of the pristine package into a new directory."""
    folders = {str(PurePosixPath(path).parent) for path in pristine.manifest.files}
    for folder in sorted(folders):
        os.makedirs(package / folder, exist_ok=True)
    source, target = f"{pristine.package}/", f"{package}/"
    for path in pristine.manifest.files:
        link_or_copy(source + path, target + path)


def dist_version(pristine: Pristine) -> str:
    """Version under which the tree calls itself `vllm`: vLLM takes the CPU platform where it contains `cpu`."""
    if pristine.flavour == "cpu" and "cpu" not in pristine.version:
        return f"{pristine.version}{'.' if '+' in pristine.version else '+'}cpu"
    return pristine.version


def _write_dist_info(root: Path, pristine: Pristine, rows: Sequence[PatchRow]) -> None:
    """A minimal `vllm` distribution, or vLLM's CLI dies and its plugins are not found; and our own facts."""
    version = dist_version(pristine)
    folder = root / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8")
    (folder / "INSTALLER").write_text("patch-farm\n", encoding="utf-8")
    entry_points = pristine.info / "entry_points.txt"
    if entry_points.is_file():
        shutil.copy(entry_points, folder / "entry_points.txt")
    touched = {path: _hash(root / PACKAGE / path) for row in rows for path in row.files}
    facts = {"patches": [dataclasses.asdict(row) for row in rows], "touched": touched}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def _prove_untouched(pristine: Pristine, rows: Sequence[PatchRow]) -> None:
    """Patched files are written beside and renamed, so no write can have gone through a link: show it."""
    pristine.check()
    touched = {path for row in rows for path in row.files} & set(pristine.manifest.files)
    if written := pristine.manifest.rehashed(pristine.package, sorted(touched)):
        raise FarmError(f"patching a tree of pin {pristine.pin} wrote into its pristine package: {some(written)}; "
                        f"rm -r {pristine.package.parent} and run again, and look at what `patch` is on this machine")


def _load(root: Path, pristine: Pristine, patches: Sequence[PatchFile]) -> Tree | None:
    """The tree in `root`, or None where there is none or a file of it is not as it was built."""
    try:
        facts = json.loads((root / f"vllm-{dist_version(pristine)}.dist-info" / _FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not _whole(root / PACKAGE, pristine.manifest, facts["touched"]):
        return None
    rows = tuple(dataclasses.replace(PatchRow(**{**row, "files": tuple(row["files"])}), patch=patch.name)
                 for row, patch in zip(facts["patches"], patches, strict=True))
    return Tree(root.name, root, root / PACKAGE, rows, pristine.pin, series_sha256(patches))


def _whole(package: Path, pristine: Manifest, touched: dict[str, str | None]) -> bool:
    """Whether a tree holds the pristine's files, by stat, and its touched ones, by content, and no others.

    Byte code counts where the pristine has it; of touched files it is made by the first import.
    """
    there = dict(walk(package))
    for path, digest in touched.items():
        if _hash(package / path) != digest:
            return False
    stale = {path for path in pristine.files if is_bytecode(path) and _source(path) in touched}
    expected = [path for path in pristine.files if path not in touched and path not in stale]
    if any(path not in there or not pristine.files[path].matches(there[path]) for path in expected):
        return False
    return not any(path not in pristine.files and path not in touched and not is_bytecode(path) for path in there)


def _source(bytecode: str) -> str:
    """v1/__pycache__/pool.cpython-311.pyc -> v1/pool.py"""
    path = PurePosixPath(bytecode)
    return str(path.parent.parent / f"{path.name.split('.', 1)[0]}.py")


def _hash(path: Path) -> str | None:
    return sha256_of(path) if path.is_file() else None


