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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from farm.supervisor import parents, started

Process = tuple[int, int]  # id, start time in clock ticks since the machine's boot


def carriers(name: str, value: str, *, since: int, ancestors: Iterable[Process],
             heads: Iterable[Process] = ()) -> list[Process]:
    """The processes of a tree that are there now, this one left out: `heads`, and carriers of the variable `name`=`value`.

    `ancestors` are whoever started the tree and all that it descends from (farm.supervisor.line_of), `since` the start time
    of the tree's first process.
    """
    alive, above = _table()
    ours = {head for head in heads if alive.get(head[0]) == head[1]}
    wanted = f"{name}={value}".encode()
    line = {pid for pid, began in ancestors if alive.get(pid) == began}
    others = {(pid, began) for pid, began in alive.items()
              if began >= since and pid not in line and pid != os.getpid() and _carries(pid, wanted)}
    ours |= {process for process in others if above[process[0]] in line | {0, 1}}
    return sorted(_with_below(ours, others, above))


def family(name: str, value: str, *, since: int, ancestors: Iterable[Process], heads: Iterable[Process] = ()) -> list[Process]:
    """`carriers`, and all that is below them, whatever its environment."""
    ours = set(carriers(name, value, since=since, ancestors=ancestors, heads=heads))
    alive, above = _table()
    return sorted(_with_below(ours, {process for process in alive.items() if process[0] != os.getpid()}, above))


def _table() -> tuple[dict[int, int], dict[int, int]]:
    """Of all processes: pid -> start time, pid -> parent."""
    alive = {pid: began for pid in parents() if (began := started(pid)) is not None}
    above = parents()  # after: whoever ends in between has its children below init by now, not below nobody that lives
    return {pid: began for pid, began in alive.items() if pid in above}, above


def _with_below(ours: set[Process], others: set[Process], above: Mapping[int, int]) -> set[Process]:
    while grown := {process for process in others - ours if above[process[0]] in {pid for pid, _ in ours}}:
        ours = ours | grown
    return ours


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
