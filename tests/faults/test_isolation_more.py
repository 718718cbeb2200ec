"""Machines that can make no sandbox in a run that asks for them, on real Ray actors; and what would take a machine whole."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import roomfarm

from farm import dispatch, isolation, lifeline
from farm.bench import Needs
from farm.evidence import Policy, RunInfo
from farm.lifeline import Supervised, carrying
from farm.records import Reason, Verdict

pytestmark = [pytest.mark.faults, pytest.mark.ray]


class Elsewhere(roomfarm.Bare):
    """Of two seats the second plays another machine, whose bubblewrap may not make a sandbox."""

    bare = (1,)

    def __init__(self, seat, info, cache, policy):
        if seat.index in self.bare:
            os.environ["PATH"] = f"{cache}/bin:{os.environ['PATH']}"
        super().__init__(seat, info, cache, policy)


class Nowhere(Elsewhere):
    bare = (0, 1)


@pytest.fixture(scope="module")
def cluster():
    roomfarm.by_value()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with dispatch.attached(None):
        yield


@pytest.fixture
def room(cluster, tmp_path):
    program = tmp_path / "cache/bin/bwrap"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    return roomfarm.Room(tmp_path)


def go(room, monkeypatch, worker, trusted):
    """Run six cells, of which those from `trusted` on need no sandbox."""
    monkeypatch.setattr(dispatch, "Worker", worker)
    cells = [replace(cell, needs=Needs(sandbox=i < trusted)) for i, cell in enumerate(room.cells(6, 0.5))]
    outcomes = dispatch.run_cells(cells, RunInfo(room.run, "c0ffee", False), room.store, room.heard, cpu_slots=2, attempts=2,
                                  cache=str(room.folder / "cache"), opened=lambda: None, policy=Policy(isolation="bwrap"))
    room.one_verdict_each(cells, outcomes)
    return outcomes


def test_cells_go_to_the_machines_that_can_make_a_sandbox(room, monkeypatch, sandbox):
    outcomes = go(room, monkeypatch, Elsewhere, trusted=4)
    assert [o.verdict for o in outcomes.values()] == [Verdict.PASS] * 6
    rows, cards = room.rows(), room.rows("cards")
    assert sorted((c["event"], c["reason"]) for c in cards) == [("left-out", "isolation-missing"), ("ready", None)]
    left, ready = sorted(cards, key=lambda c: c["event"])
    assert "No permissions to create new namespace" in left["detail"] and "user namespaces" in left["detail"]
    assert len([1 for *_, text in room.heard.lines if text.startswith("left-out")]) == 1
    ran = {row["cell"]: row["card"] for row in rows}
    assert [row["attempt"] for row in rows] == [1] * 6  # no cell had to find it out
    assert {ran[f"cell-00{i}"] for i in range(4)} == {ready["card"]}
    assert left["card"] in {ran["cell-004"], ran["cell-005"]}  # what runs no patched code is none the worse


def test_where_none_can_cells_end_at_once_with_what_to_do(room, monkeypatch):
    outcomes = go(room, monkeypatch, Nowhere, trusted=4)
    ends = [(o.verdict, o.reason) for _, o in sorted(outcomes.items())]
    assert ends == [(Verdict.ERROR, Reason.ISOLATION_MISSING)] * 4 + [(Verdict.PASS, Reason.AS_EXPECTED)] * 2
    assert "isolation: none" in outcomes["cell-000"].detail
    assert [row["attempt"] for row in room.rows()] == [1] * 6


def test_a_run_without_cells_that_need_a_sandbox_leaves_no_machine_out(room, monkeypatch):
    outcomes = go(room, monkeypatch, Nowhere, trusted=0)
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    assert [c["event"] for c in room.rows("cards")] == ["ready"] * 2


# --- a patch that starts processes without end ---------------------------------------------------

FORKS = """
import os, time
while True:
    try:
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
    except OSError:  # of a user whom the kernel counts
        time.sleep(120)
"""


@pytest.fixture
def within(sandbox, monkeypatch):
    """A sandbox that may hold 400 processes, for this interpreter."""
    monkeypatch.setattr(lifeline, "crowd", lambda: 400)
    return sandbox.within(isolation.interpreter(Path(sys.executable)))


def test_a_crowd_in_a_sandbox_is_ended_whole_with_a_word(within, tmp_path):
    with Supervised.start([sys.executable, "-c", FORKS], env={"PATH": os.environ["PATH"]}, cwd="/",
                          stdout_path=tmp_path / "log", within=within) as child:
        begun = time.monotonic()
        assert child.wait(60.0) == -signal.SIGKILL
        print(f"a crowd was ended after {time.monotonic() - begun:.1f} s")
    assert carrying(lifeline.MARK, child.mark) == []
    assert (tmp_path / "log").read_text() == "farm: ended with all its processes, which were more than 400\n"


def test_whoever_keeps_to_the_bound_is_let_be(within, tmp_path):
    few = FORKS.replace("while True", "for _ in range(50)") + "print('kept', flush=True); time.sleep(120)"
    with Supervised.start([sys.executable, "-c", few], env={"PATH": os.environ["PATH"]}, cwd="/",
                          stdout_path=tmp_path / "log", within=within) as child:
        roomfarm.wait_for(lambda: (tmp_path / "log").read_text() == "kept\n", 60, "it did not start")
        assert child.wait(2.0) is None and len(child.processes()) >= 51
