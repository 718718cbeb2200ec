"""What earlier runs say of the next one: cells, and the schedule that they make."""

import time
from datetime import datetime, timedelta, timezone

import pytest

from farm.bench import Card, Needs
from farm.config import PROJECT
from farm.estimate import Experience, Forecast, forecast, recalled, warm_s
from farm.hostmemory import Host, Room
from farm.scheduler import Scheduler, Task
from farm.store import Store
from farm.tiers import GIB, NOTHING, Claim

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def row(cell, wall_s, *, at=0, verdict="PASS", job="prefill", profile="tiny", spans=()):
    """An attempt whose spans follow each other."""
    placed, now = [], BEGAN
    for kind, seconds in spans:
        placed.append({"kind": kind, "started_utc": now, "ended_utc": (now := now + timedelta(seconds=seconds))})
    return {"cell": cell, "job": job, "profile": profile, "verdict": verdict, "wall_s": wall_s,
            "ended_utc": BEGAN + timedelta(hours=at), "spans": placed}


# --- cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spans", "seconds"), [
    ([], 100.0),
    (None, 100.0),
    ([("tests", 60), ("script", 20)], 100.0),
    ([("boot", 30), ("requests", 10), ("boot", 30), ("requests", 10)], 100.0),
    ([("boot", 70), ("requests", 1), ("boot", 10), ("boot", 10)], 40.0),
    ([("boot", 50), ("boot", 10)], 100.0),
], ids=["none", "null", "no-boot", "all-warm", "first-boot-cold", "two-boots-tell-nothing"])
def test_boots_are_taken_at_their_median(spans, seconds):
    made = row("a", 100.0, spans=spans or ())
    assert warm_s({**made, "spans": None} if spans is None else made) == pytest.approx(seconds)


ROWS = [
    row("prefill-long-p29-aaaa", 50.0, at=1), row("prefill-long-p29-aaaa", 40.0, at=2),
    row("prefill-long-p29-aaaa", 3.0, at=3, verdict="ERROR"), row("prefill-long-p29-bbbb", 70.0, at=4, verdict="FAIL"),
    row("prefill-short-p29-cccc", 10.0, at=1, verdict="INVALID"), row("unit-p29-dddd", 5.0, job="unit", profile=None),
    row("replay-p29-eeee", 0.0, job="replay", profile=None, verdict="SKIP"),
]


@pytest.mark.parametrize(("asked", "seconds"), [
    (("prefill-long-p29-aaaa", "prefill", "tiny"), 40.0),
    (("prefill-long-p29-ffff", "prefill", "tiny"), 70.0),
    (("prefill-other-p29-ffff", "prefill", "tiny"), 40.0),
    (("prefill-other-p29-ffff", "prefill", "huge"), None),
    (("unit-p30-ffff", "unit", None), 5.0),
    (("replay-p29-eeee", "replay", None), None),
    (("bare", "boot", None), None),
], ids=["its-newest-that-measured", "its-namesake's-newest", "median-of-its-like", "another-profile", "another-pin", "skipped",
        "unheard-of"])
def test_what_a_cell_will_take(asked, seconds):
    assert Experience(ROWS).seconds(*asked) == seconds


def test_of_the_recorded_run():
    """Two of the six boots of mtp-long took minutes, while kernels were compiled: 535 s then, 239 s the next time."""
    told = recalled(Store.at(PROJECT / "tests/data/runs/h200-gpu-tiny"), ["unheard-of"])
    long = told.seconds("prefill-mtp-long-tiny-mtp-long-site-cuda-6958789d", "prefill", "tiny/mtp-long")
    assert long == pytest.approx(238.7, abs=0.1)
    assert told.seconds("unit-regression-site-cuda-00000000", "unit", None) == pytest.approx(59.9, abs=0.1)


def test_a_damaged_file_tells_nothing(tmp_path):
    store = Store.open(tmp_path)
    (tmp_path / "table=cells" / "run=r-20260101T000000-ab").mkdir(parents=True)
    (tmp_path / "table=cells" / "run=r-20260101T000000-ab" / "a-1.parquet").write_bytes(b"PAR1")
    assert recalled(store, ["a"]).seconds("a", "prefill", None) is None


@pytest.fixture
def remembering(tmp_path):
    """A root with three runs, the newest by its time; `a` was measured in all, `b` in the oldest and in vain in the newest."""
    store = Store.open(tmp_path)
    for run, cells in (("z-20260101T000000-ff", {"a": "PASS", "b": "PASS"}), ("m-20260102T000000-00", {"a": "PASS"}),
                       ("a-20260103T000000-aa", {"a": "FAIL", "b": "ERROR"})):
        day = int(run.split("-")[1][6:8])
        for cell, verdict in cells.items():
            made = row(cell, 10.0 * day, at=24 * day, verdict=verdict)
            store.commit(run, cell, 1, {"cells": [made | {"schema_version": 2, "run": run, "attempt": 1, "spans": None}]})
    return store


@pytest.mark.parametrize(("wanted", "known", "a", "b"), [
    (["a"], 1, 30.0, 30.0), (["a", "b"], 3, 30.0, 10.0), (["unheard-of"], 3, 30.0, 10.0), ([], 1, 30.0, 30.0)],
    ids=["the-newest-will-do", "back-to-the-oldest", "all-in-vain", "nothing"])
