"""Memory of a host that boots take beside their cards: how much a cell takes, how much there is, and who may begin.

A CPU tier for offloaded blocks is all taken at once when its server boots, 12 GiB in profile `offload`: where several
cards share a host, several tiers do.  vLLM keeps a tier in /dev/shm, which is bounded by its own size and by the host's
memory (a container's limit included); Ray's object store may take its share of both.  So cells are let in by a ledger:
those that do not fit beside what runs already wait, and a cell that could never fit does not begin.

Not seen: what a server takes beside its tier, and what others take once a run has begun: another farm's tier counts as
taken if it is there when the card's desk opens.  Ray nodes of one host share one entry as long as they see the same
/dev/shm; in containers of their own each believes the host's memory to be its own.  In a sandbox (`isolation: bwrap`) a
server has a /dev/shm of its own, so there the tier counts against memory alone.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from farm.tiers import GIB, NOTHING, Claim

SHM = Path("/dev/shm")
# Ray ends workers from 95 % of memory in use on (its RAY_memory_usage_threshold): a tier must not bring a host there.
KEPT_FREE = 0.05
NAMED = 4  # cells that one sentence names


@dataclass(frozen=True)
class Room:
    """A machine's memory in bytes, as a process there sees it: what there is, and how much of it can be had now."""

    machine: str  # the same for processes that share a /dev/shm
    host: str
    memory_bytes: int
    memory_free_bytes: int
    shm_bytes: int
    shm_free_bytes: int


@dataclass(frozen=True)
class Host:
    """Where a card is: its Ray node, what that node's object store may take, and the room on its machine."""

    node: str
    object_store_bytes: int
    room: Room


@dataclass(frozen=True)
class Shortage:
    """Why a machine never has enough; `passing`: it would have, if others had not taken it before the run began."""

    words: str
    passing: bool


# --- what there is --------------------------------------------------------------------------------


def room(shm: Path = SHM, control_groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Room:
    """Of the machine that this process is on, now.  The paths are parameters for the tests."""
    seen = psutil.virtual_memory()
    total, free = seen.total, seen.available
    for limit, left in _limits(control_groups, own):
        total, free = min(total, limit), min(free, left)
    disk, device = (shutil.disk_usage(shm), os.stat(shm).st_dev) if shm.is_dir() else (None, 0)
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text(encoding="ascii").strip() if boot.is_file() else socket.gethostname()
    return Room(f"{machine}/{device}", socket.gethostname(), total, max(0, free), disk.total if disk else 0,
                disk.free if disk else 0)


def _limits(root: Path, own: Path) -> list[tuple[int, int]]:
    """(limit, what is left of it) in bytes of every control group that this process is in, both versions."""
    lines = own.read_text(encoding="utf-8").splitlines() if own.is_file() else []
    found = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file ")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
        else:
            continue
        inner = base / path.lstrip("/")
        # A container may have a path in its own name that is not below the root that it sees: what is there counts.
        for folder in (inner, *(up for up in inner.parents if up == base or base in up.parents)):
            with suppress(OSError, ValueError):  # "max", and the root of version 2, which has no such files
                limit, used = (int((folder / name).read_text(encoding="ascii")) for name in names[:2])
                found.append((limit, limit - used + _reclaimable(folder, names[2])))
    return found


def _reclaimable(folder: Path, field: str) -> int:
    """Bytes of the page cache that the kernel gives back at need."""
    with suppress(OSError):
        for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1])
    return 0


# --- who may begin --------------------------------------------------------------------------------


