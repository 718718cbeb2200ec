"""A card that fails twice is out, the rest finish, the next run sees it, and it returns after expiry and a passed probe.

Two CPU slots of one machine, played; the dispatch, the actors, the store and the host's state are real.
"""

import json
import sys
from datetime import timedelta

import cardfarm
import playedcard
import pytest
import ray
from playedcard import play

from farm import dispatch
from farm.cardlist import lines
from farm.evidence import Policy, RunInfo
from farm.quarantine import Journal
from farm.records import utc_now
from farm.store import Store

pytestmark = [pytest.mark.ray, pytest.mark.faults]
POLICY = Policy(busy_wait_s=60.0, quarantine_after=2, quarantine_s=3600.0)


class Heard:
    def __init__(self):
        self.lines = []

    def event(self, card, cell, text):
        self.lines.append((card, cell, text))

    def finished(self, cell, outcome):
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where this module's cluster has its cards and host state; its actors inherit both."""
    folder = tmp_path_factory.mktemp("quarantine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARM_HOST_STATE", str(folder / "state"))
        patch.setenv(playedcard.FILE, str(folder))
        for module in (playedcard, cardfarm):  # the actors cannot import them
            ray.cloudpickle.register_pickle_by_value(sys.modules[module.__name__])
        with dispatch.attached(None):
            yield folder


@pytest.fixture
def run(folder, monkeypatch):
    """run(id) -> what a run of six cells over both slots committed; each is a run of its own, with new actors."""
    monkeypatch.setattr(dispatch, "Worker", cardfarm.CardWorker)
    store = Store.open(folder / "results")

    def go(name, cells=6):
        wanted = [cardfarm.cell(n, cardfarm.WitnessJob(folder, 0.3)) for n in range(cells)]
        heard = Heard()
        outcomes = dispatch.run_cells(wanted, RunInfo(name, None, None), store, heard, cpu_slots=2, attempts=3,
                                      cache=str(folder / "cache"), opened=lambda *_: None, policy=POLICY)
        rows = sorted(store.read("cells", name).to_pylist(), key=lambda r: (r["cell"], r["attempt"]))
        return outcomes, rows, heard, store

    return go


def ended(rows, card):
    return [(r["verdict"], r["reason"]) for r in rows if r["card"] == card.card.uuid]


def let_time_pass(folder, card):
    """Every quarantine of the card ends now: played by the dates in its journal."""
    path = folder / "state" / f"{card.card.uuid}.journal"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "quarantined":
            event["until_utc"] = min(event["until_utc"], utc_now().isoformat())
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def test_a_card_through_its_quarantine_and_back(run, folder, capsys):
    bad, good = play(folder, 0, 2), play(folder, 1, 2)

    # A card fails twice: it is out, its cells move on, the run ends complete.
    bad.say(probe="failed")
    outcomes, rows, heard, store = run("run-1")
    assert {o.verdict.value for o in outcomes.values()} == {"PASS"} and len(outcomes) == 6
    assert ended(rows, bad) == [("ERROR", "card-unhealthy")] * 2
    assert ended(rows, good) == [("PASS", "as-expected")] * 6
    assert sorted((r["cell"], r["attempt"]) for r in rows if r["final"]) == sorted(
        (c, 1 + sum(r["cell"] == c and not r["final"] for r in rows)) for c in outcomes)
    (event,) = [r for r in store.read("cards", "run-1").to_pylist() if r["event"] == "quarantined"]
    assert (event["card"], event["reason"]) == (bad.card.uuid, "card-unhealthy")
    assert event["until_utc"] > utc_now() + timedelta(minutes=50)

    # The next run sees it, and so does everybody who asks.
    bad.say(probe="passed")  # well again, but its time is not over
    _, rows, heard, store = run("run-2")
    assert ended(rows, bad) == [] and ended(rows, good) == [("PASS", "as-expected")] * 6
    assert any("in quarantine until" in text for _, _, text in heard.lines)
    assert [r["event"] for r in store.read("cards", "run-2").to_pylist() if r["card"] == bad.card.uuid] == ["quarantined"]
    (line,) = [one for one in lines(folder / "state", store) if one.uuid == bad.card.uuid]
    assert line.health.startswith("in quarantine until ") and "card-unhealthy (2 errors of its own making" in line.health
    assert [v.reason for v in line.verdicts] == ["card-unhealthy"] * 2

    # Its time is over, but its probe fails: one error is enough, and it is out again.
    let_time_pass(folder, bad)
    bad.say(probe="failed")
    outcomes, rows, _, _ = run("run-3")
    assert {o.verdict.value for o in outcomes.values()} == {"PASS"}
    assert ended(rows, bad) == [("ERROR", "card-unhealthy")]
    assert not Journal(folder / "state", bad.card.uuid).history().quarantine.over

    # Its time is over and its probe passes: it has work again, and starts with a clean slate.
    let_time_pass(folder, bad)
    bad.say(probe="passed")
    outcomes, rows, heard, _ = run("run-4")
    assert {o.verdict.value for o in outcomes.values()} == {"PASS"} and len(rows) == 6
    assert set(ended(rows, bad)) == {("PASS", "as-expected")}
    history = Journal(folder / "state", bad.card.uuid).history()
    assert (history.quarantine, history.errors) == (None, ())
    assert any("its quarantine is over: the probe passed" in text for _, _, text in heard.lines)


