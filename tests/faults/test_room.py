"""Three raylets on one machine as three nodes, each with its own card and cache; one dies, one joins, all die."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import ray
import roomfarm
from fake_wheels import write_wheel
from ray.cluster_utils import Cluster

from farm import dispatch
from farm.lifeline import processes_of_run
from farm.pins import Pin, PinStore
from farm.records import Outcome, Reason, Verdict
from farm.seats import Patience
from farm.series import PatchFile
from farm.trees import TreeStore

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(400)]
PATCH = PatchFile("two.patch", b"--- a/v1/pool.py\n+++ b/v1/pool.py\n@@ -2,3 +2,3 @@\n x1 = 1\n-x2 = 2\n+x2 = 'two'\n x3 = 3\n")


class Machines:
    """A head that runs nothing, and nodes by `ray start`, each with a name and a cache in the environment it starts in."""

    def __init__(self, folder):
        self.folder, self.nodes = folder, {}
        self.cluster = Cluster(initialize_head=True, head_node_args={
            "num_cpus": 0, "object_store_memory": 100 * 2**20, "include_dashboard": False})
        self.address = self.cluster.address

    def add(self, *names, caches=None):
        """Start nodes, one after the other: Ray gives a raylet 30 s to register, however busy the machine is."""
        for name in names:
            env = os.environ | {"FARM_NODE": name, "FARM_CACHE": str(self.folder / f"cache-{(caches or {}).get(name, name)}")}
            for _ in range(3):
                with (self.folder / f"node-{name}.log").open("w+") as log:
                    self.nodes[name] = node = subprocess.Popen(
                        [Path(sys.executable).with_name("ray"), "start", f"--address={self.address}", "--num-cpus=1", "--block",
                         f"--object-store-memory={100 * 2**20}", "--disable-usage-stats"], env=env, stdout=log, stderr=log)
                log = Path(log.name)
                roomfarm.wait_for(lambda: node.poll() is not None or "Ray runtime started" in log.read_text(), 90,  # noqa: B023
                                  f"node {name} did not start")
                if node.poll() is None:
                    break

    def raylet(self, name):
        below = psutil.Process(self.nodes[name].pid).children(recursive=True)
        return next((p for p in below if p.name() == "raylet"), None)

    def kill(self, name):
        """`kill -9` of a node's raylet; returns the time, and the actor processes that were below it."""
        raylet = self.raylet(name)
        actors = [p for p in raylet.children() if p.name().startswith("ray::Bare")]
        raylet.kill()
        return time.time(), actors

    def close(self):
        below = [(p.pid, p.create_time()) for node in self.nodes.values() if node.poll() is None
                 for p in psutil.Process(node.pid).children(recursive=True)]
        for node in self.nodes.values():
            node.terminate()
        for node in self.nodes.values():
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
        for pid, started in below:
            roomfarm.end(pid, started)
        self.cluster.shutdown()


@pytest.fixture
def machines(tmp_path, monkeypatch):
    roomfarm.by_value()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setattr(dispatch, "Worker", roomfarm.Bare)
    made = Machines(tmp_path)
    try:
        yield made
    finally:
        made.close()


def gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_node_that_dies_takes_only_its_cells_in_flight_and_one_that_joins_gets_work(machines, tmp_path):
    room = roomfarm.Room(tmp_path)
    cells, gate = room.cells(24, 1.5, child=True), tmp_path / "gate"
    cells[-4:] = [replace(c, job=replace(c.job, gate=str(gate))) for c in cells[-4:]]  # until the node that joins has work
    machines.add(*"abc")
    struck = []

    def strike():
        roomfarm.wait_for(lambda: {s["node"] for s in room.said()} == set("abc"), 120, "it did not spread")
        count = len([s for s in room.said() if s["node"] == "b"])
        roomfarm.wait_for(lambda: len([s for s in room.said() if s["node"] == "b"]) > count, 60, "b got no other cell")
        struck.extend(machines.kill("b"))
        roomfarm.wait_for(lambda: room.heard.when("node-died"), 60, "nobody noticed")
        machines.add("d")
        roomfarm.wait_for(lambda: "d" in {s["node"] for s in room.said()}, 90, "d got no work")
        gate.touch()

    thread = threading.Thread(target=strike, daemon=True)
    with dispatch.attached(machines.address):
        thread.start()
        outcomes = room.go(cells, slots=1, attempts=2)
        thread.join(60)
        roomfarm.wait_for(lambda: all(map(gone, struck[1])), 15, "the actor of the dead node lives on")
    at, actors = struck
    said, rows, cards = room.said(), room.rows(), room.rows("cards")
    work = Counter(s["node"] for s in said)
    print(f"\nkill -9 of a raylet: noticed after {room.heard.when('node-died') - at:.2f} s; cells begun by node: {dict(work)}; "
          f"{len(cells)} cells, {len(rows)} attempts; events of cards: {[(c['event'], c['card_name']) for c in cards]}")
    room.one_verdict_each(cells, outcomes)
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    lost = [r for r in rows if r["verdict"] == "ERROR"]
    assert [(r["reason"], r["attempt"], r["final"]) for r in lost] == [("node-died", 1, False)]
    assert len(rows) == len(cells) + 1  # nothing else ran again
    again = next(s for s in said if s["cell"] == lost[0]["cell"] and s["attempt"] == 2)
    assert again["node"] != "b"
    assert set(work) == set("abcd") and len({s["card"] for s in said}) == 4
    assert {(s["node"], s["cache"]) for s in said} == {(n, str(tmp_path / f"cache-{n}")) for n in "abcd"}
    assert [c["event"] for c in cards] == ["ready"] * 3 + ["lost", "joined"]
    assert cards[3]["card"] == lost[0]["card"] and "died or left the cluster" in cards[3]["detail"]
    assert len(actors) == 1
    roomfarm.wait_for(lambda: not processes_of_run(room.run), 15, "orphans")


