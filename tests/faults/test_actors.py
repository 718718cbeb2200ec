"""An actor that is killed, stopped, dead while idle, or that never starts; and the death of the raylet of our own Ray."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray
import roomfarm

from farm import dispatch
from farm.errors import FarmError
from farm.lifeline import processes_of_run
from farm.records import Reason, Verdict
from farm.runs import lines
from farm.seats import Patience
from farm.store import Store

pytestmark = [pytest.mark.faults, pytest.mark.ray]
PROJECT = Path(__file__).parents[2]
NOTICE_S = 20.0  # what this machine may need at its busiest; the time that it took is printed


@pytest.fixture(scope="module")
def cluster():
    roomfarm.by_value()
    with dispatch.attached(None):
        yield


@pytest.fixture
def room(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "Worker", roomfarm.Bare)
    return roomfarm.Room(tmp_path, run=f"run-{tmp_path.name}")


def once(room, cell, do, child=False):
    """A thread that will `do` something to the process of a cell's first attempt, by its pid, when that is there (with its
    three children where it has some); and the list in which it says when."""
    struck = []

    def strike():
        said = roomfarm.wait_for(lambda: [s for s in room.said() if s["cell"] == cell], 60, "no attempt")[0]
        if child:  # a supervisor, its child, and that one's child in a session of its own
            roomfarm.wait_for(lambda: len(processes_of_run(room.run)) >= 3, 30, "its children never came")
        do(said["pid"])
        struck.append((time.time(), said["pid"]))

    thread = threading.Thread(target=strike, daemon=True)
    return thread, struck


def test_a_killed_actor_is_noticed_and_leaves_no_process(room):
    cells = room.cells(3, 1.0, child=True)
    thread, struck = once(room, "cell-000", lambda pid: os.kill(pid, signal.SIGKILL), child=True)
    thread.start()
    outcomes = room.go(cells, slots=1, attempts=2)
    notice_s = room.heard.when("actor-died") - struck[0][0]
    print(f"\nkill -9 of an actor: noticed after {notice_s:.2f} s")
    room.one_verdict_each(cells, outcomes)
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    assert [r["reason"] for r in room.rows() if r["cell"] == "cell-000"] == ["actor-died", "as-expected"]
    assert notice_s < NOTICE_S
    roomfarm.wait_for(lambda: not processes_of_run(room.run), 15, "orphans")


def test_a_stopped_actor_is_ended_and_its_cell_runs_again(room):
    cells = room.cells(2, 1.0)
    thread, struck = once(room, "cell-000", lambda pid: os.kill(pid, signal.SIGSTOP))
    thread.start()
    outcomes = room.go(cells, slots=1, attempts=2, patience=Patience(alive_every_s=0.5, alive_s=3.0))
    print(f"\nSIGSTOP of an actor: noticed after {room.heard.when('actor-died') - struck[0][0]:.2f} s, 3 s of them patience")
    room.one_verdict_each(cells, outcomes)
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    first = next(r for r in room.rows() if r["cell"] == "cell-000" and r["attempt"] == 1)
    assert (first["reason"], "has not answered for 3 s" in first["detail"]) == ("actor-died", True)
    roomfarm.wait_for(lambda: not psutil.pid_exists(struck[0][1]), 30, "the stopped process is still there")


def test_an_actor_that_dies_while_it_waits_costs_no_attempt(room):
    """Two seats, one long cell: the idle seat's actor is killed, and its seat is ready again before the second run of it."""
    cells = room.cells(2, 6.0)
    cells[1] = roomfarm.Cell(**{**vars(cells[1]), "job": roomfarm.Nap(str(room.told), 0.1)})

    def strike():
        said = roomfarm.wait_for(lambda: [s for s in room.said() if s["cell"] == "cell-001"], 60, "no attempt")[0]
        roomfarm.wait_for(lambda: room.heard.ends["cell-001"], 60, "the short cell never ended")
        os.kill(said["pid"], signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()
    outcomes = room.go(cells, slots=2, attempts=1, patience=Patience(alive_every_s=0.5))
    room.one_verdict_each(cells, outcomes)
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    assert [r["event"] for r in room.rows("cards")] == ["ready", "ready"]  # its card has neither left nor come anew


def test_the_only_attempt_is_the_last_one(room):
    thread, _ = once(room, "cell-000", lambda pid: os.kill(pid, signal.SIGKILL))
    thread.start()
    cells = room.cells(2, 1.0)
    outcomes = room.go(cells, slots=1, attempts=1)
    room.one_verdict_each(cells, outcomes)
    assert (outcomes["cell-000"].verdict, outcomes["cell-000"].reason) == (Verdict.ERROR, Reason.ACTOR_DIED)
    assert outcomes["cell-001"].verdict is Verdict.PASS


class NeverStarts(roomfarm.Bare):
    def __init__(self, *_):
        raise FarmError("no GPU answers")


class StartsTooLate(roomfarm.Bare):
    def card(self):
        time.sleep(120)


@pytest.mark.parametrize(("worker", "says"), [(NeverStarts, "no GPU answers"), (StartsTooLate, "did not start within 5 s")],
                         ids=["raises", "hangs"])
def test_without_a_seat_that_opens_cells_end_as_no_card(room, monkeypatch, worker, says):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(dispatch, "Worker", worker)
    cells = room.cells(2, 0.1)
    outcomes = room.go(cells, slots=1, attempts=2, patience=Patience(start_s=5.0))
    room.one_verdict_each(cells, outcomes)
    assert {(o.verdict, o.reason) for o in outcomes.values()} == {(Verdict.ERROR, Reason.NO_CARD)}
    assert says in outcomes["cell-000"].detail
    assert [(r["event"], r["card"], says in r["detail"]) for r in room.rows("cards")] == [("left-out", None, True)]


MATRIX = """\
name: toy
pins: ["0.29.0-cpu"]
arms: {patched: {}}
cards: {cpu_slots: 2}
cells:
%s"""


def test_the_death_of_our_own_raylet_ends_the_run_in_order(tmp_path):
    """`farm matrix` as a process of its own, everything but the measurement real."""
    config = tmp_path / "configs" / "matrix" / "toy.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(MATRIX % "".join(f"  - {{job: toy, name: c{i}, with: {{number: {i}, seconds: 30}}}}\n" for i in range(4)))
    results, log = tmp_path / "results", tmp_path / "log"
    with log.open("w") as out:
        driver = subprocess.Popen([sys.executable, "tests/faults/toyfarm.py", "matrix", str(config), "--results", str(results)],
                                  cwd=PROJECT, stdout=out, stderr=out, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    try:
        roomfarm.wait_for(lambda: log.read_text().count("row 0") >= 2 or driver.poll() is not None, 120, log.read_text())
        below = psutil.Process(driver.pid).children(recursive=True)
        raylet = next(p for p in below if p.name() == "raylet")
        raylet.kill()
        began = time.monotonic()
        code = driver.wait(60)
        took_s = time.monotonic() - began
    finally:
        driver.kill()
    text = log.read_text()
    print(f"\nkill -9 of our own raylet: the run ended after {took_s:.1f} s with exit code {code}")
    rows = Store.at(results).read("cells").to_pylist()
    assert code == 2, text
    assert "Traceback" not in text, text
    assert "state-dump" not in text and "Raylet is terminated" not in text, text  # Ray's pages about it
    assert "died or left the cluster" in text or "attached to died" in text, text  # our line about it
    assert sorted((r["reason"], r["final"]) for r in rows) == [
        ("no-card", False)] * 4 + [("node-died", False)] * 2, text  # a resume runs all four
    (line,) = lines(Store.at(results))
    assert (line.status, line.cells, f"--resume {line.run}" in line.go_on) == ("finished", "0 of 4", True)
    assert Store.at(results).read("runs").to_pylist()[0]["status"] == "finished"
    assert {r["event"] for r in Store.at(results).read("cards").to_pylist()} == {"ready", "lost"}
    run = rows[0]["run"]
    roomfarm.wait_for(lambda: not processes_of_run(run), 15, "orphans of ours")
    roomfarm.wait_for(lambda: not [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], 15,
                      "processes of our Ray are left")
