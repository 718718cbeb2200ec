"""Private folders of one process: short-lived, named `farm-…`, with a note of whose they are.

A process that is killed leaves its folders behind; by the note a later one knows that nobody will come back for them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from farm.supervisor import started, world

PREFIX = "farm-"
NOTE = ".owner"  # in each folder: who made it


@dataclass(frozen=True)
class Owner:
    """A process, told from every other one that has or will have its pid; see farm.supervisor.world."""

    world: str
    pid: int
    started: int | None

    @classmethod
    def here(cls) -> Owner:
        return cls(world(), os.getpid(), started(os.getpid()))

    @property
    def gone(self) -> bool:
        """Whether it has certainly ended: all of an earlier start of the machine has; of another container nobody knows."""
        boot, _, namespace = self.world.partition(" ")
        now, _, here = world().partition(" ")
        return boot != now or (namespace == here and started(self.pid) != self.started)


@contextmanager
def private(parent: str | Path | None = None) -> Iterator[Path]:
    """A new folder that nobody else may look into, below `parent` or the temporary directory; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        (folder / NOTE).write_text(json.dumps(asdict(Owner.here())), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def owner(folder: Path) -> Owner | None:
    """Whose a folder is by its note; None where it has none that this user wrote."""
    try:
        with open(os.open(folder / NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            there = os.fstat(file.fileno())
            if there.st_uid != os.getuid() or not stat.S_ISREG(there.st_mode):
                return None
            return Owner(**json.load(file))
    except (OSError, TypeError, ValueError):
        return None
