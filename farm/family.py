"""Which processes are one tree's, and an end for them: by kinship, since a mark in an environment may be somebody's copy.

A process is ours if it is a known head by id and start time, or if it carries the tree's mark (random bits in the
environment that only our own children inherit), began after the tree did, is this user's, and hangs where an orphan of
ours hangs: below another one of ours, below whoever started the tree or one of its ancestors, or below init.  So neither
an id that was given anew is taken for ours, nor what somebody started with a copy of our environment.

Standard library only, since farm.guard runs where nothing else can be imported.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from farm.supervisor import parents, started

Process = tuple[int, int]  # id, start time in clock ticks since the machine's boot


def carriers(name: str, value: str, *, since: int, ancestors: Iterable[Process]) -> list[Process]:
    """The processes of a tree that are there now, this one left out: carriers of the variable `name`=`value`.

    `ancestors` are whoever started the tree and all that it descends from (farm.supervisor.line_of), `since` the start time
    of the tree's first process.
    """
    return sorted(_carriers(_Table.now(), f"{name}={value}", since, ancestors, ()))


def family(name: str, value: str, *, since: int, ancestors: Iterable[Process], heads: Iterable[Process] = ()) -> list[Process]:
    """As `carriers`, and the known `heads` with them, and all that is below any of these, whatever its environment."""
    now = _Table.now()
    return sorted(now.with_below(_carriers(now, f"{name}={value}", since, ancestors, heads), set(now.alive.items())))


@dataclass(frozen=True)
class _Table:
    """All processes at one moment: pid -> start time, pid -> parent."""

    alive: Mapping[int, int]
    above: Mapping[int, int]

    @classmethod
    def now(cls) -> _Table:
        alive = {pid: began for pid in parents() if (began := started(pid)) is not None}
        above = parents()  # after: whoever ends in between has its children below init by now, not below nobody that lives
        return cls({pid: began for pid, began in alive.items() if pid in above}, above)

    def below(self, roots: Set[int], others: set[Process]) -> set[Process]:
        """Those of `others` that hang directly below one of `roots`."""
        return {process for process in others if not roots.isdisjoint(self._over(process[0]))}

    def with_below(self, ours: set[Process], others: set[Process]) -> set[Process]:
        """`ours`, and those of `others` but this process that are below them without a gap."""
        others = {process for process in others if process[0] != os.getpid()}
        while grown := self.below({pid for pid, _ in ours}, others - ours):
            ours = ours | grown
        return ours

    def _over(self, pid: int) -> Iterator[int]:
        """The parent; where that one is ending also who is above it, to whom its children go in a moment.

        It is looked at now, after its environment was: else one that loses it in between would be neither ours nor ending.
        """
        pid = self.above[pid]
        yield pid
        while pid > 1 and _is_ending(pid):
            pid = self.above.get(pid, 0)
            yield pid


def _carriers(now: _Table, wanted: str, since: int, ancestors: Iterable[Process], heads: Iterable[Process]) -> set[Process]:
    line = {pid for pid, began in ancestors if now.alive.get(pid) == began}
    others = {(pid, began) for pid, began in now.alive.items()
              if began >= since and pid not in line and pid != os.getpid() and _carries(pid, wanted.encode())}
    ours = {head for head in heads if now.alive.get(head[0]) == head[1]}
    ours |= now.below(line | {0, 1}, others)
    return now.with_below(ours, others)


def kill(process: Process) -> None:
    """By a handle that is taken before the last look: the id cannot be given to another process in between."""
    pid, began = process
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if started(pid) == began:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _is_ending(pid: int) -> bool:
    """Whether a process has no memory any more, and so no environment: the kernel still takes back what it had, tenths of a
    second for gigabytes, and only then its children get another parent."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[20]) == 0
    return True


def _carries(pid: int, wanted: bytes) -> bool:
    place = Path("/proc", str(pid))
    with suppress(OSError):
        if place.stat().st_uid != os.getuid():
            return False
        if wanted in (place / "environ").read_bytes().split(b"\0"):
            return True
    with suppress(OSError):  # of a process whose first thread has ended, the others have the environment
        if (place / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
            return any(_thread_carries(thread, wanted) for thread in (place / "task").iterdir())
    return False


def _thread_carries(thread: Path, wanted: bytes) -> bool:
    with suppress(OSError):
        return wanted in (thread / "environ").read_bytes().split(b"\0")
    return False
