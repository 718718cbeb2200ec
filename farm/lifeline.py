"""A child process tree that cannot outlive whoever started it.

Process model, from the outside in (Linux):

    caller ── shim ── supervisor ── child (own session and group) ── …descendants

The caller holds one end of a socket, the supervisor the other: it carries the
order to start, the reports, and, by its end of file, the news that the caller
is gone, `kill -9` included.  The supervisor is a child subreaper, so every
descendant stays below it, also one that made a session of its own; at the end
all of them get TERM, after a grace KILL, and the supervisor leaves only when
none is left.  The shim exists because Ray kills the direct children of an
actor that dies: it takes that blow, and the supervisor lives to clean up.
Should the supervisor itself be killed, the child dies with it (parent-death
signal), the shim, a subreaper too, kills what is left, and the caller what the shim did
not live to see: its family by the `FARM_LIFELINE` mark (farm.family).
Should both be killed, the next farm on this host does (farm.sweep), from the
record that the supervisor writes when it starts and removes when nothing is left.

The supervisor is farm/supervisor.py, run by path.  The lifeline is lost to a
caller that forks without exec.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from farm import supervisor
from farm.family import family, kill
from farm.supervisor import (
    CELL_MARK,
    GRACE_S,
    MARK,
    RUN_MARK,
    STUBBORN_S,
    carrying,
    crowd,
    descendants,
    line_of,
    parents,
    regions,
    remove_regions,
    started,
    world,
)

_NAMED = 20  # processes that a message names


class ProcessesLeft(OSError):
    """Processes outlived KILL (a driver call that does not return): `pids`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        more = f" and {len(pids) - _NAMED} more" if len(pids) > _NAMED else ""
        super().__init__(f"processes {', '.join(map(str, pids[:_NAMED]))}{more} outlived SIGKILL by {STUBBORN_S:.0f} s; "
                         "look at them with `ps -o pid,stat,wchan,args`: state D is a kernel or driver wait")


def processes_of_run(run: str) -> list[int]:
    """Everything on this machine that was started for a run: supervisors, servers, tests, and their children."""
    return carrying(RUN_MARK, run)




