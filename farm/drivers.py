"""Who drives a run: the process that writes its rows, and whether it is still there.

Two witnesses.  The run's row names the process (host, boot of the machine, pid
namespace, pid, start time): exact on the same machine, silent about any other.
A lock on a file beside that row is held as long as the process lives; the
kernel lets go of it, and it also speaks where the pid means nothing: in another
container, or on another host where the file system shares its locks.

filelock cannot be asked whether a lock is held without taking it: hence flock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pyarrow import fs as pafs

from farm import jsontext
from farm.errors import ResultsUnwritable, UsageError
from farm.hostfile import lock
from farm.processid import ProcessId
from farm.store import Store

RUNNING = "running"  # status of a run's row
LOCK = ".driver.lock"  # hidden: no reader takes it for rows
_TAKE_S = 2.0  # a reader that looks holds the lock for a moment
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})  # of a file system that knows none


class Standing(Enum):
    """What can be known of a driver from here."""

    ALIVE = "alive"
    DEAD = "dead"
    ELSEWHERE = "elsewhere"  # on another machine, or in another container: nothing can be known


@dataclass(frozen=True)
class Driver:
    """A process (farm.processid) and its host, in the words that rows have had from the beginning."""

    host: str
    boot: str  # random id of the machine's start
    namespace: str  # of pids
    pid: int
    started: int  # clock ticks after the boot

    @classmethod
    def here(cls) -> Driver:
        """This process."""
        process = ProcessId.here()
        boot, _, namespace = process.world.partition(" ")
        return cls(socket.gethostname(), boot, namespace, process.pid, process.started or 0)

    @classmethod
    def parse(cls, text: str | None) -> Driver | None:
        """What `str` wrote; None where there is none, or an older version's words."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            said = jsontext.loads(text or "")
            return cls(jsontext.word(said["host"]), jsontext.word(said["boot"]), jsontext.word(said["namespace"]),
                       jsontext.whole(said["pid"]), jsontext.whole(said["started"]))
        return None

    def __str__(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def standing(self) -> Standing:
        """By its pid.  A machine of the same name that was started anew has no process of before."""
        here = Driver.here()
        if self.boot != here.boot:
            return Standing.DEAD if self.host == here.host else Standing.ELSEWHERE
        lives = ProcessId(f"{self.boot} {self.namespace}", self.pid, self.started).lives
        return {True: Standing.ALIVE, False: Standing.DEAD, None: Standing.ELSEWHERE}[lives]


def standing(store: Store, run: str, row: Mapping[str, Any]) -> Standing:
    """Whether a run's driver lives: its lock where that is held, else, where its row says `running`, its process."""
    if _is_held(store, run):
        return Standing.ALIVE
    driver = Driver.parse(row.get("process"))
    return driver.standing if driver is not None and row.get("status") == RUNNING else Standing.DEAD


@contextlib.contextmanager
def driving(store: Store, run: str) -> Iterator[None]:
    """Hold a run's lock: no two processes drive one run.  Raises UsageError where another one does, ResultsUnwritable.

    A root that is no directory, or whose file system knows no locks, has none: there the row's process is all.
    """
    file = _file(store, run)
    if file is None:
        yield
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        handle = _taken(file, run)
    except OSError as error:
        raise ResultsUnwritable(f"run {run}: {file} cannot be made ({error.strerror}); make room or give access") from error
    try:
        yield
    finally:
        os.close(handle)


def _taken(file: Path, run: str) -> int:
    """A handle that holds the lock.  Open for reading: else nobody could remount that disk read-only; NFS wants writing."""
    for access in (os.O_RDONLY, os.O_RDWR):
        handle = os.open(file, access | os.O_NONBLOCK | os.O_CLOEXEC)  # where somebody laid a pipe, too
        try:
            _take(handle, run)
            return handle
        except OSError as error:
            os.close(handle)
            if error.errno != errno.EBADF or access == os.O_RDWR:
                raise
        except UsageError:
            os.close(handle)
            raise
    raise AssertionError("unreachable")


def _take(handle: int, run: str) -> None:
    try:
        taken = lock(handle, _TAKE_S)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return
    if not taken:
        raise UsageError(f"run {run} is driven by another process; see: farm runs. Wait for its end")


def _is_held(store: Store, run: str) -> bool:
    file = _file(store, run)
    if file is None:
        return False
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # a run of before there was one, or not ours to read
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _file(store: Store, run: str) -> Path | None:
    return Path(store.files.path("runs", run, LOCK)) if isinstance(store.files.fs, pafs.LocalFileSystem) else None
