"""A file that all users of a host share: whoever comes first makes it, everybody may lock, read and write it.

The folder is sticky (mode 1777), so nobody can replace a file of another user:
files are written in place.  On kernels with fs.protected_regular set, opening
such a file with O_CREAT is refused even where it exists, so an existing one is
opened without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from farm.errors import FarmError

POLL_S = 0.02
MOST = 2**20  # bytes of a file that are looked at: everybody may write there, and as much as they like
_TRIES = 10  # each lost to somebody who made or removed the file in between
# What somebody else may have laid there is not followed, and not waited for: a link, a pipe.
_PLAIN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_shared(path: Path) -> int:
    """A descriptor to read and write, closed on exec; the file is made (empty, mode 0666) where it is missing.

    Raises OSError, also where the name is something else than a file.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            return _regular(os.open(path, os.O_RDWR | _PLAIN), path)
        fd, made = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            os.fchmod(fd, 0o666)  # before it has its name: another user may open it at once
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            os.close(fd)
            os.unlink(made)
    raise FileNotFoundError(f"{path} vanishes as soon as it is made; who cleans {path.parent}?")


def open_to_read(path: Path) -> int | None:
    """A descriptor to read (and to try the lock); None where there is no such file.  Raises OSError."""
    try:
        return _regular(os.open(path, os.O_RDONLY | _PLAIN), path)
    except FileNotFoundError:
        return None


def lock(fd: int, wait_s: float) -> bool:
    """Take the exclusive lock of an open file, waiting for it `wait_s` seconds at most; False where another still has it.

    The kernel lets go of it when the last process that has the file open closes it or ends.  (filelock makes files of its
    own that other users cannot lock.)  Raises OSError where the file system knows no locks.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """An OSError of the block as a FarmError that says what and what to do."""
    try:
        yield
    except OSError as error:
        raise FarmError(f"{path}, which all users of this host share, cannot be used ({error.strerror or error}); make room or "
                        "give access (folder 1777, files 0666), or set FARM_HOST_STATE") from error


def content(fd: int) -> bytes:
    """What the open file holds, of a longer one its last MOST bytes."""
    return os.pread(fd, MOST, max(0, os.fstat(fd).st_size - MOST))


def read(path: Path) -> bytes | None:
    """`content` of the file of this name; None where there is none.  Raises OSError, also where it is something else."""
    fd = open_to_read(path)
    if fd is None:
        return None
    try:
        return content(fd)
    finally:
        os.close(fd)


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one that has this name."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(fd)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _regular(fd: int, path: Path) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is no regular file; remove it")
    return fd