class Supervised:
    """A running child tree.  Also a context manager, whose end is `terminate()`.

        with Supervised.start([python, "-m", "pytest"], env=env, cwd=tree, stdout_path=log) as child:
            status = child.wait(timeout_s=600)

    `pid` is the child's process id, session and group.  May be used from several threads.
    """

    def __init__(self, shim: subprocess.Popen, channel: socket.socket, mark: str, argv: Sequence[str],
                 within: Sequence[str] = (), record: Path | None = None) -> None:
        self.argv = tuple(argv)
        self.mark = mark
        self.record = record
        self._within = tuple(within)
        self.pid = 0
        self.supervisor_pid = 0
        self._shim, self._channel = shim, channel
        self._since = started(shim.pid) or 0  # ours until it is waited for: its id is not given anew
        self._lock = threading.Lock()
        self._buffer = b""
        self._failed: str | None = None
        self._began: int | None = None  # start time of the child, for whom its id alone is not enough
        self._status: int | None = None
        self._left: list[int] | None = None
        self._ended = False  # the supervisor has hung up
        self._regions: set[str] = set()  # that were noted

    @classmethod
    def start(cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | Path, stdout_path: str | Path,
              stderr_path: str | Path | None = None, stdin_path: str | Path | None = None,
              cores: Sequence[int] = (), within: Sequence[str] = (), records: Path | None = None,
              may_gain_privileges: bool = False) -> Supervised:
        """Start `argv` with exactly `env` (plus MARK) and return once it runs.

        Output is appended to `stdout_path`; stderr goes there too unless it has a path of its own.
        stdin is empty unless it has a path.  `cores` limits the tree to these CPUs.  Core dumps are
        off.  `within` is the command of a sandbox in which `argv` runs (farm.isolation); at the end the
        sandbox is left alone until what is in it has had its grace, but ended at once where it holds more
        processes than farm.supervisor.crowd, with a line in its output.  `records` is the folder for the
        record that farm.sweep reads.  Unless it `may_gain_privileges`, no sudo or other setuid program
        works in the tree.  Raises OSError where the command cannot be started.
        """
        ours, theirs = socket.socketpair()
        mark = uuid.uuid4().hex
        needed = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        needed |= {name: env[name] for name in (RUN_MARK, CELL_MARK) if name in env}
        with theirs:
            shim = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(supervisor.__file__), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True, cwd="/", env={**needed, MARK: mark},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        record = None if records is None else records / f"{mark}.json"
        child = cls(shim, ours, mark, argv, within, record)
        # SPT_NOENV: setproctitle (vLLM names its engines with it) would wipe the environment that the marks stand in.
        order = {
            "argv": [str(a) for a in (*within, *argv)], "env": {**env, MARK: mark, "SPT_NOENV": "1"}, "cwd": str(cwd),
            "cores": list(cores), "wrapped": bool(within), "privileges": may_gain_privileges or bool(within),
            "most": crowd() if within else None,
            "stdout": str(stdout_path), "stderr": None if stderr_path is None else str(stderr_path),
            "stdin": None if stdin_path is None else str(stdin_path),
            "record": None if record is None else str(record), "life": _life(mark, env),
        }
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # what it did not hear, it does not answer
            ours.sendall(json.dumps(order).encode() + b"\n")
        child._listen(lambda: child.pid or child._failed, timeout_s=30.0)
        if not child.pid:
            child._close()
            raise OSError(f"cannot start {argv[0]}: {child._failed or 'its supervisor did not answer within 30 s'}")
        return child

    def poll(self) -> int | None:
        """Exit status of the child (negative: ended by that signal), None while it runs.

        A child that has ended has its descendants ended by the supervisor at once.
        """
        return self.wait(timeout_s=0.0)

    def wait(self, timeout_s: float) -> int | None:
        """Like `poll`, after waiting up to `timeout_s` seconds for the child to end."""
        self._listen(lambda: self._status is not None, timeout_s)
        if self._status is None and self._ended:
            self._status = -signal.SIGKILL  # the supervisor was killed; the child dies with it
        return self._status

    def processes(self) -> list[int]:
        """Process ids of the child and all its descendants that are there now; a sandbox's own left out."""
        if self._ended:
            return []
        if not self._within:
            return descendants(self.supervisor_pid)
        inits = [pid for pid, parent in parents().items() if parent == self.pid]
        return [pid for init in inits for pid in descendants(init)]

    @property
    def command_pid(self) -> int:
        """Process id of `argv` itself, which in a sandbox is not the child; `pid` where it has ended."""
        return self.pid if not self._within else next(iter(self.processes()), self.pid)

    def note_regions(self) -> None:
        """Record the files of offloaded blocks that the tree has mapped by now, for whoever must remove them."""
        if not self._within and (found := regions(self.processes())):  # a sandbox has a /dev/shm of its own
            self._regions |= found  # for the case that the supervisor does not live to remove them
            self._send(regions=sorted(found))

    def terminate(self, grace_s: float = GRACE_S) -> int:
        """End the whole tree: TERM, KILL after `grace_s` seconds, and wait until nothing is left.

        Returns the child's exit status.  Raises ProcessesLeft.  Calling it again is harmless.
        """
        self._send(terminate=grace_s)
        self._listen(lambda: self._left is not None, grace_s + STUBBORN_S + 5.0)
        self._close()
        if self._left is None:
            self._left = self._sweep()
        if self._left:
            raise ProcessesLeft(self._left)
        return -signal.SIGKILL if self._status is None else self._status

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *exc: object) -> None:
        self.terminate()

    def _send(self, **order: object) -> None:
        with contextlib.suppress(OSError), self._lock:  # the supervisor may have finished already
            self._channel.sendall(json.dumps(order).encode() + b"\n")

    def _listen(self, enough, timeout_s: float) -> None:
        """Read reports until `enough()`, the supervisor hangs up, or time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if enough() or self._ended:
                    return
                fd = self._channel.fileno()
            wait = max(0.0, deadline - time.monotonic())
            ready = False
            with contextlib.suppress(OSError, ValueError):  # another thread has closed it
                # Without the lock: a thread that waits would starve the one that wants to terminate.
                poll = select.poll()  # select knows no descriptor from 1024 on
                poll.register(fd, select.POLLIN)
                ready = bool(poll.poll(1000 * min(wait, 0.2)))
            if ready:
                with self._lock:
                    self._read()
            elif wait == 0.0:
                return

    def _read(self) -> None:
        if self._ended:
            return
        try:
            data = self._channel.recv(65536, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # another thread has read it
        except ConnectionError:
            data = b""
        self._ended = not data
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.pid = report.get("pid", self.pid)
            self._began = report.get("began", self._began)
            self.supervisor_pid = report.get("supervisor", self.supervisor_pid)
            self._failed = report.get("failed", self._failed)
            self._status = report.get("status", self._status)
            self._left = report.get("left", self._left)

    def _close(self) -> None:
        with self._lock:
            self._ended = True
            self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shim.wait(timeout=5.0)

    def _sweep(self) -> list[int]:
        """The supervisor is gone without a word: kill the tree's family, and wait until it is gone, memory and all.

        A process that ends has no environment any more while the kernel still takes its memory back, so those that
        were seen once are remembered.
        """
        seen = set() if self._began is None else {(self.pid, self._began)}
        us = line_of(os.getpid())
        mapped = set(self._regions)
        deadline = time.monotonic() + STUBBORN_S
        while True:
            found = family(MARK, self.mark, since=self._since, ancestors=us)
            seen |= set(found)
            left = [process for process in sorted(seen) if started(process[0]) == process[1]]
            if not left or time.monotonic() > deadline:
                break
            mapped |= set() if self._within else regions([pid for pid, _ in found])
            for process in left:
                kill(process)
            time.sleep(0.05)
        if not left:
            remove_regions(mapped)
            if self.record is not None:
                self.record.unlink(missing_ok=True)
        return [pid for pid, _ in left]


def _life(mark: str, env: Mapping[str, str]) -> dict[str, object]:
    """What a record says of who started the tree; farm.sweep reads it."""
    return {"mark": mark, "run": env.get(RUN_MARK), "cell": env.get(CELL_MARK), "world": world(),
            "owners": line_of(os.getpid())}
