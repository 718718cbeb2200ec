"""How the cards of a run were used, from rows made for it."""

import shutil
from datetime import datetime, timedelta, timezone
from io import StringIO

import pytest
from rich.console import Console

from farm.config import PROJECT
from farm.report.html import html
from farm.report.markdown import markdown
from farm.report.schedule import SHOWN, schedule
from farm.report.terminal import render_terminal
from farm.report.view import view
from farm.store import Store

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def at(second):
    return BEGAN + timedelta(seconds=second)


def attempt(card, first, last, *spans, waited=0.0, cell=None):
    return {"card": card, "card_name": "RTX 3090", "started_utc": at(first), "ended_utc": at(last), "waited_s": waited,
            "wall_s": float(last - first), "cell": cell or f"{card}-{first}",
            "spans": [{"kind": kind, "started_utc": at(a), "ended_utc": at(b)} for kind, a, b in spans] or None}


def ready(*cards, event="ready"):
    return [{"card": card, "card_name": "RTX 3090", "event": event} for card in cards]


TWO = [
    attempt("GPU-aaaaa", 0, 60, ("boot", 10, 40), ("requests", 40, 55), ("teardown", 55, 58)),
    attempt("GPU-aaaaa", 61, 100, ("tests", 63, 90)),
    attempt("GPU-bbbbb", 30, 80, ("boot", 32, 50), ("requests", 50, 70), ("boot", 72, 80), waited=25.0),
]


def test_every_second_of_every_card_is_accounted_for():
    found = schedule({"wall_s": 130.0, "estimate_s": 80.0}, TWO, TWO, ready("GPU-aaaaa", "GPU-bbbbb", "GPU-ccccc"))
    assert found.cold_s == 0.0  # two boots of a cell do not tell which was the slow one
    assert found.window_s == 100.0 and found.outside_s == 30.0 and found.together_s == 60 + 39 + 50
    one, two, three = found.cards
    assert (one.served_s, one.other_s, one.preparing_s, one.between_s) == (48, 27, 12, 12)
    assert (one.idle_s, one.idle_end_s, one.waiting_s, one.attempts) == (1, 0, 0, 2)
    assert (two.served_s, two.preparing_s, two.between_s, two.waiting_s, two.idle_s, two.idle_end_s) == (46, 2, 2, 25, 5, 20)
    assert (three.busy_s, three.idle_end_s, three.attempts) == (0, 100, 0)
    for card in found.cards:
        assert card.busy_s + card.waiting_s + card.idle_s + card.idle_end_s == found.window_s


def test_in_words():
    found = schedule({"status": "finished", "wall_s": 130.0, "estimate_s": 80.0}, TWO, TWO, ready("GPU-aaaaa", "GPU-bbbbb"))
    assert found.lines == (
        "estimated 80.0 s, took 100.0 s from the first cell's start to the last one's end (25.0 % longer)",
        "3 cells on 2 cards: 149.0 s one after another, so 1.49 times as fast as one card (74 % of 2 times)",
        "of 200.0 card-seconds, those in which nothing booted, served or was tested: preparing (environments, trees, probes) "
        "14.0 s, else in cells 14.0 s, waiting for locks 25.0 s, idle before and between cells 6.0 s, idle at the end 20.0 s",
        "before the first cell and after the last (preflight, Ray, results): 30.0 s")
    assert found.rows == [("RTX 3090 aaaaa", "2", "99.0 %", "48.0 %", "27.0 %", "0.0", "0.0"),
                          ("RTX 3090 bbbbb", "1", "50.0 %", "46.0 %", "0.0 %", "25.0", "20.0")]


def test_the_wait_of_the_first_cell_is_in_the_window():
    found = schedule({"wall_s": 99.0}, TWO, [attempt("a", 30, 40, waited=20.0), attempt("b", 35, 50)], ready("a", "b"))
    assert found.window_s == 40.0


@pytest.mark.parametrize(("head", "cards", "says"), [
    ({"wall_s": 130.0}, ready("GPU-aaaaa", "GPU-bbbbb"), "without an estimate"),
    ({"wall_s": 130.0, "estimate_s": 125.0, "status": "finished"}, [], "(20.0 % shorter)"),
    ({"wall_s": 130.0, "estimate_s": 125.0, "status": "interrupted"}, [],
     "estimated 125.0 s for all of it, which has not ended"),
], ids=["no-estimate", "shorter", "interrupted"])
def test_beside_the_estimate(head, cards, says):
    assert says in schedule(head, TWO, TWO, cards).lines[0]


@pytest.mark.parametrize(("head", "attempts", "cards"), [
    ({"wall_s": 130.0}, TWO[:2], ready("GPU-aaaaa")),
    ({"wall_s": 130.0, "estimate_s": 80.0}, [], ready("GPU-aaaaa", "GPU-bbbbb")),
    ({"wall_s": 130.0, "estimate_s": 80.0}, TWO, ready("GPU-aaaaa", "GPU-bbbbb", "GPU-aaaaa")),
    ({"wall_s": 60.0, "estimate_s": 80.0}, TWO, []),
], ids=["one-card", "nothing-ran", "resumed", "resumed-long-ago"])
def test_where_there_is_nothing_to_tell(head, attempts, cards):
    assert schedule(head, attempts, attempts, cards) is None


def test_one_card_with_an_estimate():
    found = schedule({"wall_s": 101.0, "estimate_s": 100.0, "status": "finished"}, TWO[:2], TWO[:2], ready("GPU-aaaaa"))
    assert "times as fast" not in "".join(found.lines) and found.lines[0].startswith("estimated 100.0 s, took 100.0 s")


def test_of_many_cards_the_rest_has_one_row():
    attempts = [attempt(f"card-{n:05}", 0, n + 1) for n in range(SHOWN + 4)]
    found = schedule({"wall_s": 50.0}, attempts, attempts, [])
    assert len(found.rows) == SHOWN + 1
    assert found.rows[-1][:3] == ("4 more, each", "1", "92.5 %")


def test_a_run_of_one_card_shows_no_schedule():
    store = Store.at(PROJECT / "tests/data/runs/h200-gpu-tiny")
    (run,) = store.runs()
    assert view(store, run).schedule is None


@pytest.fixture
def estimated(tmp_path):
    """The recorded run as if it had been estimated."""
    store = Store.open(shutil.copytree(PROJECT / "tests/data/runs/h200-gpu-tiny", tmp_path / "results"))
    (run,) = store.runs()
    store.commit_run(run, {**store.read("runs", run).to_pylist()[0], "estimate_s": 838.0})
    return store, run


@pytest.mark.parametrize("render", ["terminal", "markdown", "html"])
def test_it_stands_in_every_report(estimated, render):
    store, run = estimated
    if render == "terminal":
        out = StringIO()
        render_terminal(store, run, Console(file=out, width=200))
        said = out.getvalue()
    else:
        said = {"markdown": markdown, "html": html}[render](store, run)
    assert "Schedule" in said and "estimated 838.0 s, took 1,138.6 s" in said.replace("\n  ", " ").replace("\\.", ".")
    assert "91.0 %" in said  # of the card's time something booted or served
