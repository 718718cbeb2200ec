"""Real Ray, real store, a job that needs no vLLM: attempts, retries, dead actors, skips, resume."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import ray

from farm import dispatch, promised, resumption, worker
from farm.bench import Needs
from farm.config import PROJECT, PinConfig
from farm.errors import FarmError
from farm.evidence import RunInfo
from farm.plan import Cell, PinSpec
from farm.quarantine import Quarantine
from farm.records import Measurement, Outcome, Reason, Tagged, Verdict, utc_now
from farm.store import Store

pytestmark = pytest.mark.ray


@dataclass(frozen=True)
class Scripted:
    """Writes a line per attempt into `log`, then does what stands at that attempt's place of `script`."""

    log: str
    script: tuple[str, ...]
    name: str = "prefill"

    def run(self, bench):
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()}\n")
        step = self.script[len(Path(self.log).read_text().splitlines()) - 1]
        yield Tagged(Measurement("kv_peak", 0.5, "ratio"))
        bench.progress(f"doing {step}")
        if step == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == "error":
            raise FarmError("a fault of the farm")
        if step == "slow":
            time.sleep(6)
        if step == "exit":
            sys.exit("a job may do this")
        if step == "bad-row":
            yield Tagged(Measurement("kv_peak", "half", "ratio"))
        yield Outcome(Verdict.FAIL if step == "fail" else Verdict.PASS, Reason.AS_EXPECTED, step)


class Bare(worker.Worker):
    """A worker whose bench is nothing but progress: no pin, no tree."""

    def _measure(self, cell, evidence, spans, events):
        class Bench:
            def progress(self, text):
                events.put(worker.Progress(text))

        outcome = None
        for event in cell.job.run(Bench()):
            if isinstance(event, Outcome):
                outcome = event
            else:
                events.put(worker.Rows(*(lambda table, row: (table, [row]))(*evidence.row(event))))
        return outcome


class Quarantining(Bare):
    """A worker whose card is put in quarantine by its first ERROR, for `for_s` seconds."""

    for_s = 3600.0

    def run(self, cell, attempt):
        for event in super().run(cell, attempt):
            if isinstance(event, worker.Ended) and event.outcome.verdict is Verdict.ERROR:
                until = utc_now() + timedelta(seconds=self.for_s)
                event = replace(event, quarantine=Quarantine(Reason.CARD_UNHEALTHY, until))
            yield event


class QuarantiningBriefly(Quarantining):
    for_s = 1.0


class Quarantined(Bare):
    def standing(self):
        return Quarantine(Reason.CARD_LOST, utc_now() + timedelta(hours=1))


class Twins(Bare):
    """Two seats that find the same card, as two Ray nodes of one machine do."""

    def __init__(self, seat, *more):
        super().__init__(replace(seat, index=0, of=1), *more)


class Heard:
    def __init__(self):
        self.lines, self.ends = [], []

    def event(self, card, cell, text):
        self.lines.append((card, cell, text))

    def finished(self, cell, outcome):
        self.ends.append((cell, outcome.verdict))


@pytest.fixture(scope="module")
def cluster():
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the actors cannot import this file
    with dispatch.attached(None):
        yield


