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
from dataclasses import asdict
from pathlib import Path

from farm.processid import ProcessId

PREFIX = "farm-"
NOTE = ".owner"  # in each folder: who made it


@contextmanager
def private(parent: str | Path | None = None) -> Iterator[Path]:
    """A new folder that nobody else may look into, below `parent` or the temporary directory; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        (folder / NOTE).write_text(json.dumps(asdict(ProcessId.here())), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def owner(folder: Path) -> ProcessId | None:
    """Whose a folder is by its note; None where it has none that this user wrote."""
    return written_by(folder / NOTE)


def written_by(note: Path) -> ProcessId | None:
    """The process that a note names; None where this user wrote none."""
    try:
        with open(os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
            there = os.fstat(file.fileno())
            if there.st_uid != os.getuid() or not stat.S_ISREG(there.st_mode):
                return None
            return ProcessId(**json.load(file))
    except (OSError, TypeError, ValueError):
        return None