def test_runs_are_read_back_to_where_all_cells_are_known(remembering, monkeypatch, wanted, known, a, b):
    asked, reading = [], Store.reading
    monkeypatch.setattr(Store, "reading", lambda self, table, run: (asked.append(run), reading(self, table, run))[1])
    told = recalled(remembering, wanted)
    assert asked == ["a-20260103T000000-aa", "m-20260102T000000-00", "z-20260101T000000-ff"][:known]
    assert (told.seconds("a", "prefill", "tiny"), told.seconds("b", "prefill", "tiny")) == (a, b)


# --- the schedule ---------------------------------------------------------------------------------


def scheduler(seconds, cards, needs=None, claims=None, host=None):
    made = Scheduler([Task(f"t{i}", (needs or {}).get(i, Needs()), (), (claims or {}).get(i, NOTHING))
                      for i in range(len(seconds))], attempts=2)
    for n in range(cards):
        made.add_card(Card(f"g{n}", f"card {n}", "cuda" if n else "cpu", "h"), host)
    return made, {f"t{i}": float(s) for i, s in enumerate(seconds) if s is not None}


@pytest.mark.parametrize(("seconds", "cards", "wall_s", "saved_s"), [
    ([], 2, 0, 0),
    ([7], 2, 7, 0),
    ([3, 4, 5], 1, 12, 0),
    ([3, 4, 5, 6], 2, 9, 1),
    ([6, 5, 4, 3], 2, 9, 0),
    ([1, 1, 1, 1, 10], 2, 10, 2),
    ([1, 1, 10], 4, 10, 0),
], ids=["nothing", "one", "one-card", "short-first", "long-first-already", "long-last", "more-cards-than-cells"])
def test_a_schedule_is_played_through(seconds, cards, wall_s, saved_s):
    found = forecast(*scheduler(seconds, cards))
    assert (found.wall_s, found.saved_s, found.together_s) == (wall_s, saved_s, sum(seconds))
    assert found.estimate_s == (wall_s if seconds else None)
    assert (found.order is not None) == (saved_s > 0)


def test_the_scheduler_is_left_as_it_is_and_takes_the_order_that_was_found():
    made, seconds = scheduler([1, 2, 9, 2, 9], 2)
    found = forecast(made, seconds)
    assert made.waiting == ("t0", "t1", "t2", "t3", "t4")
    assert found.order == ("t2", "t4", "t1", "t3", "t0")  # equals as they stood
    assert forecast(made, seconds) == found
    made.arrange(found.order)
    assert [made.next(card).cell for card in ("g0", "g1")] == ["t2", "t4"]
    assert forecast(scheduler([1, 2, 9, 2, 9], 2)[0], seconds) == found


def test_cells_of_which_nothing_is_known_make_it_a_lower_bound_and_go_first():
    found = forecast(*scheduler([1, None, 1, 1, 10], 2))
    assert found.unknown == ("t1",) and found.estimate_s is None
    assert found.order[:2] == ("t1", "t4")
    assert "at least 10 s for 5 cells on 2 cards" in found.words and "nothing is known of 1 cell: t1" in found.words


def test_needs_and_memory_count():
    cuda = {i: Needs(cuda=True) for i in range(4)}
    assert forecast(*scheduler([5] * 4 + [2] * 4, 3, needs=cuda)).wall_s == 10  # two of the cards are GPUs
    shm = Host("n", 0, Room("m", "h", 99 * GIB, 99 * GIB, 20 * GIB, 20 * GIB))
    tiers = dict.fromkeys(range(4), Claim(12 * GIB, 12 * GIB))
    assert forecast(*scheduler([5] * 4, 4, claims=tiers, host=shm)).wall_s == 20  # one at a time
    found = forecast(*scheduler([5] * 4 + [100], 4, needs={4: Needs(min_capability=(9, 0))}))
    assert (found.wall_s, found.cells) == (5, 4)  # what is skipped takes no time


@pytest.mark.parametrize(("found", "words"), [
    (Forecast(570.9, 535.2, 1136.0, 6, 2),
     "estimate: 571 s for 6 cells on 2 cards (1,136 s one after another: 1.99 times as fast), by what earlier runs in this "
     "results root took"),
    (Forecast(535.2, 535.2, 1136.0, 6, 4),
     "estimate: 535 s for 6 cells on 4 cards (1,136 s one after another: 2.12 times as fast), by what earlier runs in this "
     "results root took; its longest cell alone takes as long"),
    (Forecast(1136.0, 535.2, 1136.0, 6, 1),
     "estimate: 1,136 s for 6 cells on 1 card, by what earlier runs in this results root took"),
    (Forecast(571.0, 535.2, 1136.0, 6, 2, order=("a",), saved_s=192.4),
     "estimate: 571 s for 6 cells on 2 cards (1,136 s one after another: 1.99 times as fast), by what earlier runs in this "
     "results root took; long cells go first, which saves 192 s against the matrix's order"),
    (Forecast(0.0, 0.0, 0.0, 2, 3, unknown=("a", "b")),
     "no estimate for 2 cells on 3 cards: no run in this results root has measured any of them, or their like"),
    (Forecast(0.0, 0.0, 0.0, 0, 1), "no estimate: no card here can run any cell"),
], ids=["two-cards", "its-longest-cell", "one-card", "longest-first", "unknown", "nothing-runs"])
def test_words(found, words):
    assert found.words == words


@pytest.mark.slow
def test_a_thousand_cards_and_a_hundred_thousand_cells():
    seconds = [1 + i % 97 for i in range(100_000)]
    began = time.monotonic()
    found = forecast(*scheduler(seconds, 1000))
    print(f"\nplayed through twice in {time.monotonic() - began:.1f} s")
    assert sum(seconds) / 1000 <= found.wall_s <= sum(seconds) / 1000 + 97
