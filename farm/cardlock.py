"""One holder per card and host: an advisory lock that the kernel releases when its holder dies, and who that is.

The lock (flock) is the truth, the record in the file only names the holder.
filelock would take the same lock, but its files belong to one user and name
nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from farm import jsontext
from farm.hostfile import content, is_at, open_shared, open_to_read, told
from farm.processid import ProcessId
from farm.records import utc_now

POLL_S = 0.1
GLANCE_S = 0.5  # a reader of the holder (`farm cards`) has the lock for an instant; that is no holder
TELL_EVERY_S = 30.0


@dataclass(frozen=True)
class Holder:
    """Who has a card, for which run and cell, since when (UTC)."""

    user: str
    process: ProcessId
    run: str
    cell: str
    since: datetime

    @classmethod
    def me(cls, run: str, cell: str) -> Holder:
        return cls(_user(), ProcessId.here(), run, cell, utc_now())

    def age_s(self) -> float:
        return max(0.0, (utc_now() - self.since).total_seconds())

    def __str__(self) -> str:
        return f"{self.user} (process {self.process.pid}, run {self.run}, cell {self.cell}, for {duration(self.age_s())})"


class Held(Exception):
    """Somebody else has the card still: `holder` where the file names one."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "somebody who is not named"))
        self.holder = holder


@dataclass(frozen=True)
class CardLock:
    """The lock of one card, by its UUID, below the host's state folder."""

    state: Path
    card: str

    @property
    def path(self) -> Path:
        return self.state / f"{self.card}.lock"

    def holder(self) -> Holder | None:
        """Who has the card now.  None: nobody, or somebody whose record is not there yet.  Raises FarmError."""
        with told(self.path):
            fd = open_to_read(self.path)
        if fd is None:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(fd)
        finally:
            os.close(fd)  # and the lock with it
        return None

    @contextmanager
    def held(self, run: str, cell: str, *, wait_s: float,
             waiting: Callable[[Holder | None], None]) -> Iterator[Callable[[], bool]]:
        """Hold the card while the block runs; it is given what says whether the card is still held.

        Whoever removes or replaces the file of a lock lets the next one have the card beside its holder.
        Meanwhile `waiting` is told for whom it waits, at once and then every TELL_EVERY_S seconds.  Raises Held after
        `wait_s` seconds (0: at once), FarmError where the file cannot be used.
        """
        fd = self._acquired(wait_s, waiting)
        try:
            with contextlib.suppress(OSError):  # a full disk: it is held all the same, by somebody without a name
                os.ftruncate(fd, 0)
                os.pwrite(fd, _record(Holder.me(run, cell)), 0)
            yield lambda: is_at(fd, self.path)
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)

    def _acquired(self, wait_s: float, waiting: Callable[[Holder | None], None]) -> int:
        begun, told_at = time.monotonic(), None
        while True:
            with told(self.path):
                fd = open_shared(self.path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(fd, self.path):
                    return fd
                holder = None  # a file that was removed meanwhile: its lock excludes nobody
            except BlockingIOError:
                holder = _read(fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            now = time.monotonic()
            if now - begun >= (wait_s if holder else max(wait_s, GLANCE_S)):
                raise Held(holder)
            if (told_at is None and (holder or now - begun > GLANCE_S)) or (told_at and now - told_at >= TELL_EVERY_S):
                told_at = now
                waiting(holder)
            time.sleep(POLL_S)


def _record(holder: Holder) -> bytes:
    return json.dumps({**asdict(holder), "since": holder.since.isoformat()}).encode()


def _read(fd: int) -> Holder | None:
    """The record of a file that is locked; None where its process is gone: whoever has the lock now has yet to write."""
    try:
        said = jsontext.loads(content(fd))
        holder = Holder(jsontext.word(said["user"]), ProcessId.of(said["process"]), jsontext.word(said["run"]),
                        jsontext.word(said["cell"]), jsontext.moment(said["since"]))
    except (ValueError, TypeError, KeyError):
        return None
    return None if holder.process.gone else holder


def duration(seconds: float) -> str:
    """12 s, 5 min, 3.4 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
