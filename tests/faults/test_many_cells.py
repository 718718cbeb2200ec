"""300 cells over four CPU slots while their actors are killed at random: each gets one final verdict."""

import random
import threading
import time
from collections import Counter

import psutil
import pytest
import roomfarm

from farm import dispatch

pytestmark = [pytest.mark.faults, pytest.mark.ray]
CELLS, SECONDS, SLOTS, KILLS, SEED = 300, 0.2, 4, 40, 5


class Killer(threading.Thread):
    """Ends an actor with SIGKILL now and then, chosen among those that said a pid since they were last looked at."""

    def __init__(self, room):
        super().__init__(daemon=True)
        self.room, self.rng, self.over, self.killed = room, random.Random(SEED), threading.Event(), 0

    def run(self):
        while self.killed < KILLS and not self.over.wait(self.rng.uniform(0.1, 1.0)):
            here = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::Bare")]
            if here:
                victim = self.rng.choice(sorted(here, key=lambda p: p.pid))
                self.killed += roomfarm.end(victim.pid, victim.create_time())


def test_random_kills_of_actors_leave_every_cell_one_final_verdict(tmp_path, monkeypatch):
    roomfarm.by_value()
    monkeypatch.setattr(dispatch, "Worker", roomfarm.Bare)
    room = roomfarm.Room(tmp_path)
    cells = room.cells(CELLS, SECONDS)
    killer = Killer(room)
    began = time.monotonic()
    with dispatch.attached(None):
        killer.start()
        outcomes = room.go(cells, slots=SLOTS, attempts=3)
        killer.over.set()
        killer.join()
    rows = room.rows()
    print(f"\n{CELLS} cells, {killer.killed} kills in {time.monotonic() - began:.1f} s: "
          f"{dict(Counter(o.verdict.value for o in outcomes.values()))}; attempts "
          f"{dict(Counter((r['verdict'], r['reason']) for r in rows))}; at most {max(r['attempt'] for r in rows)} of a cell")
    room.one_verdict_each(cells, outcomes)
    assert killer.killed >= 10
    assert {r["reason"] for r in rows} <= {"as-expected", "actor-died"}
    # A kill takes the attempt of one cell at most; what a cell passed with is committed with it, once.
    assert 0 < sum(r["reason"] == "actor-died" for r in rows) <= killer.killed
    passed = Counter(r["cell"] for r in rows if r["verdict"] == "PASS")
    assert set(passed.values()) == {1}
    measured = {(r["cell"], r["attempt"]) for r in room.rows("measurements")}
    assert {(r["cell"], r["attempt"]) for r in rows if r["verdict"] == "PASS"} <= measured
