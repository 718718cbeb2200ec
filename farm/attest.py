"""Proof, from the process table, of what a server's processes really run.

Nothing here trusts what was ordered: the memory maps say whose compiled code is loaded, the environment
block which card and which caches a process was given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from farm.childenv import TIES
from farm.errors import InvalidMeasurement
from farm.records import Reason

_TORCH = f"{os.sep}torch{os.sep}lib"  # where every build of torch keeps its libraries


def attest_tree(tree: Path, pids: Iterable[int], advice: str) -> None:
    """Prove that the server's processes run the tree's own package.

    Compiled extensions are found through the package's path, as its Python files are, so whoever
    maps the tree's has imported the tree's.  Raises InvalidMeasurement (wrong-tree), which ends in `advice`.
    """
    names = {path.name for path in (tree / "vllm").rglob("*.so")}
    ours: set[str] = set()
    strange: set[str] = set()
    for path in _mapped(pids):
        if path.startswith(_packages(tree)):
            ours.add(path)
        elif os.path.basename(path) in names and f"{os.sep}vllm{os.sep}" in path:
            strange.add(path)
    if strange or not ours:
        found = f"it maps {min(strange)}" if strange else "none of its processes maps an extension of that tree"
        raise InvalidMeasurement(f"the server does not run the tree {tree}: {found}; {advice}", reason=Reason.WRONG_TREE)


def loaded(tree: Path, pids: Iterable[int]) -> list[int]:
    """Those of the processes that map a compiled extension of the tree."""
    return [pid for pid in pids if any(path.startswith(_packages(tree)) for path in _mapped([pid]))]


def attest_torch(torch: Path, pids: Iterable[int], advice: str) -> None:
    """Prove that the processes run the torch in folder `torch`: with another one, they run another interpreter.

    A tree on PYTHONPATH is imported by any interpreter, so its extensions alone do not show whose packages it met.
    Raises InvalidMeasurement (wrong-tree), which ends in `advice`.
    """
    own = {os.path.realpath(path) for path in torch.glob("lib/*")}  # an installer may have linked single files
    loaded = {path for path in _mapped(pids) if os.path.dirname(path).endswith(_TORCH)}
    strange = sorted(loaded - own)
    if strange or not loaded:
        found = f"it maps {strange[0]}" if strange else "none of its processes maps a library of torch"
        raise InvalidMeasurement(f"the server does not run the pin's environment, whose torch is in {torch}: {found}; {advice}",
                                 reason=Reason.WRONG_TREE)


def attest_ties(found: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Prove that a process, by its environment `found`, keeps to the card and the caches that it was given.

    Raises InvalidMeasurement (bad-config).
    """
    for name in TIES:
        if name in given and found.get(name) != given[name]:
            now = "takes it away" if name not in found else f"sets it to {found[name] or 'nothing'!r}"
            raise InvalidMeasurement(
                f"the server was given {name}={given[name]}, but its start script {now}: it would use another card, or "
                f"compiled code that other trees share; let the script keep a value that is there: {name}=${{{name}-…}}",
                reason=Reason.BAD_CONFIG)


def command(pid: int) -> tuple[str, ...]:
    """The command line of a process; empty where it has ended, is a kernel thread or another user's secret."""
    try:
        return tuple(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ()


def parents(pids: Iterable[int]) -> dict[int, int]:
    """Process id -> its parent's, of those that are there."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found[pid] = psutil.Process(pid).ppid()
    return found


def environment(pid: int) -> dict[str, str]:
    """What a process was given for an environment when its program started.  Raises InvalidMeasurement where that is hidden."""
    try:
        return psutil.Process(pid).environ()
    except psutil.Error as error:
        raise InvalidMeasurement(f"the environment of the server's process {pid} cannot be read ({error}), so nothing shows "
                                 "which card and caches it uses", reason=Reason.BAD_CONFIG) from error


def _packages(tree: Path) -> tuple[str, ...]:
    """How paths of the tree's package begin: resolved, or in a sandbox as they were shown to it."""
    return tuple(f"{place / 'vllm'}{os.sep}" for place in (tree.resolve(), tree.absolute()))


def _mapped(pids: Iterable[int]) -> set[str]:
    """The shared objects that these processes map."""
    found: set[str] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # ended meanwhile
            continue
        found |= {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6 and ".so" in fields[5]}
    return found
