"""Private folders of one process: short-lived, named `farm-…`, with a note of whose they are.

A process that is killed leaves its folders behind; by the note a later one knows that nobody will come back for them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from farm import jsontext
from farm.hostfile import content, open_to_read
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
        fd = open_to_read(note)
        if fd is None:
            return None
        try:
            return ProcessId.of(jsontext.loads(content(fd))) if os.fstat(fd).st_uid == os.getuid() else None
        finally:
            os.close(fd)
    except (OSError, KeyError, TypeError, ValueError):
        return None
