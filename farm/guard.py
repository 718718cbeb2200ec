"""A small process that outlives us by seconds: it ends what our own Ray left when we are gone, `kill -9` included.

Measured on Ray 2.60: after `kill -9` of the driver its GCS and raylet die at once and the actors within 3 s, but the
two agents of the raylet look for their parent every 10 s, and live for up to 60 s.  Servers and tests need no guard:
each has its lifeline (farm/lifeline.py).  What is of our Ray, farm/family.py knows.

The guard holds one end of a pipe; its end of file is the news.  Whatever was started meanwhile carries our mark in its
environment, and setproctitle, with which Ray names its agents, is told to leave that alone.

Standard library only: the guard is this very file, run by path in isolated mode.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # run by path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import contextlib
import functools
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator

from farm.family import Process, carriers, kill
from farm.supervisor import line_of

MARK = "FARM_DRIVER"  # environment variable: what one driver's own Ray consists of carries the same value
GRACE_S = 1.5  # for what ends by itself, as after an orderly shutdown of Ray
SWEEP_S = 10.0  # after this long a process that outlives KILL is left to the kernel


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """What is started inside, and carries our environment, ends with this block or with this process.

    Leaves when nothing of it is left, or after GRACE_S + SWEEP_S.
    """
    mark = uuid.uuid4().hex
    theirs, ours = os.pipe()
    needed = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    before = {name: os.environ.get(name) for name in (MARK, "SPT_NOENV")}
    guard = subprocess.Popen([sys.executable, "-I", "-S", os.path.abspath(__file__), str(theirs), mark,
                              json.dumps(line_of(os.getpid()))], cwd="/", env=needed,
                             pass_fds=[theirs], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL)
    os.close(theirs)
    os.environ |= {MARK: mark, "SPT_NOENV": "1"}
    try:
        yield
    finally:
        os.close(ours)
        for name, value in before.items():
            _restore(name, value)
        with contextlib.suppress(subprocess.TimeoutExpired):
            guard.wait(timeout=GRACE_S + SWEEP_S + 2.0)


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _watch(fd: int, mark: str, driver: list[Process]) -> None:
    """`driver`: the process that started us, then its ancestors up to init."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends our driver so will see us leave after it
    while os.read(fd, 4096):
        continue
    began = time.monotonic()
    # Not all that is below them: a lifeline's supervisor is still at work, and has another mark.
    ours = functools.partial(carriers, MARK, mark, since=driver[0][1], ancestors=driver)
    while (left := ours()) and time.monotonic() < began + GRACE_S + SWEEP_S:
        if time.monotonic() > began + GRACE_S:
            for process in left:
                kill(process)
        time.sleep(0.05)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2], [(pid, began) for pid, began in json.loads(sys.argv[3])])
