"""Four cards at once: what befalls one is not noticed on the others, and the memory that they share is shared out."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import played
import pytest
import roomfarm
import servefarm
from roomfarm import wait_for

from farm import dispatch
from farm.cards import cpu_slot
from farm.lifeline import processes_of_run
from farm.records import Reason, Verdict
from farm.supervisor import started

pytestmark = [pytest.mark.faults, pytest.mark.ray]
PROJECT = Path(__file__).parents[2]
SLOTS, TIER = 4, 8 * 2**20
NOTICED_S = 5.0  # an answer takes some ms; what a neighbour's death could cost is a boot, or a cell
HOLDER = """
import sys
from pathlib import Path
from farm.cardlock import CardLock
with CardLock(Path(sys.argv[1]), sys.argv[2]).held("run-of-another-farm", "its-cell", wait_s=0, waiting=print):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A room with a Ray of its own, whose actors have this environment."""
    monkeypatch.setenv("FARM_TEST_TREE", str(played.write_tree(tmp_path / "tree")))
    monkeypatch.setenv("FARM_HOST_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(dispatch, "Worker", servefarm.Serving)
    made = roomfarm.Room(tmp_path, run=f"run-{tmp_path.name}-{os.getpid()}")
    servefarm.by_value()
    yield made
    wait_for(lambda: not processes_of_run(made.run), 30, "processes of the run are left")
    assert not [region for said in made.said() for region in said["regions"] if os.path.exists(region)]


def go(room, cells, *, attempts=2):
    with dispatch.attached(None):
        return room.go(cells, slots=SLOTS, attempts=attempts)


def serving(room):
    """{card: what its cell said} of the first attempts that serve and have not ended."""
    now = {}
    for said in room.said():
        now[said["card"]] = said
    return {card: said for card, said in now.items() if said["event"] == "serves"}


def test_neighbours_notice_nothing(room):
    """One server killed, one actor killed, one card held by another farm: everybody else's first attempt is his last."""
    locked = cpu_slot(SLOTS - 1, SLOTS).uuid
    (room.folder / "state").mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, room.folder / "state", locked], text=True, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    assert holder.stdout.readline() == "held\n"
    cells = servefarm.cells(room, 9, 5.0, TIER)
    struck, problems = {}, []

    def strike():
        try:
            here = wait_for(lambda: now if len(now := serving(room)) == SLOTS - 1 else None, 120, "three servers at once")
            server, actor, _ = sorted(here.values(), key=lambda said: said["cell"])
            os.kill(server["server"], signal.SIGKILL)
            os.kill(actor["worker"], signal.SIGKILL)
            struck.update(server=server["cell"], actor=actor["cell"], at=time.time())
            wait_for(lambda: len(room.heard.ends) == len(cells) - 1, 200, "the others did not get on without the held card")
            assert started(holder.pid) is not None  # nobody has ended it
            struck["waited"] = [said for said in room.said() if said["card"] == locked]
        except BaseException as problem:
            problems.append(problem)
        finally:
            holder.communicate("")  # lets go of the card

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    try:
        outcomes = go(room, cells)
    finally:
        holder.kill()
        thread.join(30)
    assert not problems, problems
    room.one_verdict_each(cells, outcomes)
    assert {(o.verdict, o.reason) for o in outcomes.values()} == {(Verdict.PASS, Reason.AS_EXPECTED)}
    rows = room.rows()
    reasons = {cell.id: [r["reason"] for r in sorted(rows, key=lambda r: r["attempt"]) if r["cell"] == cell.id]
               for cell in cells}
    assert reasons.pop(struck["server"]) == ["server-lost", "as-expected"]
    assert reasons.pop(struck["actor"]) == ["actor-died", "as-expected"]
    assert set(map(tuple, reasons.values())) == {("as-expected",)}
    assert struck["waited"] == []  # nobody went to the held card before it was let go
    assert room.heard.when("held by") is not None
    held = next(r for r in rows if r["card"] == locked)
    assert held["waited_s"] > 0 and held["attempt"] == 1
    slowest = {r["cell"]: r["value"] for r in room.rows("measurements")}
    beside = {r["cell"]: r["wall_s"] for r in rows if r["verdict"] == "PASS"}
    print(f"\nkilled the server of {struck['server']} and the actor of {struck['actor']}; the others: longest answer "
          f"{max(slowest.values()):.2f} s, cells {min(beside.values()):.1f} to {max(beside.values()):.1f} s for 5.0 s of "
          f"requests; the held card's cell waited {held['waited_s']:.1f} s")
    assert max(slowest.values()) < NOTICED_S
    ends = [said for said in room.said() if said["event"] == "ends"]
    assert len(ends) == len(cells) and all(said["regions_there"] for said in ends)


def test_tiers_that_do_not_fit_at_once_are_given_fewer_at_a_time(room, monkeypatch):
    """Four cards, room for two tiers: never three at once, the cells without one go on beside them, and it is said once."""
    store = dispatch.OBJECT_STORE_BYTES
    monkeypatch.setenv("FARM_TEST_SHM", str(store + 2 * TIER + TIER // 2))
    cells = servefarm.cells(room, 8, 1.5, [TIER] * 5 + [None] * 2 + [4 * TIER])
    outcomes = go(room, cells)
    room.one_verdict_each(cells, outcomes)
    assert {o.verdict for o in list(outcomes.values()) if o.reason is Reason.AS_EXPECTED} == {Verdict.PASS}
    told = [text for _, _, cell, text in room.heard.lines if "fewer cells" in text]
    print(f"\n{told}\n{outcomes['cell-007'].detail}")
    assert len(told) == 1 and "wait for cell-000 (8 MiB), cell-001 (8 MiB) to end" in told[0]
    assert (outcomes["cell-007"].verdict, outcomes["cell-007"].reason) == (Verdict.SKIP, Reason.NEEDS_UNMET)
    assert "for its CPU tier, host" in outcomes["cell-007"].detail
    assert len([o for o in outcomes.values() if o.verdict is Verdict.PASS]) == 7
    spans = [(r["started_utc"], r["ended_utc"], r["cell"] < "cell-005") for r in room.rows() if r["verdict"] == "PASS"]
    at_once = [sum(a <= began < b for a, b, tier in spans if tier) for began, _, tier in spans if tier]
    all_at_once = [sum(a <= began < b for a, b, _ in spans) for began, _, _ in spans]
    assert max(at_once) == 2 and max(all_at_once) >= 3