def test_a_node_that_falls_silent_is_given_up_and_ends_its_actor_when_it_wakes(machines, tmp_path):
    """Its raylet is stopped: the port still takes connections, as a box does that hangs; Ray's health check decides."""
    room = roomfarm.Room(tmp_path)
    machines.add(*"ab")
    struck = []

    def strike():
        roomfarm.wait_for(lambda: {s["node"] for s in room.said()} == set("ab"), 120, "it did not spread")
        raylet = machines.raylet("b")
        struck.extend((time.time(), raylet, [p for p in raylet.children() if p.name().startswith("ray::Bare")]))
        raylet.suspend()

    cells = [roomfarm.Cell(**{**vars(c), "job": replace(c.job, slow_on="b")}) for c in room.cells(4, 2.0)]
    threading.Thread(target=strike, daemon=True).start()
    with dispatch.attached(machines.address):
        try:
            outcomes = room.go(cells, slots=1, attempts=2)
        finally:
            struck[1].resume()
        print(f"\nSIGSTOP of a raylet: noticed after {room.heard.when('node-died') - struck[0]:.1f} s")
        room.one_verdict_each(cells, outcomes)
        assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
        assert Counter(r["reason"] for r in room.rows()) == {"as-expected": 4, "node-died": 1}
        roomfarm.wait_for(lambda: all(map(gone, struck[2])), 60, "the actor of the node that woke lives on")
    assert len(struck[2]) == 1


def test_without_any_node_left_every_cell_ends_in_bounded_time(machines, tmp_path):
    room = roomfarm.Room(tmp_path)
    cells = room.cells(8, 5.0, child=True)
    machines.add(*"ab")
    struck = []

    def strike():
        roomfarm.wait_for(lambda: {s["node"] for s in room.said()} == set("ab"), 120, "it did not spread")
        struck.extend(machines.kill(name)[0] for name in "ab")

    threading.Thread(target=strike, daemon=True).start()
    with dispatch.attached(machines.address):
        outcomes = room.go(cells, slots=1, attempts=3)
    took_s = time.time() - struck[-1]
    print(f"\nall nodes killed: the run ended {took_s:.1f} s later")
    room.one_verdict_each(cells, outcomes)
    assert {(o.verdict, o.reason) for o in outcomes.values()} == {(Verdict.ERROR, Reason.NO_CARD)}
    assert "died or left the cluster" in outcomes["cell-007"].detail
    assert Counter(r["reason"] for r in room.rows()) == {"no-card": 8, "node-died": 2}
    assert took_s < 60
    roomfarm.wait_for(lambda: not processes_of_run(room.run), 15, "orphans")


@dataclass(frozen=True)
class Build:
    """Takes a pin's pristine package and builds a tree in the node's cache, as every cell does."""

    index: str
    name: str = "prefill"

    def run(self, bench):
        pin = Pin("0.29.0-cpu", "0.29.0", "cpu", pip_args=("--no-index", "--find-links", self.index))
        pristine = PinStore(bench.cache).pristine(pin, bench.progress)
        tree = TreeStore(bench.cache).build(pristine, [PATCH])
        assert "x2 = 'two'" in (tree.package / "v1/pool.py").read_text()
        bench.progress(f"inode {(tree.package / 'v1/pool.py').stat().st_ino} of {tree.id}")
        yield Outcome(Verdict.PASS, Reason.AS_EXPECTED, "built")


@pytest.mark.parametrize(("caches", "built"), [(("one", "one"), 1), (("one", "two"), 2)], ids=["shared", "separate"])
def test_nodes_build_once_for_each_cache(machines, tmp_path, caches, built):
    write_wheel(tmp_path / "index")
    room = roomfarm.Room(tmp_path)
    machines.add(*"ab", caches=dict(zip("ab", caches, strict=True)))
    cells = [roomfarm.Cell(**{**vars(cell), "job": Build(str(tmp_path / "index"))}) for cell in room.cells(2, 0.0)]
    with dispatch.attached(machines.address):
        outcomes = room.go(cells, slots=1, attempts=1, patience=Patience(start_s=120.0))
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}, outcomes
    texts = [(card, text) for _, card, _, text in room.heard.lines]
    print(f"\n{caches}: {[text for _, text in texts if 'downloading' in text or 'waiting' in text]}")
    assert len({card for card, text in texts if text.startswith("inode")}) == 2  # both nodes worked
    assert sum("downloading" in text for _, text in texts) == built
    assert len({text for _, text in texts if text.startswith("inode")}) == built
    assert len({text.split()[-1] for _, text in texts if text.startswith("inode")}) == 1  # a tree's name is its content's
