"""What `farm cards` says of each card: on a terminal, in a pipe, as JSON; also of cards that are not here any more."""

import json
import os
from datetime import timedelta

import pytest
from typer.testing import CliRunner

from farm import cardlist, cards, cli
from farm.bench import Needs
from farm.cardlock import CardLock
from farm.cards import Client, Reading
from farm.config import PinConfig
from farm.errors import FarmError
from farm.evidence import Evidence, RunInfo
from farm.plan import Cell, PinSpec
from farm.quarantine import CardError, Journal
from farm.records import Outcome, Reason, Verdict, utc_now
from farm.store import Store

GPU = cards.Card("GPU-1", "RTX 3090", "cuda", "host-1", capability=(8, 6), memory_bytes=24 * 2**30, driver="580.1")
SLOT = cards.cpu_slot(0, 1)


@pytest.fixture
def state(tmp_path, monkeypatch):
    """One GPU in this machine, and the folder of the host's state."""
    monkeypatch.setattr(cards, "local_cards", lambda: [GPU])
    monkeypatch.setattr(cards, "reading", lambda card: Reading(2**30, 350.0, "580.1", (Client(7, "anna", "python", 5),), 0))
    monkeypatch.setattr(cards, "conditions", lambda card: {"card": card.uuid, "clock_sm_mhz": 1700, "throttle_reasons": []})
    monkeypatch.setenv("FARM_HOST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_RESULTS", str(tmp_path / "no-results-yet"))
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def one(state, uuid="GPU-1", store=None):
    (line,) = [line for line in cardlist.lines(state, store) if line.uuid == uuid]
    return line


def erred(state, *, after=9, for_s=60.0, uuid="GPU-1"):
    error = CardError(utc_now(), Reason.MEMORY_HELD, "9 GiB", "r", "c")
    Journal(state, uuid, "RTX 3090").erred(error, after=after, for_s=for_s)


@pytest.mark.parametrize(("lay", "says"), [
    (lambda state: None, "not probed yet"),
    (lambda state: Journal(state, "GPU-1").probed("passed", "fine"), "probe passed 0 s ago"),
    (erred, "1 error of its own making, last memory-held at "),
    (lambda state: erred(state, after=1), "in quarantine until "),
    (lambda state: erred(state, after=1, for_s=0.0), "its quarantine for memory-held is over since "),
], ids=["new", "probed", "an-error", "quarantine", "on-trial"])
def test_health_in_a_sentence(state, lay, says):
    lay(state)
    assert one(state).health.startswith(says)


def test_a_card_that_does_not_answer_is_listed_with_what_it_says(state, monkeypatch):
    def lost(card):
        raise FarmError("no longer answers NVML", reason=Reason.CARD_LOST)

    monkeypatch.setattr(cards, "reading", lost)
    assert one(state).health.startswith("no longer answers NVML") and one(state).json()["memory_used_bytes"] is None


def test_cards_that_are_gone_and_other_slots_are_listed_too(state):
    erred(state, uuid="GPU-gone")
    Journal(state, SLOT.uuid, SLOT.name).probed("passed", "fine")
    found = {line.uuid: line for line in cardlist.lines(state, None)}
    assert list(found) == ["GPU-1", SLOT.uuid, "GPU-gone"]
    assert found["GPU-gone"].health.startswith("no card with this UUID is in this machine now")
    assert (found["GPU-gone"].name, found[SLOT.uuid].name) == ("RTX 3090", SLOT.name)
    assert [line.row()[2] for line in found.values()] == ["cuda", "cpu", "cuda"]


def test_the_holder_and_how_long_it_has_the_card(state):
    with CardLock(state, "GPU-1").held("run-1", "cell-1", wait_s=0, waiting=lambda holder: None):
        line = one(state)
        assert f"process {os.getpid()}, run run-1, cell cell-1, for 0 s" in line.row()[6]
        assert line.json()["holder"]["age_s"] < 60
    assert one(state).row()[6] is None


class Job:
    name = "prefill"


def cell_row(card, cell, verdict, reason, ago):
    pin = PinSpec("p", PinConfig(version="0.29.0", flavour="cpu"))
    made = Cell(cell, Job(), None, pin, None, None, (), {}, Needs(), 1, "5e")
    evidence = Evidence(RunInfo("run-1", None, None), made, 1, card={"card": card})
    return evidence.cell_row(Outcome(verdict, reason, "x"), final=True) | {"ended_utc": utc_now() - timedelta(minutes=ago)}


def test_the_last_verdicts_newest_first(state, tmp_path):
    store = Store.open(tmp_path / "results")
    for number in range(cardlist.LAST + 2):
        row = cell_row("GPU-1", f"c{number}", Verdict.PASS, Reason.AS_EXPECTED, 60 - number)
        store.commit("run-1", f"c{number}", 1, {"cells": [row]})
    store.commit("run-1", "other", 1, {"cells": [cell_row("GPU-2", "other", Verdict.FAIL, Reason.CHANGED, 0)]})
    store.commit("run-1", "last", 1, {"cells": [cell_row("GPU-1", "last", Verdict.ERROR, Reason.CARD_BUSY, 0)]})
    line = one(state, store=store)
    assert [v.cell for v in line.verdicts] == ["last", "c6", "c5", "c4", "c3"]
    assert line.row()[8] == "ERROR card-busy, PASS, PASS, PASS, PASS"


def test_the_verb_as_table_and_as_json(state, tmp_path):
    erred(state, after=1)
    table = CliRunner().invoke(cli.app, ["cards"])
    assert table.exit_code == 0, table.output
    header, row = table.output.splitlines()
    assert header.split("\t") == list(cardlist.COLUMNS)
    assert row.split("\t")[:6] == ["GPU-1", "RTX 3090", "cuda", "8.6", "24.0", "580.1"]
    said = CliRunner().invoke(cli.app, ["cards", "--json"])
    (card,) = json.loads(said.output)
    assert (card["card"], card["capability"], card["memory_bytes"]) == ("GPU-1", "8.6", 24 * 2**30)
    assert (card["power_limit_w"], card["memory_used_bytes"]) == (350.0, 2**30)
    assert (card["clock_sm_mhz"], card["throttle_reasons"], card["temperature_c"]) == (1700, [], None)
    assert card["clients"] == [{"pid": 7, "user": "anna", "command": "python", "memory_bytes": 5}]
    assert card["quarantine"]["reason"] == "memory-held" and card["quarantine"]["errors"][0]["detail"] == "9 GiB"
    assert card["holder"] is None and card["verdicts"] == []


def test_a_results_root_that_is_named_must_be_there(state, tmp_path):
    done = CliRunner().invoke(cli.app, ["cards", "--results", str(tmp_path / "nowhere")])
    assert done.exit_code != 0 and "does not exist" in str(done.exception)