def test_a_quarantine_that_ends_while_a_run_goes_on_gives_the_card_back_to_it(run, folder, monkeypatch, capsys):
    monkeypatch.setattr(f"{__name__}.POLICY", Policy(busy_wait_s=60.0, quarantine_after=1, quarantine_s=4.0))
    bad = play(folder, 0, 2)
    bad.say(probe="failed")
    watched = Heard.event

    def heal(self, card, cell, text):
        if "in quarantine until" in text:
            bad.say(probe="passed")
        watched(self, card, cell, text)

    monkeypatch.setattr(Heard, "event", heal)
    outcomes, rows, _, _ = run("run-5", cells=40)
    assert {o.verdict.value for o in outcomes.values()} == {"PASS"} and len(outcomes) == 40
    assert ended(rows, bad).count(("ERROR", "card-unhealthy")) == 1
    assert ("PASS", "as-expected") in ended(rows, bad)
    back = min(r["started_utc"] for r in rows if r["card"] == bad.card.uuid and r["verdict"] == "PASS")
    out = max(r["ended_utc"] for r in rows if r["card"] == bad.card.uuid and r["verdict"] == "ERROR")
    with capsys.disabled():
        print(f"\n  out for 4 s: the card has work again after {(back - out).total_seconds():.1f} s")
    assert back - out >= timedelta(seconds=3.5)


def test_what_fails_on_a_broken_card_is_no_verdict_and_is_run_elsewhere(run, folder, monkeypatch):
    """The job says FAIL on slot 1, whose probe then fails too: ERROR there, and the verdict comes from slot 2."""
    monkeypatch.setattr(f"{__name__}.POLICY", Policy(busy_wait_s=60.0, quarantine_after=9, quarantine_s=3600.0))
    bad = play(folder, 0, 2)
    bad.say(probe="passed")

    class Liar(cardfarm.WitnessJob):
        def run(self, bench):
            if bench.card.index == 0:
                bad.say(probe="failed")
                yield cardfarm.Outcome(cardfarm.Verdict.FAIL, cardfarm.Reason.CHANGED, "wrong tokens")
            else:
                yield from super().run(bench)

    monkeypatch.setattr(cardfarm, "WitnessJob", Liar)
    outcomes, rows, _, _ = run("run-6")
    assert {o.verdict.value for o in outcomes.values()} == {"PASS"}
    wrong = [r for r in rows if r["card"] == bad.card.uuid]
    assert {(r["verdict"], r["reason"]) for r in wrong} == {("ERROR", "card-unhealthy")}
    assert any("ended FAIL changed: wrong tokens" in r["detail"] for r in wrong)
