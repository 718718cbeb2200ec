"""A port held for a start script, and who listens on it."""

import os
import socket
import subprocess
import sys
from contextlib import contextmanager

import pytest

from farm import ports
from farm.errors import BootFailure, InvalidMeasurement
from farm.records import Reason

STRANGER = "import socket, sys; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('127.0.0.1', int(sys.argv[1]))); " \
           "s.listen(); print('up', flush=True); sys.stdin.read()"


def me():
    return [os.getpid()]


@contextmanager
def listening(port, address="127.0.0.1", family=socket.AF_INET):
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen()
        yield server


def test_a_held_port_is_nobodys_and_can_be_served_on():
    with ports.held() as port:
        assert ports.reached(port, me) is None
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        with listening(port):
            assert ports.reached(port, me) == ports.Listener("127.0.0.1", port, os.getpid())
        assert ports.reached(port, me) is None


def test_the_kernel_gives_a_held_port_to_nobody_else():
    with ports.held() as port:
        given = set()
        for _ in range(300):
            with ports.held() as other, socket.socket() as any_port:
                any_port.bind(("127.0.0.1", 0))
                given |= {other, any_port.getsockname()[1]}
        assert port not in given


def test_where_the_kernel_lets_nobody_share_a_port_it_is_let_go(monkeypatch):
    monkeypatch.setattr(ports, "_can_be_served_on", lambda port: False)
    with ports.held() as port, socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_a_stranger_is_named_and_left_alone():
    with ports.held() as port:
        stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(port), "--api-key", "k3y"], stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE)
        try:
            assert stranger.stdout.readline() == b"up\n"
            with pytest.raises(BootFailure) as caught:
                ports.reached(port, me)
            assert caught.value.reason is Reason.PORT_TAKEN
            assert f"port {port}" in str(caught.value) and f"process {stranger.pid} ({sys.executable}" in str(caught.value)
            assert "k3y" not in str(caught.value)
            assert stranger.poll() is None
        finally:
            stranger.communicate(b"")
        assert stranger.returncode == 0


@pytest.mark.parametrize(
    ("address", "family", "says"),
    [("0.0.0.0", socket.AF_INET, r"listens on every address \(0.0.0.0:\d+\)"),
     ("::", socket.AF_INET6, r"listens on every address \(\[::\]:\d+\)")],
    ids=["ipv4", "ipv6"],
)
def test_a_server_that_listens_on_every_address_is_refused(address, family, says):
    with ports.held() as port, listening(port, address, family), pytest.raises(InvalidMeasurement, match=says) as caught:
        ports.reached(port, me)
    assert caught.value.reason is Reason.BAD_CONFIG
    assert "launcher.host_env" in str(caught.value)


@pytest.mark.parametrize(
    ("address", "loopback", "written"),
    [("127.0.0.1", True, "127.0.0.1:8"), ("127.0.0.2", True, "127.0.0.2:8"), ("::1", True, "[::1]:8"),
     ("::ffff:127.0.0.1", True, "[::ffff:127.0.0.1]:8"), ("0.0.0.0", False, "0.0.0.0:8"), ("::", False, "[::]:8"),
     ("10.0.0.7", False, "10.0.0.7:8"), ("fe80::1%eth0", False, "[fe80::1%eth0]:8"), ("::ffff:10.0.0.7", False,
                                                                                   "[::ffff:10.0.0.7]:8")],
)
def test_which_addresses_are_this_machines_alone(address, loopback, written):
    listener = ports.Listener(address, 8, 1)
    assert (listener.loopback, str(listener)) == (loopback, written)
