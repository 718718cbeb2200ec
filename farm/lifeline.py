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
signal) and the caller sweeps the rest by the `FARM_LIFELINE` mark that they carry.

Standard library only: the supervisor is this very file, run by path in
isolated mode.  The lifeline is lost to a caller that forks without exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
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

MARK = "FARM_LIFELINE"  # environment variable: every process of one tree carries the same value
RUN_MARK, CELL_MARK = "FARM_RUN", "FARM_CELL"  # set by the caller; the supervisor carries them too
GRACE_S = 3.0  # from TERM to KILL where the caller gave no other
STUBBORN_S = 10.0  # after KILL, how long to wait for the kernel before a process counts as left
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class ProcessesLeft(OSError):
    """Processes outlived KILL (a driver call that does not return): `pids`."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        super().__init__(f"processes {', '.join(map(str, pids))} outlived SIGKILL by {STUBBORN_S:.0f} s; "
                         "look at them with `ps -o pid,stat,wchan,args`: state D is a kernel or driver wait")


# --- the process table ----------------------------------------------------------------------


def _parents() -> dict[int, int]:
    """pid -> parent pid, of everything that runs."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                stat = Path("/proc", entry, "stat").read_bytes()
                parents[int(entry)] = int(stat.rpartition(b")")[2].split()[1])  # the name may hold anything
    return parents


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, zombies included, parents before their children."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for known in found:
        found.extend(children.get(known, ()))
    return found[1:]


def carrying(name: str, value: str) -> list[int]:
    """Other processes that were started with this environment variable, those that are ending left out."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid in _parents():
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def processes_of_run(run: str) -> list[int]:
    """Everything on this machine that was started for a run: supervisors, servers, tests, and their children."""
    return carrying(RUN_MARK, run)


def _signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


# --- the caller's side ----------------------------------------------------------------------


class Supervised:
    """A running child tree.  Also a context manager, whose end is `terminate()`.

        with Supervised.start([python, "-m", "pytest"], env=env, cwd=tree, stdout_path=log) as child:
            status = child.wait(timeout_s=600)

    `pid` is the child's process id, session and group.  May be used from several threads.
    """

    def __init__(self, shim: subprocess.Popen, channel: socket.socket, mark: str, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self.mark = mark
        self.pid = 0
        self.supervisor_pid = 0
        self._shim, self._channel = shim, channel
        self._lock = threading.Lock()
        self._buffer = b""
        self._failed: str | None = None
        self._status: int | None = None
        self._left: list[int] | None = None
        self._ended = False  # the supervisor has hung up

    @classmethod
    def start(cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: str | Path, stdout_path: str | Path,
              stderr_path: str | Path | None = None, stdin_path: str | Path | None = None,
              cores: Sequence[int] = ()) -> Supervised:
        """Start `argv` with exactly `env` (plus MARK) and return once it runs.

        Output is appended to `stdout_path`; stderr goes there too unless it has a path of its own.
        stdin is empty unless it has a path.  `cores` limits the tree to these CPUs.  Core dumps are
        off.  Raises OSError where the command cannot be started.
        """
        ours, theirs = socket.socketpair()
        mark = uuid.uuid4().hex
        needed = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        needed |= {name: env[name] for name in (RUN_MARK, CELL_MARK) if name in env}
        with theirs:
            shim = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True, cwd="/", env={**needed, MARK: mark},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        child = cls(shim, ours, mark, argv)
        # SPT_NOENV: setproctitle (vLLM names its engines with it) would wipe the environment that the marks stand in.
        order = {"argv": [str(a) for a in argv], "env": {**env, MARK: mark, "SPT_NOENV": "1"}, "cwd": str(cwd),
                 "cores": list(cores), "stdout": str(stdout_path), "stderr": None if stderr_path is None else str(stderr_path),
                 "stdin": None if stdin_path is None else str(stdin_path)}
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
        """Process ids of the child and all its descendants that are there now."""
        return [] if self._ended else descendants(self.supervisor_pid)

    def terminate(self, grace_s: float = GRACE_S) -> int:
        """End the whole tree: TERM, KILL after `grace_s` seconds, and wait until nothing is left.

        Returns the child's exit status.  Raises ProcessesLeft.  Calling it again is harmless.
        """
        with contextlib.suppress(OSError), self._lock:  # the supervisor may have finished already
            self._channel.sendall(json.dumps({"terminate": grace_s}).encode() + b"\n")
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
            with contextlib.suppress(OSError):  # another thread has closed it
                # Without the lock: a thread that waits would starve the one that wants to terminate.
                ready = bool(select.select([fd], [], [], min(wait, 0.2))[0])
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
        """The supervisor is gone without a word: kill what carries the mark."""
        deadline = time.monotonic() + STUBBORN_S
        while (pids := carrying(MARK, self.mark)) and time.monotonic() < deadline:
            _signal_all(pids, signal.SIGKILL)
            time.sleep(0.05)
        return pids


# --- the supervisor's side ------------------------------------------------------------------


def _enter_child(libc: ctypes.CDLL, cores: Sequence[int]) -> None:
    """Runs between fork and exec; the supervisor has one thread, so Python is safe there."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a server that aborts would write its whole memory
    if cores:
        os.sched_setaffinity(0, cores)


