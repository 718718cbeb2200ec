"""Where the time went, on the run of a real card and on spans made for it."""

from datetime import datetime, timedelta, timezone

import pytest

from farm.config import PROJECT
from farm.report.times import Times, times
from farm.report.view import view
from farm.store import Store

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def row(card, *spans):
    return {"card": card, "wall_s": 0.0, "vllm_s": 0.0, "started_utc": None, "ended_utc": None, "spans": [
        {"kind": kind, "started_utc": BEGAN + timedelta(seconds=first), "ended_utc": BEGAN + timedelta(seconds=last)}
        for kind, first, last in spans]}


@pytest.mark.parametrize(("attempts", "served", "cards"), [
    ([row("a", ("boot", 0, 30), ("requests", 30, 50), ("teardown", 50, 51), ("tests", 51, 90))], 51.0, 1),
    ([row("a", ("boot", 0, 30)), row("a", ("boot", 20, 40))], 40.0, 1),
    ([row("a", ("boot", 0, 30)), row("b", ("boot", 0, 20), ("script", 20, 90))], 50.0, 2),
    ([row("a", ("script", 0, 30)), {**row(None), "spans": None}], 0.0, 0),
], ids=["one-cell", "overlapping", "two-cards", "no-server"])
def test_seconds_with_a_server(attempts, served, cards):
    found = times({"wall_s": 100.0, "vllm_s": 95.0}, [], attempts)
    assert (found.served_s, found.cards) == (served, cards)


def test_of_a_run_that_goes_on_or_was_killed():
    ran = row("a", ("boot", 0, 30), ("requests", 30, 50)) | {"started_utc": BEGAN, "ended_utc": BEGAN + timedelta(seconds=55)}
    found = times({"wall_s": 0.6, "vllm_s": 0.0}, [], [ran])  # its row is from its beginning
    assert found.words == "wall 55.0 s: vLLM 50.0 s, ours 5.0 s (9.1 %); servers booting or serving 50.0 s (90.9 %)"


@pytest.mark.parametrize(("found", "says"), [
    (Times(100.0, 95.0, "wall", 90.0, 1), "ours 5.0 s (5.0 %); servers booting or serving 90.0 s (90.0 %)"),
    (Times(100.0, 95.0, "wall", 150.0, 2), "servers booting or serving 150.0 s of 2 cards (75.0 %)"),
], ids=["one-card", "two-cards"])
def test_the_cards_share_in_words(found, says):
    assert found.words.endswith(says)


@pytest.mark.parametrize("found", [Times(100.0, 95.0, "wall"), Times(100.0, 95.0, "all cells together", 90.0, 1)],
                         ids=["no-server", "no-wall"])
def test_a_share_that_cannot_be_told_is_not(found):
    assert "servers" not in found.words


def test_of_the_recorded_run():
    store = Store.at(PROJECT / "tests/data/runs/h200-gpu-tiny")
    (run,) = store.runs()
    assert view(store, run).times.words == ("wall 1150.8 s: vLLM 1129.3 s, ours 21.4 s (1.9 %); "
                                            "servers booting or serving 1035.8 s (90.0 %)")
