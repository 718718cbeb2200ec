"""What the processes of a server that hangs are doing, by py-spy where it is there and may look.

py-spy is no dependency: it is used where it lies on PATH or beside an interpreter.  It reads another process's memory
without stopping it, which the kernel allows root, and else within one user where yama's ptrace_scope is 0.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

DEADLINE_S = 15.0  # for all processes together; one takes 0.3 s
PROCESSES, LINES = 6, 80  # as much as one record keeps of it


def spy(python: Path) -> str | None:
    """Where py-spy is: on PATH, beside our interpreter or beside `python`; None where it is not."""
    beside = (str(Path(sys.executable).parent), str(python.parent))
    return shutil.which("py-spy") or next((found for d in beside if (found := shutil.which("py-spy", path=d))), None)


def taken(pids: Sequence[int], python: Path, deadline_s: float = DEADLINE_S) -> str:
    """The Python stacks of these processes, each below a line that names it; empty where there is no py-spy or it may not look.

    `python` is the interpreter that they run.  Processes that are not Python's are left out.
    """
    program = spy(python)
    until = time.monotonic() + deadline_s
    found = []
    for pid in pids if program is not None else ():
        left = until - time.monotonic()
        if left <= 0 or len(found) == PROCESSES:
            break
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run([program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True,
                                  errors="replace", timeout=left, stdin=subprocess.DEVNULL, check=False)
            if done.returncode == 0 and done.stdout.strip():
                found.append("\n".join([f"--- py-spy: process {pid} ---", *done.stdout.strip().splitlines()[:LINES]]))
    return "\n".join(found)
