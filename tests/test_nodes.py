"""Who is there, by Ray's word and by the nodes' own ports; with a Ray that answers late or never."""

import socket
import threading
import time

import pytest

from farm import nodes
from farm.nodes import Census, Node, NodeWatch

A, B = (Node(name, f"host-{name}", "127.0.0.1", port, 0, 1.0) for name, port in (("a", 1), ("b", 2)))


def test_a_refusal_counts_from_a_node_that_has_answered_before():
    silent = set()
    census = Census(lambda node: node.id in silent)
    silent.add("b")
    assert set(census.taken([A, B])) == {"a", "b"}  # a firewall, it seems
    silent.clear()
    assert set(census.taken([A, B])) == {"a", "b"}
    silent.add("b")
    assert set(census.taken([A, B])) == {"a"}
    silent.clear()
    assert set(census.taken([A, B])) == {"a"}  # what has gone does not come back
    assert set(census.taken([B])) == set()


def test_a_port_that_nobody_listens_on_refuses_and_one_that_is_slow_does_not(monkeypatch):
    monkeypatch.setattr(nodes, "CONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node("n", "h", "127.0.0.1", server.getsockname()[1], 0, 1.0)
        assert nodes.refuses(node) is False
    assert nodes.refuses(node) is True
    assert nodes.refuses(Node("n", "h", "no.such.host.invalid", 1, 0, 1.0)) is False


class PlayedRay:
    def __init__(self):
        self.there, self.hangs, self.fails = [A, B], threading.Event(), False

    def listed(self):
        if self.hangs.is_set():
            time.sleep(30)
        if self.fails:
            raise OSError("away")
        return list(self.there)


@pytest.fixture
def ray():
    return PlayedRay()


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_look_sees_what_is_there_now(ray):
    with NodeWatch("a", 60.0, ray.listed, Census(lambda node: False)) as watch:
        assert watch.look(10) and set(watch.present) == {"a", "b"} and not watch.own_gone
        ray.there = [B]
        assert watch.look(10) and set(watch.present) == {"b"} and watch.own_gone


def test_a_node_that_was_never_there_is_not_gone(ray):
    with NodeWatch("other", 60.0, ray.listed, Census(lambda node: False)) as watch:
        assert watch.look(10) and not watch.own_gone


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_nodes_are_asked_also_while_rays_control_store_is_away(ray, how):
    dead = set()
    with NodeWatch("a", 0.05, ray.listed, Census(lambda node: node.id in dead)) as watch:
        until(lambda: set(watch.present) == {"a", "b"})
        if how == "hangs":
            ray.hangs.set()
        else:
            ray.fails = True
        time.sleep(0.1)  # a listing that began before may still end well
        assert watch.look(0.2) is False and set(watch.present) == {"a", "b"}
        dead.add("b")
        until(lambda: set(watch.present) == {"a"})


def test_leaving_does_not_wait_for_a_ray_that_hangs(ray, monkeypatch):
    ray.hangs.set()
    began = time.monotonic()
    with NodeWatch("a", 0.05, ray.listed, Census(lambda node: False)):
        pass
    assert time.monotonic() - began < 10
