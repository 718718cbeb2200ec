"""The supervisor of a child process tree (farm.lifeline), and what it asks of the process table.

Standard library only, and nothing of the farm: the supervisor is this very file, run by path in isolated mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

MARK = "FARM_LIFELINE"  # environment variable: every process of one tree carries the same value
RUN_MARK, CELL_MARK = "FARM_RUN", "FARM_CELL"  # set by the caller; the supervisor carries them too
GRACE_S = 3.0  # from TERM to KILL where the caller gave no other
CROWD, CROWD_PER_CORE = 2048, 32  # threads among them, where the kernel counts: pools of a server have one for each core
LOOK_S = 0.2  # how often a sandbox is asked how many processes it holds; that takes 0.1 ms
STUBBORN_S = 10.0  # after KILL, how long to wait for the kernel before a process counts as left
REGIONS = "/dev/shm/vllm_offload_"  # vLLM's memory for offloaded blocks: a file of its own per engine
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38  # linux/prctl.h


# --- the process table ----------------------------------------------------------------------


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    """A look at a process that may have ended, or is not ours to look at: the block is left.  That we can open no more files
    says nothing of the process, and is raised: a farm that lives would be taken for one that has ended."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise


def parents() -> dict[int, int]:
    """pid -> parent pid, of everything that runs."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with _if_there():
                line = Path("/proc", entry, "stat").read_bytes()
                found[int(entry)] = int(line.rpartition(b")")[2].split()[1])  # the name may hold anything
    return found


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, zombies included, parents before their children."""
    children: dict[int, list[int]] = {}
    for child, parent in parents().items():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for known in found:
        found.extend(children.get(known, ()))
    return found[1:]


def carrying(name: str, value: str) -> list[int]:
    """Other processes that were started with this environment variable, those that are ending left out."""
    wanted = f"{name}={value}".encode()
    found = []
    for pid in parents():
        with _if_there():
            if pid != os.getpid() and wanted in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since the machine's boot; None where it has ended.  With it a process id means
    one process for ever: ids are used again."""
    with _if_there():
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        # One whose first thread alone has ended reads as a zombie too, but still counts its threads (proc_pid_stat(5)).
        return None if fields[0] in b"ZX" and int(fields[17]) <= 1 else int(fields[19])
    return None


def world() -> str:
    """What process ids and start times mean something in: this start of the machine, and its pid namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/pid')}"


def line_of(pid: int) -> list[tuple[int, int]]:
    """A process and all that it descends from, each as (pid, start time)."""
    above, found = parents(), []
    while pid and len(found) < 1000 and (began := started(pid)) is not None:
        found.append((pid, began))
        pid = above.get(pid, 0)
    return found


def crowd() -> int:
    """How many processes a sandbox may hold on this machine."""
    return CROWD + CROWD_PER_CORE * (os.cpu_count() or 1)


def regions(pids: Sequence[int]) -> set[str]:
    """Files of offloaded blocks that these processes have mapped, and that are still there under their names."""
    found = set()
    for pid in pids:
        with _if_there():
            lines = Path("/proc", str(pid), "maps").read_text(encoding="utf-8", errors="replace").splitlines()
            found |= {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and fields[5].startswith(REGIONS)}
    return {path for path in found if os.path.exists(path)}


