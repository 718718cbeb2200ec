"""The machines of a cluster: which are there, and which have gone.

Ray's own word comes late.  Measured on 2.60: a raylet that `kill -9` ended stays in `ray.nodes()` for 14 s, and its
workers run on, orphans that even `ray.kill` no longer reaches.  Its port refuses at once, so this asks there too.  A node
that does not answer at all (no power, no network) is left to Ray's health check, which has the patience for a slow one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

CONNECT_S = 2.0
_AT_ONCE = 16  # nodes that are asked side by side


@dataclass(frozen=True)
class Node:
    """One machine as Ray lists it; a raylet that is started again is another node."""

    id: str
    host: str
    address: str
    port: int  # of its raylet
    gpus: int
    cpus: float
    object_store_bytes: int = 0  # that its object store may take at most

    def __str__(self) -> str:
        return f"{self.host} ({self.address}, node {self.id[:8]})"


def listed() -> list[Node]:
    """The nodes that Ray holds for alive.  May wait for as long as Ray's control store does not answer."""
    return [
        Node(n["NodeID"], n["NodeManagerHostname"], n["NodeManagerAddress"], int(n["NodeManagerPort"]),
             int(n["Resources"].get("GPU", 0)), float(n["Resources"].get("CPU", 0)),
             int(n["Resources"].get("object_store_memory", 0)))
        for n in ray.nodes() if n["Alive"]]


def refuses(node: Node) -> bool:
    """Whether nothing listens on the node's port any more, on a machine that says so itself."""
    try:
        socket.create_connection((node.address, node.port), timeout=CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Census:
    """Who is there, pass by pass.  A node that has gone does not come back: Ray would give it another id.

    A refusal counts only from a node that has answered before; a firewall refuses from the beginning.
    """

    def __init__(self, refuses: Callable[[Node], bool] = refuses) -> None:
        self._refuses = refuses
        self._answered: set[str] = set()
        self._gone: set[str] = set()

    def taken(self, found: Sequence[Node]) -> dict[str, Node]:
        """{id: node} of those that Ray lists and that have not gone."""
        asked = [node for node in found if node.id not in self._gone]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            refused = {node.id for node, no in zip(asked, pool.map(self._refuses, asked), strict=True) if no}
        self._gone |= refused & self._answered
        present = {node.id: node for node in asked if node.id not in self._gone}
        self._answered |= set(present) - refused
        return present


class NodeWatch:
    """Keeps the census of a cluster.  Two threads: Ray's control store may not answer for long, or never again, and the
    nodes that are known must be asked nonetheless."""

    def __init__(self, own: str, every_s: float, listed: Callable[[], list[Node]] = listed,
                 census: Census | None = None) -> None:
        """`own`: id of the node that this process is attached to."""
        self._own, self._every_s, self._list, self._census = own, every_s, listed, census or Census()
        self._found: list[Node] = []
        self._present: Mapping[str, Node] = {}
        self._asked = self._answered = self._served = 0  # how many looks were asked for, listed, and taken into a census
        self._own_seen = self._closing = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=loop, name=loop.__name__, daemon=True) for loop in (self._lister, self._taker)]

    def __enter__(self) -> NodeWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=3)  # one that Ray does not answer ends with the process

    @property
    def present(self) -> Mapping[str, Node]:
        """{id: node} as of the last census."""
        return self._present

    @property
    def own_gone(self) -> bool:
        """Whether the node that this process is attached to was there and has gone: then Ray ends all its actors."""
        return self._own_seen and self._own not in self._present

    def look(self, timeout_s: float) -> bool:
        """Take a census now and wait for it; False where Ray does not answer in time."""
        with self._changed:
            self._asked += 1
            ticket = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._served >= ticket, timeout_s)

    def _lister(self) -> None:
        serving = -1
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda last=serving: self._closing or self._asked > last,
                                       0 if serving < 0 else self._every_s)
                serving = self._asked
            try:
                found = self._list()
            except (RayError, OSError):  # Ray's control store is away: what was known stands
                continue
            with self._changed:
                self._found, self._answered = found, serving
                self._changed.notify_all()

    def _taker(self) -> None:
        while not self._closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._answered > self._served, self._every_s)
                found, serving = self._found, self._answered
            present = self._census.taken(found)
            with self._changed:
                self._present, self._served = present, serving
                self._own_seen = self._own_seen or self._own in present
                self._changed.notify_all()