@pytest.fixture
def run(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(dispatch, "Worker", Bare)
    store, info = Store.open(tmp_path / "results"), RunInfo("run-1", "c0ffee", False)

    def go(scripts, attempts=2, slots=2, needs=Needs()):
        cells = [
            Cell(f"cell-{i}", Scripted(str(tmp_path / f"log-{i}"), tuple(script)), None,
                 PinSpec("p", PinConfig(version="0.29.0", flavour="cpu")), None, None, (), {}, needs, 1, "5e")
            for i, script in enumerate(scripts)]
        heard = Heard()
        outcomes = dispatch.run_cells(cells, info, store, heard, cpu_slots=slots, attempts=attempts,
                                      cache=str(tmp_path / "cache"), opened=lambda: None)
        rows = sorted(store.read("cells").to_pylist(), key=lambda r: (r["cell"], r["attempt"]))
        return outcomes, rows, heard, store

    return go


def test_cells_run_on_both_slots_and_each_is_committed_with_its_rows(run):
    outcomes, rows, heard, store = run([["pass"], ["fail"], ["pass"]])
    assert {c: o.verdict for c, o in outcomes.items()} == {
        "cell-0": Verdict.PASS, "cell-1": Verdict.FAIL, "cell-2": Verdict.PASS}
    assert [(r["verdict"], r["attempt"], r["final"]) for r in rows] == [("PASS", 1, True), ("FAIL", 1, True), ("PASS", 1, True)]
    assert sorted(r["cell"] for r in store.read("measurements").to_pylist()) == ["cell-0", "cell-1", "cell-2"]
    assert sorted(heard.ends) == [("cell-0", Verdict.PASS), ("cell-1", Verdict.FAIL), ("cell-2", Verdict.PASS)]
    assert {text for _, _, text in heard.lines} >= {"doing pass", "doing fail"}


def test_an_error_is_tried_again_and_every_attempt_is_kept(run):
    outcomes, rows, _, _ = run([["error", "pass"]])
    assert outcomes["cell-0"].verdict is Verdict.PASS
    assert [(r["attempt"], r["verdict"], r["final"]) for r in rows] == [(1, "ERROR", False), (2, "PASS", True)]
    assert len({r["card"] for r in rows}) == 2  # another card first


def test_an_actor_that_is_killed_is_an_error_and_its_seat_goes_on(run):
    outcomes, rows, heard, store = run([["die", "pass"], ["pass"], ["pass"]], slots=1)
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    dead = rows[0]
    assert (dead["cell"], dead["attempt"], dead["verdict"], dead["reason"]) == ("cell-0", 1, "ERROR", "actor-died")
    assert dead["card"].startswith("CPU-")
    kept = [(r["cell"], r["attempt"]) for r in store.read("measurements").to_pylist()]
    assert ("cell-0", 2) in kept


def test_the_verb_keeps_rays_pages_about_the_dead_off_the_terminal(tmp_path):
    script = ("import sys; from farm import cli; sys.argv = ['matrix.py', 'nowhere.yaml']\n"
              "try: cli.matrix_entry()\n"
              "except SystemExit: from ray._private.ray_logging import stdout_deduplicator as printed\n"
              "for words in sys.stdin: print(printed.deduplicate({'pid': 'raylet', 'lines': [words]})[0]['lines'])")
    said = ("Raylet is terminated. Termination is unexpected. [state-dump]\nThe node x has been marked dead because the "
            "detector has missed too many heartbeats\n"
            "A worker died or was killed while executing a task by\n1 Workers killed due to memory pressure\n")
    done = subprocess.run([sys.executable, "-c", script], input=said, capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(PROJECT)}, check=False)
    assert done.stdout.splitlines()[-4:] == ["[]", "[]", "[]", "['1 Workers killed due to memory pressure\\n']"], done


def test_attempts_have_an_end(run):
    outcomes, rows, _, _ = run([["die", "die", "die"]], attempts=3)
    assert (outcomes["cell-0"].verdict, outcomes["cell-0"].reason) == (Verdict.ERROR, Reason.ACTOR_DIED)
    assert [r["final"] for r in rows] == [False, False, True]


def test_rows_that_the_store_refuses_end_as_error_not_as_a_lost_run(run):
    outcomes, rows, _, _ = run([["bad-row"], ["pass"]], attempts=1)
    assert outcomes["cell-0"].verdict is Verdict.ERROR
    assert "its rows were refused" in rows[0]["detail"]
    assert outcomes["cell-1"].verdict is Verdict.PASS


def test_a_cell_that_no_card_can_run_is_skipped_with_the_reason(run):
    outcomes, rows, heard, _ = run([["pass"]], needs=Needs(cuda=True))
    assert (outcomes["cell-0"].verdict, outcomes["cell-0"].detail) == (Verdict.SKIP, "needs a CUDA card")
    assert (rows[0]["verdict"], rows[0]["reason"]) == ("SKIP", "needs-unmet")


def test_attempts_of_a_resumed_run_are_numbered_on(run):
    run([["error"]], attempts=1)
    _, rows, _, _ = run([["error", "pass"]], attempts=1)
    assert [(r["attempt"], r["verdict"]) for r in rows] == [(1, "ERROR"), (2, "PASS")]