def remove_regions(paths: Iterable[str]) -> list[str]:
    """Remove files of offloaded blocks, of this user and mapped by nobody; the others are returned."""
    kept, wanted = [], set(paths)
    in_use = regions(list(parents())) if wanted else set()
    for path in sorted(wanted):
        try:
            there = os.lstat(path)
        except OSError:
            continue
        if path in in_use or there.st_uid != os.getuid() or not stat.S_ISREG(there.st_mode) or not path.startswith(REGIONS):
            kept.append(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return kept


def signal_name(number: int) -> str:
    """As kill(1) knows it; of the real-time signals the module knows two alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else str(number)


def signal_all(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


# --- the supervisor --------------------------------------------------------------------------


def _enter_child(libc: ctypes.CDLL, cores: Sequence[int], privileges: bool) -> None:
    """Runs between fork and exec; the supervisor has one thread, so Python is safe there."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not privileges:  # a sandbox sets it for what runs in it, and may be setuid itself
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a server that aborts would write its whole memory
    if cores:
        os.sched_setaffinity(0, cores)


class _Supervisor:
    """Starts one child, reports, and ends the tree; one instance, one process, one thread."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.child = 0
        self.wrapped = False
        self.most: int | None = None  # processes below the child
        self.stdout = -1  # kept only where `most` is: what is in the sandbox may have laid something else in its place
        self.ending = False
        self.kill_at = float("inf")
        self.buffer = b""
        self.record: str | None = None
        self.life: dict[str, object] = {}
        self.regions: set[str] = set()

    def tell(self, **report: object) -> None:
        with contextlib.suppress(OSError):  # the caller may be gone
            self.channel.sendall(json.dumps(report).encode() + b"\n")

    def write(self, **facts: object) -> None:
        """Write the record, whole or not at all.  A full disk does not stop a start: the record is the last line of defence."""
        self.life |= facts
        if self.record is not None:
            with contextlib.suppress(OSError):
                with open(os.open(self.record + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    json.dump(self.life, file)
                os.replace(self.record + ".new", self.record)

    def forget(self) -> None:
        if self.record is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.record)

    def start(self, order: dict, libc: ctypes.CDLL) -> None:
        self.wrapped, self.record, self.life = order["wrapped"], order["record"], order["life"]
        self.most = order["most"]
        self.write(supervisor=[os.getpid(), started(os.getpid())])
        with contextlib.ExitStack() as files:
            out = files.enter_context(open(order["stdout"], "ab"))
            self.stdout = -1 if self.most is None else os.dup(out.fileno())
            err = files.enter_context(open(order["stderr"], "ab")) if order["stderr"] else subprocess.STDOUT
            source = files.enter_context(open(order["stdin"] or os.devnull, "rb"))
            # Kept: a dropped Popen collects the child itself, and its exit status would be lost.
            self.process = subprocess.Popen(
                order["argv"], env=order["env"], cwd=order["cwd"], stdin=source, stdout=out, stderr=err,
                start_new_session=True, preexec_fn=lambda: _enter_child(libc, order["cores"], order["privileges"]),
            )
        self.child = self.process.pid
        self.write(child=[self.child, started(self.child)])

    def reap(self) -> None:
        """Collect whoever has ended: the child, and orphans that came here."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.child:
                    code = os.waitstatus_to_exitcode(status)
                    # A sandbox says like a shell what signal ended its command.
                    self.tell(status=128 - code if self.wrapped and code > 128 else code)
                    self.end(GRACE_S)

    def end(self, grace_s: float) -> None:
        """Ask everything to end; a later call can only shorten the grace."""
        self.kill_at = min(self.kill_at, time.monotonic() + grace_s)
        if not self.ending:
            self.ending = True
            below = descendants(os.getpid())
            if self.wrapped:
                below = [pid for pid in below if pid != self.child]  # it would end at once, and all in it with it
            else:
                self.regions |= regions(below)
            signal_all(below, signal.SIGTERM)

    def disperse(self) -> None:
        """End a child that holds more processes than it may: the kernel does not count root's, nor those of no namespace."""
        if self.most is None or len(os.listdir("/proc")) <= self.most or len(descendants(self.child)) <= self.most:
            return
        signal_all([self.child], signal.SIGKILL)  # and the kernel ends all that is in the sandbox with its first process
        with contextlib.suppress(OSError):
            os.write(self.stdout, f"farm: ended with all its processes, which were more than {self.most}\n".encode())
        self.end(0.0)

    def hear(self) -> bool:
        """Read the caller's orders.  False: it is gone."""
        try:
            data = self.channel.recv(65536)
        except ConnectionError:
            data = b""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if "regions" in order:
                self.regions |= set(order["regions"])
                self.write(regions=sorted(self.regions))
            if "terminate" in order:
                self.end(float(order["terminate"]))
        return bool(data)

    def run(self, wakeup: socket.socket) -> None:
        sources: list[socket.socket] = [self.channel, wakeup]
        while True:
            self.reap()
            now = time.monotonic()
            if self.ending:
                alive = descendants(os.getpid())
                if not alive or now > self.kill_at + STUBBORN_S:
                    if not alive:
                        remove_regions(self.regions)
                        self.forget()
                    self.tell(left=alive)
                    return
                if now >= self.kill_at:
                    signal_all(alive, signal.SIGKILL)
            else:
                self.disperse()
            ready, _, _ = select.select(sources, [], [], 0.02 if self.ending else LOOK_S if self.most else None)
            if wakeup in ready:
                wakeup.recv(4096)
            if self.channel in ready and not self.hear():
                sources.remove(self.channel)
                self.end(GRACE_S)


def _supervise(fd: int) -> None:
    channel = socket.socket(fileno=os.dup(fd))  # the caller's number may be one that select does not know, from 1024 on
    os.close(fd)
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
        supervisor.forget()
        supervisor.tell(failed=str(error))
        return
    supervisor.tell(pid=supervisor.child, began=started(supervisor.child), supervisor=os.getpid())
    supervisor.run(ours)


def _end_orphans() -> None:
    """Kill what a supervisor that was killed itself has left: it comes to the shim, whatever became of its environment."""
    until = time.monotonic() + STUBBORN_S
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        signal_all(left, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        time.sleep(0.02)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor_pid = os.fork()
    if supervisor_pid:
        os.close(int(sys.argv[1]))
        os.waitpid(supervisor_pid, 0)
        _end_orphans()
    else:
        _supervise(int(sys.argv[1]))
