"""A loopback port that a start script is to serve on: kept free for it, and looked at before anything is sent.

On a port anybody may listen.  Whoever does is known by process id, and is either below our supervisor or a
stranger; a stranger is named and left alone.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from farm.attest import command
from farm.childenv import redact_argv
from farm.errors import BootFailure, InvalidMeasurement
from farm.records import Reason

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Listener:
    """A TCP socket that listens; `pid` is None where its process is another user's."""

    address: str
    port: int
    pid: int | None

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"

    @property
    def loopback(self) -> bool:
        address = ipaddress.ip_address(self.address.partition("%")[0])
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@contextmanager
def held() -> Iterator[int]:
    """A port of 127.0.0.1 that the kernel picks, kept bound but not listened on while the block runs.

    Meanwhile the kernel gives the port to nobody who asks for any; but a server that asks for this one and sets
    SO_REUSEADDR, as vLLM does, can listen on it: Linux lets sockets share a port until one of them listens.  On a
    kernel that does not, the port is let go again, and is only unlikely to be taken.
    """
    with _bound(0) as ours:
        port = ours.getsockname()[1]
        if not _can_be_served_on(port):
            ours.close()
        yield port


def _bound(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((LOOPBACK, port))
    except OSError:
        made.close()
        raise
    return made


def _can_be_served_on(port: int) -> bool:
    try:
        with _bound(port) as server:
            server.listen()
    except OSError:
        return False
    return True


def listeners() -> list[Listener]:
    """Every TCP socket that listens on this machine.  Looks into all processes: tens of milliseconds."""
    return [Listener(c.laddr.ip, c.laddr.port, c.pid) for c in psutil.net_connections(kind="tcp")
            if c.status == psutil.CONN_LISTEN]


def reached(port: int, processes: Callable[[], Collection[int]]) -> Listener | None:
    """Who of `processes` listens on the port, on a loopback address; None while nobody does.

    Raises BootFailure where a stranger does, InvalidMeasurement (bad-config) where one of ours listens wider.
    """
    if not _taken(port):
        return None
    own = set(processes())
    found = [listener for listener in listeners() if listener.port == port]
    own.update(processes())  # those that were started, or ended, while we looked
    for listener in found:
        if listener.pid not in own:
            raise BootFailure(
                f"port {port}, which was allotted to this boot, is taken by {_named(listener.pid)}, which is none of its "
                "processes: it is neither asked nor ended. Run again: another port is allotted", reason=Reason.PORT_TAKEN)
        if not listener.loopback:
            every = ipaddress.ip_address(listener.address.partition("%")[0]).is_unspecified
            where = f"listens on every address ({listener})" if every else f"listens on {listener}"
            raise InvalidMeasurement(
                f"the server {where}, where others reach it; servers of the farm listen on loopback only. Let the start script "
                f"pass --host {LOOPBACK}, or name the variable in which it takes the address: launcher.host_env",
                reason=Reason.BAD_CONFIG)
    return found[0] if found else None


def _taken(port: int) -> bool:
    """Whether anybody listens on the port; asked several times a second, so without a look into processes."""
    row = re.compile(rf"^ *\d+: [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A ", re.MULTILINE)  # 0A: TCP_LISTEN
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    return any(row.search(table.read_text(encoding="ascii")) for table in tables if table.exists())


def _named(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    words = " ".join(redact_argv(command(pid)))
    return f"process {pid} ({words[:160] or 'its command line is hidden'})"
