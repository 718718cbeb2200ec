"""A small directory that stands for a package: copies of the files that patches name, and nothing else."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from farm.diffhead import PACKAGE
from farm.patchfile import PatchFile, named

MEMORY = "/dev/shm"  # files there never reach a disk, on which removing a directory alone may take a millisecond
_ROOM = 256 << 20  # bytes that must be free in it: a server's CPU tier maps it too
NOWHERE = "a-symbolic-link-of-the-tree"  # where the scratch's own symbolic links lead: to nothing


def workplace() -> tempfile.TemporaryDirectory[str]:
    """A temporary directory, in memory where this machine has such a place with room and TMPDIR names no other."""
    return tempfile.TemporaryDirectory(prefix="farm-", dir=MEMORY if "TMPDIR" not in os.environ and _roomy(MEMORY) else None)


def _roomy(folder: str) -> bool:
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= _ROOM


def scratch(package: Path, patches: Sequence[PatchFile], into: Path) -> Path:
    """`into/vllm`: what these patches see of a package.  Nothing written there can reach the package or anything else.

    Files are copies with their modes, never links; directories are there where a patch names something below them; a
    symbolic link is one here too, which leads nowhere, so that it is recognised and not followed.
    """
    target = into / PACKAGE
    target.mkdir(parents=True)
    copy_named(package, named(patches), target)
    return target


def copy_named(package: Path, paths: Iterable[str], target: Path) -> None:
    """Copy what stands at these paths, as far as it goes: a file in the place of a directory is copied as well."""
    for path in paths:
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            if not _copy(f"{package}/{'/'.join(parts[:depth])}", f"{target}/{'/'.join(parts[:depth])}"):
                break


def _copy(source: str, target: str) -> bool:
    """Copy one name; whether it is a directory, so that more may stand below it."""
    try:
        mode = os.lstat(source).st_mode
    except OSError:  # not there, or below something that is no directory
        return False
    if stat.S_ISREG(mode):
        if not os.path.lexists(target):
            shutil.copyfile(source, target)
            os.chmod(target, stat.S_IMODE(mode) | stat.S_IRUSR)
        return False
    if stat.S_ISLNK(mode):
        if not os.path.lexists(target):
            os.symlink(NOWHERE, target)
        return False
    os.makedirs(target, exist_ok=True)  # a directory; also in the place of a device or a pipe, which no patch may touch
    return stat.S_ISDIR(mode)