class Ledger:
    """Who has what of which machine's memory.  Pure.  A card that never said where it is has room without end."""

    def __init__(self) -> None:
        self._hosts: dict[str, Host] = {}  # by card
        self._rooms: dict[str, Room] = {}  # by machine
        self._stores: dict[str, dict[str, int]] = {}  # by machine, then node
        self._taken: dict[str, dict[str, Claim]] = {}  # by machine, then cell

    def join(self, card: str, host: Host) -> None:
        """Take in a card's host.  What its machine has free counts as it was while nothing of ours ran there, at best: a
        desk may open again while the servers of the one before still end."""
        machine = host.room.machine
        self._hosts[card] = host
        self._stores.setdefault(machine, {})[host.node] = host.object_store_bytes
        before = self._rooms.get(machine, host.room)
        if not self._taken.setdefault(machine, {}):
            self._rooms[machine] = replace(
                host.room, memory_free_bytes=max(before.memory_free_bytes, host.room.memory_free_bytes),
                shm_free_bytes=max(before.shm_free_bytes, host.room.shm_free_bytes))

    def never(self, card: str, claim: Claim) -> Shortage | None:
        """Why the machine of this card cannot hold a claim even when nothing of ours runs; None: it can."""
        if claim == NOTHING or (machine := self._machine(card)) is None:
            return None
        for kind in self._kinds(machine, claim):
            if kind.wanted > kind.free:
                passing = kind.wanted <= kind.most
                has = (f"had {_gib(kind.free)} of its {_gib(kind.most)} free when the run began" if passing
                       else f"has {_gib(kind.most)}")
                return Shortage(f"needs {_gib(kind.wanted)} of {kind.what} for its CPU tier, host "
                                f"{self._rooms[machine].host} {has} ({kind.reckoned})", passing)
        return None

    def admits(self, card: str, claim: Claim) -> bool:
        """Whether a claim fits beside what has been let in."""
        return claim == NOTHING or (machine := self._machine(card)) is None or not self._exceeded(machine, claim)

    def admit(self, card: str, cell: str, claim: Claim) -> None:
        """Let a cell in, whose claim is the machine's until `release`."""
        if claim != NOTHING and (machine := self._machine(card)) is not None:
            self._taken[machine][cell] = claim

    def anew(self) -> Ledger:
        """Another one with the same machines, where nobody has been let in."""
        other = Ledger()
        other._hosts, other._rooms = dict(self._hosts), dict(self._rooms)
        other._stores = {machine: dict(stores) for machine, stores in self._stores.items()}
        other._taken = {machine: {} for machine in self._taken}
        return other

    def release(self, cell: str) -> None:
        for taken in self._taken.values():
            taken.pop(cell, None)

    def machine(self, card: str) -> str:
        """What the cards of one machine have in common; empty where nobody said."""
        return self._machine(card) or ""

    def waits(self, card: str, waiting: Mapping[str, Claim]) -> str:
        """A sentence: which cells wait on the machine of this card, for which others, and for want of what."""
        machine = self._hosts[card].room.machine
        short = {kind.what: kind for claim in waiting.values() for kind in self._exceeded(machine, claim)}
        has = " and ".join(f"{_gib(kind.free)} of {kind.what} ({kind.reckoned})" for kind in short.values())
        return (f"fewer cells with a CPU tier at a time: {_listed(waiting)} wait for {_listed(self._taken[machine])} to end; "
                f"tiers can have {has} on host {self._rooms[machine].host}")

    def _exceeded(self, machine: str, claim: Claim) -> list[_Kind]:
        """The kinds of memory of which a claim would take more than is left beside what has been let in."""
        taken = self._taken[machine].values()
        beside = Claim(claim.memory_bytes + sum(c.memory_bytes for c in taken),
                       claim.shm_bytes + sum(c.shm_bytes for c in taken) if claim.shm_bytes else 0)
        return [kind for kind in self._kinds(machine, beside) if kind.wanted > kind.free]

    def _machine(self, card: str) -> str | None:
        host = self._hosts.get(card)
        return None if host is None else host.room.machine

    def _kinds(self, machine: str, claim: Claim) -> list[_Kind]:
        """Of what is claimed."""
        room, stores = self._rooms[machine], sum(self._stores[machine].values())
        kept, less = int(KEPT_FREE * room.memory_bytes), f"{_gib(stores)} for Ray's object store"
        kinds = [
            _Kind("/dev/shm", claim.shm_bytes, room.shm_bytes - stores, room.shm_free_bytes - stores, f"{less} taken off"),
            _Kind("memory", claim.memory_bytes, room.memory_bytes - stores - kept, room.memory_free_bytes - stores - kept,
                  f"{less} and {_gib(kept)} to stay free taken off")]
        return [kind for kind in kinds if kind.wanted]


@dataclass(frozen=True)
class _Kind:
    """A kind of memory: bytes wanted, what tiers can have of it at most and now, and what was taken off for that."""

    what: str
    wanted: int
    most: int
    free: int
    reckoned: str


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{max(0, size) / 2**20:.0f} MiB"


def _listed(claims: Mapping[str, Claim]) -> str:
    named = [f"{cell} ({_gib(claim.memory_bytes)})" for cell, claim in list(claims.items())[:NAMED]]
    return ", ".join(named) + (f" and {len(claims) - NAMED} more" if len(claims) > NAMED else "")
