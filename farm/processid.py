"""One process, told from every other one that has or will have its id: ids are used again, and mean nothing elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from farm import jsontext
from farm.supervisor import started, world


@dataclass(frozen=True)
class ProcessId:
    """`world` names the machine's start and the pid namespace (farm.supervisor.world); `started` is in clock ticks since
    that start."""

    world: str
    pid: int
    started: int | None

    @classmethod
    def here(cls) -> ProcessId:
        return cls(world(), os.getpid(), started(os.getpid()))

    @classmethod
    def of(cls, said: Any) -> ProcessId:
        """From the JSON of one.  Raises KeyError, TypeError, ValueError."""
        began = said["started"]
        return cls(jsontext.text(said["world"]), jsontext.whole(said["pid"]), None if began is None else jsontext.whole(began))

    @property
    def lives(self) -> bool | None:
        """Whether it is there, on the machine that this is; None: it is another container's, so nobody knows here."""
        boot, _, namespace = self.world.partition(" ")
        now, _, here = world().partition(" ")
        if boot != now:
            return False  # all of an earlier start of the machine has ended
        return started(self.pid) == self.started if namespace == here else None

    @property
    def gone(self) -> bool:
        """Whether it has certainly ended."""
        return self.lives is False