class _Supervisor:
    """Starts one child, reports, and ends the tree; one instance, one process, one thread."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.child = 0
        self.ending = False
        self.kill_at = float("inf")

    def tell(self, **report: object) -> None:
        with contextlib.suppress(OSError):  # the caller may be gone
            self.channel.sendall(json.dumps(report).encode() + b"\n")

    def start(self, order: dict, libc: ctypes.CDLL) -> None:
        with contextlib.ExitStack() as files:
            out = files.enter_context(open(order["stdout"], "ab"))
            err = files.enter_context(open(order["stderr"], "ab")) if order["stderr"] else subprocess.STDOUT
            source = files.enter_context(open(order["stdin"] or os.devnull, "rb"))
            # Kept: a dropped Popen collects the child itself, and its exit status would be lost.
            self.process = subprocess.Popen(
                order["argv"], env=order["env"], cwd=order["cwd"], stdin=source, stdout=out, stderr=err,
                start_new_session=True, preexec_fn=lambda: _enter_child(libc, order["cores"]),
            )
        self.child = self.process.pid

    def reap(self) -> None:
        """Collect whoever has ended: the child, and orphans that came here."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    self.tell(status=os.waitstatus_to_exitcode(status))
                    self.end(GRACE_S)

    def end(self, grace_s: float) -> None:
        """Ask everything to end; a later call can only shorten the grace."""
        self.kill_at = min(self.kill_at, time.monotonic() + grace_s)
        if not self.ending:
            self.ending = True
            _signal_all(descendants(os.getpid()), signal.SIGTERM)

    def hear(self) -> bool:
        """Read the caller's orders.  False: it is gone."""
        try:
            data = self.channel.recv(65536)
        except ConnectionError:
            data = b""
        for line in data.splitlines():
            self.end(float(json.loads(line)["terminate"]))
        return bool(data)

    def run(self, wakeup: socket.socket) -> None:
        sources: list[socket.socket] = [self.channel, wakeup]
        while True:
            self.reap()
            now = time.monotonic()
            if self.ending:
                alive = descendants(os.getpid())
                if not alive or now > self.kill_at + STUBBORN_S:
                    self.tell(left=alive)
                    return
                if now >= self.kill_at:
                    _signal_all(alive, signal.SIGKILL)
            ready, _, _ = select.select(sources, [], [], 0.02 if self.ending else None)
            if wakeup in ready:
                wakeup.recv(4096)
            if self.channel in ready and not self.hear():
                sources.remove(self.channel)
                self.end(GRACE_S)


def _supervise(fd: int) -> None:
    channel = socket.socket(fileno=fd)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    supervisor = _Supervisor(channel)
    # Handlers instead of SIG_IGN: a child would inherit the ignoring.
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.end(GRACE_S))
    with channel.makefile("rb") as stream:
        order = stream.readline()
    if not order:
        return  # the caller died before it had ordered anything
    try:
        supervisor.start(json.loads(order), libc)
    except (OSError, subprocess.SubprocessError) as error:
        supervisor.tell(failed=str(error))
        return
    supervisor.tell(pid=supervisor.child, supervisor=os.getpid())
    supervisor.run(ours)


if __name__ == "__main__":
    supervisor_pid = os.fork()
    if supervisor_pid:
        os.close(int(sys.argv[1]))
        os.waitpid(supervisor_pid, 0)
    else:
        _supervise(int(sys.argv[1]))
