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
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from farm.supervisor import parents, started

Process = tuple[int, int]  # id, start time in clock ticks since the machine's boot


def family(name: str, value: str, *, since: int, ancestors: Iterable[Process], heads: Iterable[Process] = ()) -> list[Process]:
    """The processes of a tree that are there now, this one left out: `heads`, and carriers of the variable `name`=`value`.

    `ancestors` are whoever started the tree and all that it descends from (farm.supervisor.line_of), `since` the start time
    of the tree's first process.
    """
    above = parents()
    alive = {pid: began for pid in above if (began := started(pid)) is not None}
    ours = {head for head in heads if alive.get(head[0]) == head[1]}
    wanted = f"{name}={value}".encode()
    candidates = {(pid, began) for pid, began in alive.items()
                  if began >= since and pid != os.getpid() and _carries(pid, wanted)}
    roots = {pid for pid, began in ancestors if alive.get(pid) == began} | {0, 1}
    while grown := {p for p in candidates - ours if above[p[0]] in roots or above[p[0]] in {pid for pid, _ in ours}}:
        ours |= grown
    return sorted(ours)


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
    try:
        place = Path("/proc", str(pid))
        return place.stat().st_uid == os.getuid() and wanted in (place / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
