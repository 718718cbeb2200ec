"""A sandbox for code that nobody vouches for: a pull request's patch runs on these cards as whoever runs the farm.

Made by bubblewrap, with or without root.  Inside there is no network but the loopback of its own (a Unix socket below
a folder that is shown still reaches out), no process but its own, and of the files only the system's, read-only, what
the child needs, read-only, and a few folders to write to.  What is not named is not there: homes, results, other
trees' caches, /run, /var, other people's /tmp and /dev/shm; of /etc only what every user may read.  It has no
capability and gains none.  Process ids of the outside still name its processes there: what looks at them
(farm.attest) and ends them (farm.lifeline) sits outside.

What it takes of the machine is bounded in part: no core dumps (farm.supervisor), an eighth of memory in /tmp (from
bubblewrap 0.7 on) and half in /dev/shm, and some thousands of processes and threads (farm.supervisor.crowd) where a
user namespace makes it, from Linux 5.14 on: there the kernel counts those of this sandbox alone.  Root's it does not
count; the supervisor does, five times a second and processes alone, so better run the farm as an ordinary user.  Not
bounded are memory (a control group takes root or systemd's leave, and an address space, of which CUDA reserves
terabytes, is no measure of it) and what is written to caches and scratch.  What keeps the damage small is outside: Ray
has given its actors, and so whatever they start, an oom_score_adj of 1000, so the kernel ends these first; and the
deadlines of boots and suites end the rest, whole, with the sandbox's first process.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pynvml

from farm.bench import Card
from farm.childenv import CACHES
from farm.errors import FarmError
from farm.records import Reason
from farm.supervisor import crowd

TRY_S = 20.0  # a sandbox around nothing takes 0.02 s
_COUNTED_SINCE = (5, 14)  # Linux: RLIMIT_NPROC counts the processes of a user namespace, not of the user
_TMP_SHARE = 8  # what lies in /tmp stays in memory when its writer is killed for want of it
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/sys", "/nix",
           "/run/current-system", "/run/opengl-driver")  # the last three are of NixOS
_MASKED = {"/etc": 16, "/opt": 3}  # what not everybody may read there is hidden, down to this depth: /opt may hold whole trees
_PARTLY_SHOWN = "/opt"  # of the system's folders the one that holds models and trees: what is named below it is shown
_KNOBS = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/acpi", "/proc/fs", "/proc/scsi")  # root's own
# What CUDA opens beside the card's own; /dev/nvidia-modeset is for displays, and /dev/nvidia-caps leads to other cards' parts.
_DRIVER = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
_OF_ALL_CARDS = "/dev/dxg"  # under WSL2
_NOT_PATHS = ("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH")  # the host's own; what of them is the system's is shown anyway
_PATH = re.compile(r"(?<![\w.~-])/[\w.@+:/-]*\w")
_SPACED = re.compile(r"""(?:^|[=:"'])(/[^="'\0]* [^="'\0]*)""")  # a whole word or value, or a string of JSON
# Where there is no network, torch and vLLM would look for an address by which others reach them.
VARIABLES: Mapping[str, str] = {
    "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True)
class Sandbox:
    """Bubblewrap as it is on this machine.

    `sizes`: it can bound /tmp.  `limiter`: the command before a command that bounds its processes, empty where nothing can.
    """

    program: str
    sizes: bool = False
    limiter: tuple[str, ...] = ()

    @classmethod
    def find(cls) -> Sandbox:
        """The sandbox of this machine, tried out.  Raises FarmError (isolation-missing) with the next step."""
        program = shutil.which("bwrap")
        host = socket.gethostname()
        if program is None:
            raise FarmError(
                f"the matrix asks for isolation: bwrap, and bubblewrap is not installed on {host}: apt install bubblewrap (or "
                "dnf install bubblewrap), or trust the patches: isolation: none", reason=Reason.ISOLATION_MISSING)
        made = cls(program)
        try:
            done = _run([*made.within(), "/bin/sh", "-c", "readlink /proc/self/ns/user; exit 7"])
            said = f"status {done.returncode}: {done.stderr.strip() or 'without a word'}"
            options = _run([program, "--help"])
        except (OSError, subprocess.TimeoutExpired) as error:
            done, said = None, str(error)
        if done is None or done.returncode != 7:
            raise FarmError(
                f"the matrix asks for isolation: bwrap, and {program} cannot make a sandbox on {host} ({said}). It needs user "
                "namespaces: sysctl user.max_user_namespaces above 0, kernel.unprivileged_userns_clone=1 (Debian), an AppArmor "
                "profile for bwrap (Ubuntu from 24.04), or in a container --cap-add SYS_ADMIN; or trust the patches: "
                "isolation: none", reason=Reason.ISOLATION_MISSING)
        own_user = done.stdout.strip() not in ("", os.readlink("/proc/self/ns/user"))
        return cls(program, "--size " in options.stdout + options.stderr, _limiter() if own_user else ())

    def within(self, readable: Iterable[Path] = (), writable: Iterable[Path] = (), *, card: Card | None = None,
               cwd: Path | None = None) -> tuple[str, ...]:
        """The command before a command, which then runs in the sandbox.

        Paths are shown where they are, and all below them; of one inside the other the deeper wins.  Those that are not
        there are left out, but folders to write to are made.  Raises FarmError (isolation-missing) for a path that
        would show a whole home.
        """
        argv = [self.program, "--die-with-parent", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
                "--unshare-cgroup-try", "--hostname", "localhost", "--cap-drop", "ALL"]
        for path in _SYSTEM:
            if os.path.islink(path):
                argv += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                argv += ["--ro-bind", path, path]
        # Where the folder itself is a link, what it leads to is not shown at all.
        masked = [path for folder, depth in _MASKED.items() if not os.path.islink(folder)
                  for path in _not_for_everybody(folder, depth)]
        emptied = [path for path in masked if os.path.isdir(path)]
        for path in masked:
            argv += ["--tmpfs", path] if path in emptied else ["--ro-bind", os.devnull, path]
        argv += ["--proc", "/proc"]
        for path in filter(os.path.exists, _KNOBS):
            argv += ["--ro-bind", path, path]
        argv += ["--dev", "/dev", "--tmpfs", "/dev/shm"]
        argv += ["--size", str(_memory_bytes() // _TMP_SHARE)] if self.sizes else []
        argv += ["--tmpfs", "/tmp", "--dir", "/var/tmp"]
        for device in _devices(card):
            argv += ["--dev-bind-try", device, device]
        shown = {Path(os.path.abspath(path)): "--ro-bind" for path in readable}
        for path in writable:
            if not path.exists():
                path.mkdir(parents=True)
            shown[Path(os.path.abspath(path))] = "--bind"
        for path, how in sorted(shown.items(), key=lambda item: len(item[0].parts)):
            hidden = any(path.is_relative_to(other) or (Path(other).is_relative_to(path) and str(path) not in _MASKED)
                         for other in masked)
            if path.exists() and (hidden or how == "--bind" or not _of_system(path)):
                _refuse_wide(path)
                argv += [how, str(path), str(path)]
        whole = [path for path in shown if str(path) not in _MASKED]
        still = [path for path in emptied if not any(Path(path).is_relative_to(other) for other in whole)]
        for path in (*still, "/dev", "/"):  # not what is shown in a hidden one's place: that may be to write to
            argv += ["--remount-ro", path]
        if cwd is not None:
            argv += ["--chdir", os.path.abspath(cwd)]
        return (*argv, "--", *self.limiter)

    def for_tree(self, python: Path, readable: Iterable[Path | None], writable: Iterable[Path],
                 environment: Mapping[str, str], *, card: Card | None, cwd: Path,
                 words: Iterable[str] = ()) -> tuple[str, ...]:
        """`within` for a program of this interpreter, in an environment of farm.childenv whose caches it may write to.

        Also shown are the paths that its environment, and the words of its command line, name.
        """
        caches = [Path(environment[name]) for name in CACHES if name in environment]
        told = [value for name, value in environment.items() if name not in CACHES and name not in _NOT_PATHS]
        return self.within([*interpreter(python), *named([*words, *told]), *(path for path in readable if path is not None)],
                           [*caches, *writable], card=card, cwd=cwd)


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=TRY_S, stdin=subprocess.DEVNULL, check=False)


def _limiter() -> tuple[str, ...]:
    program, version = shutil.which("prlimit", path="/usr/bin:/bin"), re.match(r"(\d+)\.(\d+)", platform.release())
    if program is None or version is None or tuple(map(int, version.groups())) < _COUNTED_SINCE:
        return ()
    allowed = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = crowd() if allowed == resource.RLIM_INFINITY else min(crowd(), allowed)
    return program, f"--nproc={most}:{most}"


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def interpreter(python: Path) -> list[Path]:
    """What an interpreter needs to start: its own prefix, and that of each one that its links and its environment name."""
    found: dict[Path, None] = {}
    path = Path(os.path.abspath(python))
    for _ in range(20):  # more links make no chain but a loop
        found[path.parent.parent] = None
        with suppress(OSError):
            for line in (path.parent.parent / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").splitlines():
                name, _, value = line.partition("=")
                if name.strip() == "home" and value.strip():
                    found[Path(value.strip()).parent] = None
        if not path.is_symlink():
            break
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
    found[Path(os.path.realpath(python)).parent.parent] = None
    return list(found)


def named(words: Iterable[str]) -> list[Path]:
    """The paths that words of a command line or an environment name, alone or inside JSON, and that are there.

    One that would show a whole home, and the root, are left out.
    """
    found = {Path(os.path.normpath(said)) for word in words for how in (_PATH, _SPACED) for said in _said(how, word)}
    return sorted(path for path in found if os.path.exists(path) and not _is_wide(path) and
                  (not _of_system(path) or Path(_PARTLY_SHOWN) in path.parents) and
                  not path.is_relative_to("/proc") and not path.is_relative_to("/dev"))


def _said(how: re.Pattern[str], word: str) -> Iterator[str]:
    for match in how.finditer(word):
        yield match.group(how.groups)


def _not_for_everybody(folder: str, depth: int) -> Iterator[str]:
    """What is below a folder that not every user may read: whoever runs the farm may be root."""
    entries: list[os.DirEntry[str]] = []
    with suppress(OSError), os.scandir(folder) as found:
        entries = sorted(found, key=lambda e: e.name)
    for entry in entries:
        with suppress(FileNotFoundError):  # it alone is gone meanwhile; what comes after it is not
            if entry.is_symlink():
                continue
            if not entry.stat(follow_symlinks=False).st_mode & stat.S_IROTH:
                yield entry.path
            elif depth > 1 and entry.is_dir(follow_symlinks=False):
                yield from _not_for_everybody(entry.path, depth - 1)


def _of_system(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _SYSTEM)


def _homes() -> set[Path]:
    return {Path(os.path.expanduser("~")), *map(Path, ("/root", "/home", "/tmp", "/var", "/run", "/dev/shm"))}


def _is_wide(path: Path) -> bool:
    return any(home.is_relative_to(path) for home in _homes())


def _refuse_wide(path: Path) -> None:
    if _is_wide(path):
        raise FarmError(f"a sandbox would have to show all of {path}, where homes or other people's files lie; move what is "
                        "needed into a folder below it", reason=Reason.ISOLATION_MISSING)


def _devices(card: Card | None) -> tuple[str, ...]:
    """The device files of the card alone, and the driver's common ones; under WSL2 all cards have one."""
    if card is None or card.kind != "cuda":
        return ()
    if card.facts.get("platform") == "WSL2":
        return (_OF_ALL_CARDS,)
    try:
        pynvml.nvmlInit()
        try:
            minor = pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByUUID(card.uuid.encode()))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise FarmError(f"{card.name}: NVML does not say which device file is the card's ({error}), so no sandbox can be made "
                        "for it; try nvidia-smi -q", reason=Reason.ISOLATION_MISSING) from error
    return (f"/dev/nvidia{minor}", *_DRIVER)
