"""Watches over a server that is healthy: who of it is still there, and whether anything is heard of it.

`/health` is answered by the API server alone, and says 200 for a while after its engine has died, and for ever where
the engine hangs.  So the process table is asked: whoever had loaded the tree's compiled code when the server became
healthy (the API server, its engines, their workers) must stay as long as it serves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from farm import attest
from farm.supervisor import started

STOPPED_S = 4.0  # a process that is stopped for so long does not merely have a debugger look at it
# Requests of our own for metrics and health are no sign of life.
_OWN = re.compile(r'"(GET|HEAD) /(metrics|health|v1/models)\b')
_DEAD = re.compile(r"EngineDeadError|EngineCore encountered an issue|engine core exited unexpectedly")


@dataclass(frozen=True)
class Member:
    """One process of a server, as it was when that became healthy."""

    pid: int
    started: int  # clock ticks, see farm.supervisor.started
    name: str

    @property
    def gone(self) -> bool:
        return started(self.pid) != self.started

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it (state T of proc(5))."""
        with suppress(OSError):  # it has ended, or nothing can be opened: at least no sign that it was stopped
            return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
        return False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def members(tree: Path, pids: Sequence[int], main: int) -> tuple[Member, ...]:
    """Who of `pids` has loaded the tree's compiled code, `main` first: the process that answers requests."""
    found = []
    for pid in dict.fromkeys((main, *attest.loaded(tree, pids))):
        began = started(pid)
        if began is not None:
            found.append(Member(pid, began, _name(pid)))
    return tuple(found)


@dataclass
class Watch:
    """Of one healthy server.  `look` costs well under a millisecond: it is called while a request is timed."""

    members: Sequence[Member]
    clock: Callable[[], float] = time.monotonic
    _stopped: dict[int, float] = field(default_factory=dict)  # pid -> since when

    def dead_engine(self) -> Member | None:
        """An engine, or a worker of one, that is gone while the API server is there; None where none is."""
        main, *engines = self.members
        gone = next((member for member in engines if member.gone), None)
        return None if gone is None or main.gone else gone

    def hung(self) -> Member | None:
        """A process that has been stopped for STOPPED_S, as seen by repeated calls; None where none is."""
        for member in self.members:
            if not member.stopped:
                self._stopped.pop(member.pid, None)
            elif self.clock() - self._stopped.setdefault(member.pid, self.clock()) >= STOPPED_S:
                return member
        return None


def said(lines: Iterable[str]) -> list[str]:
    """Lines of a server's log that it wrote by itself."""
    return [line for line in lines if line.strip() and not _OWN.search(line)]


def tells_of_dead_engine(lines: Iterable[str]) -> bool:
    """Whether an API server says, in vLLM's words, that its engine is dead."""
    return any(_DEAD.search(line) for line in lines)


def _name(pid: int) -> str:
    words = attest.command(pid)
    title = " ".join(words).strip()
    return title if title.startswith("VLLM::") else Path(words[0]).name if words else "?"