def test_the_actors_are_gone_when_the_run_is(run, tmp_path):
    run([["pass"], ["pass"]])
    pids = {int(p) for i in (0, 1) for p in (tmp_path / f"log-{i}").read_text().split()}
    deadline = time.monotonic() + 10
    while (alive := {p for p in pids if psutil.pid_exists(p)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive == set()


def test_a_fail_and_a_pass_of_the_same_cell_are_flaky(run):
    run([["fail"]])
    outcomes, rows, _, _ = run([["fail", "pass"]])
    assert (outcomes["cell-0"].verdict, outcomes["cell-0"].reason) == (Verdict.FAIL, Reason.FLAKY)
    assert [(r["attempt"], r["verdict"], r["reason"]) for r in rows] == [(1, "FAIL", "as-expected"), (2, "FAIL", "flaky")]


def test_an_attempt_that_an_earlier_life_of_the_run_made_counts(run):
    run([["error"]], attempts=1)
    outcomes, rows, _, _ = run([["error", "error", "pass"]], attempts=2)
    assert [(r["attempt"], r["verdict"]) for r in rows] == [(1, "ERROR"), (2, "ERROR")]
    assert outcomes["cell-0"].verdict is Verdict.ERROR
    assert len({r["card"] for r in rows}) == 2  # the second on the card that has not had it


def test_a_job_that_leaves_its_thread_is_an_error_not_a_wait_without_end(run):
    outcomes, rows, _, _ = run([["exit", "pass"]], slots=1)
    assert outcomes["cell-0"].verdict is Verdict.PASS
    assert (rows[0]["verdict"], rows[0]["reason"]) == ("ERROR", "farm-error")


def cards(store):
    return [(r["event"], r["reason"]) for r in store.read("cards").to_pylist()]


def test_cards_of_a_run_are_recorded_and_told(run):
    _, _, heard, store = run([["pass"], ["pass"]])
    rows = sorted(store.read("cards").to_pylist(), key=lambda r: r["card_name"])
    assert [(r["event"], r["run"], r["card_name"]) for r in rows] == [("ready", "run-1", f"cpu slot {n}/2") for n in (1, 2)]
    assert all(r["card"].startswith("CPU-") and r["host"] and r["at_utc"] and r["until_utc"] is None for r in rows)
    assert sum(text.startswith("ready on ") for _, _, text in heard.lines) == 2


def test_a_card_in_quarantine_is_out_and_its_cells_move_on(run, monkeypatch):
    monkeypatch.setattr(dispatch, "Worker", Quarantining)
    outcomes, rows, _, store = run([["error", "pass"], ["pass"], ["pass"], ["pass"]])
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    assert cards(store) == [("ready", None), ("ready", None), ("quarantined", "card-unhealthy")]
    out = store.read("cards").to_pylist()[-1]
    assert out["until_utc"] > utc_now() + timedelta(minutes=50)
    failed = next(r for r in rows if r["verdict"] == "ERROR")
    assert failed["card"] == out["card"] != next(r for r in rows if r["cell"] == "cell-0" and r["final"])["card"]


@pytest.mark.parametrize(
    ("kind", "reason", "attempts"), [(Quarantining, "card-unhealthy", [1, 2]), (Quarantined, "card-lost", [1])],
    ids=["in-this-run", "before-it"])
def test_without_a_card_left_the_end_names_the_quarantine(run, monkeypatch, kind, reason, attempts):
    monkeypatch.setattr(dispatch, "Worker", kind)
    outcomes, rows, _, store = run([["error"]], slots=1, attempts=3)
    assert (outcomes["cell-0"].verdict, outcomes["cell-0"].reason) == (Verdict.ERROR, Reason.NO_CARD)
    assert f"in quarantine until {(utc_now() + timedelta(hours=1)):%F}" in outcomes["cell-0"].detail
    assert cards(store)[-1] == ("quarantined", reason)
    assert [r["attempt"] for r in rows] == attempts


def test_cells_that_found_no_card_are_run_by_a_resume(run, monkeypatch):
    monkeypatch.setattr(dispatch, "Worker", Quarantined)
    _, rows, heard, store = run([["pass"], ["pass"]], slots=1)
    assert [(r["reason"], r["final"]) for r in rows] == [("no-card", False)] * 2
    assert len(heard.ends) == 2  # of this run they are the end all the same
    monkeypatch.setattr(dispatch, "Worker", Bare)  # the card is well again
    begun = resumption.resumed(store, "run-1", promised.promise([], (), {}), None)
    assert begun.done == {}
    outcomes, rows, _, _ = run([["pass"], ["pass"]], slots=1)
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    assert [(r["attempt"], r["verdict"], r["final"]) for r in rows] == [(1, "ERROR", False), (2, "PASS", True)] * 2


def test_a_quarantine_that_ends_while_the_run_lasts_brings_the_card_back(run, monkeypatch):
    monkeypatch.setattr(dispatch, "Worker", QuarantiningBriefly)
    outcomes, _, _, store = run([["error", "pass"], ["slow"]])
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    assert cards(store) == [("ready", None), ("ready", None), ("quarantined", "card-unhealthy"), ("joined", None)]


def test_a_card_has_one_seat_and_the_other_is_told_why_it_is_left_out(run, monkeypatch):
    monkeypatch.setattr(dispatch, "Worker", Twins)
    outcomes, rows, _, store = run([["pass"], ["pass"]])
    assert {o.verdict for o in outcomes.values()} == {Verdict.PASS}
    assert len({r["card"] for r in rows}) == 1
    assert sorted(cards(store)) == [("left-out", None), ("ready", None)]
    assert "FARM_NODE" in next(r["detail"] for r in store.read("cards").to_pylist() if r["event"] == "left-out")


def test_the_events_of_an_earlier_life_of_the_run_are_kept(run):
    run([["pass"]], slots=1)
    _, _, _, store = run([["error", "pass"]], slots=1)
    assert cards(store) == [("ready", None), ("ready", None)]
