"""What proves that a process wrote nothing where it should not: stat of all watched files, hashes, and its own calls."""

from __future__ import annotations

import ctypes
import hashlib
import os
import resource
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2): orphans of ours become our children
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events that change something, and which of their arguments are paths; then which is the directory they start from.
_CHANGES = {"os.mkdir": ((0,), 2), "os.remove": ((0,), 1), "os.rmdir": ((0,), 1), "os.rename": ((0, 1), 2),
            "os.link": ((1,), 3), "os.symlink": ((1,), 2), "os.chmod": ((0,), 2), "os.truncate": ((0,), None),
            "os.utime": ((0,), 3)}
MEMORY = 4 << 30  # bytes of address space; what asks for more dies instead of the machine
LARGEST = 256 << 20  # bytes of one file


def entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a directory, links not followed: path relative to it, and its stat."""
    folders = [""]
    while folders:
        at = folders.pop()
        with os.scandir(folder / at) as found:
            for entry in found:
                info = entry.stat(follow_symlinks=False)
                path = os.path.join(at, entry.name)
                if stat.S_ISDIR(info.st_mode):
                    folders.append(path)
                yield path, info


def stamps(folder: Path) -> dict[str, tuple[int, ...]]:
    """What no write leaves as it was: the time of a file's last change (ctime) cannot be set, unlike its others."""
    return {path: (s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_nlink) for path, s in entries(folder)}


def digest(folder: Path) -> str:
    """SHA-256 over names, modes, sizes and bytes."""
    total = hashlib.sha256()
    for path, info in sorted(entries(folder)):
        where = folder / path
        data = (os.fsencode(os.readlink(where)) if stat.S_ISLNK(info.st_mode) else
                where.read_bytes() if stat.S_ISREG(info.st_mode) else b"")
        total.update(f"{path!r} {info.st_mode:o} {len(data)}\n".encode() + data)
    return total.hexdigest()


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Names that came, went or changed; nothing where there are none."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return ", ".join(f"{name} {'is new' if name not in before else 'is gone' if name not in after else 'changed'}"
                     for name in names[:8])


@dataclass
class Guard:
    """An audit hook, which stays for good: notes changes outside of `allowed`, and programs that start elsewhere.

    `elsewhere` counts runs of GNU patch that keep its temporary files outside: it leaves them behind where it is killed.
    """

    allowed: tuple[str, ...]
    watching: bool = False
    seen: list[str] = field(default_factory=list)
    elsewhere: int = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event == "open":
            if isinstance(args[0], (str, bytes)) and (args[2] or 0) & _WRITES:
                self._check(event, args[0], -1)
        elif event in _CHANGES:
            paths, folder = _CHANGES[event]
            for at in paths:
                self._check(event, args[at], -1 if folder is None else args[folder])
        elif event == "subprocess.Popen":
            self._started([os.fsdecode(word) for word in args[1]], args[2], os.environ if args[3] is None else args[3])

    def _started(self, command: list[str], cwd: Any, env: Mapping[str, str]) -> None:
        if command[1:] == ["--version"]:
            return
        if cwd is None:
            self.seen.append(f"{command} started in no directory of its own")
        else:
            self._check("subprocess.Popen", cwd, -1)
        if os.path.basename(command[0]) == "patch":
            self.elsewhere += not f"{os.path.realpath(env.get('TMPDIR', '/tmp'))}/".startswith(self.allowed)

    def _check(self, event: str, path: Any, folder: Any) -> None:
        if isinstance(path, int):
            return
        path = os.fsdecode(path)
        if path == os.devnull:
            return
        if isinstance(folder, int) and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        if not f"{real}/".startswith(self.allowed):
            self.seen.append(f"{event} {real[:300]!a}")


def adopt_orphans() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def bound_memory() -> None:
    """Address space and size of files of this process and those that it starts."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def children_left() -> str:
    """Processes that were left behind; they are reaped where they have ended."""
    try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return ""
    return f"process {pid} has ended, and nobody waited for it" if pid else "a process still runs"
