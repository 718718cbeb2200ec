"""The border of a cell: whatever a job does, the stream ends with exactly one outcome."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from playedcard import FILE, PlayedWorker, play

from farm import worker
from farm.bench import Card, Needs
from farm.cardlock import CardLock
from farm.cards import Reading
from farm.config import PinConfig
from farm.environment import Environment
from farm.errors import BootFailure, InvalidMeasurement, SkipCell, TreeFailure
from farm.evidence import Policy, RunInfo
from farm.plan import Cell, PinSpec
from farm.records import Measurement, Outcome, PatchRow, Reason, Tagged, Verdict
from farm.sweep import Swept
from farm.worker import Ended, Progress, Rows, Seat, Worker

SEAT = Seat("node", "cpu", 0, 1)
FINE = Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine")
PEAK = Tagged(Measurement("kv_peak", 0.5, "ratio"), {"arm": "patched"})


class ScriptedJob:
    """Yields what it is given, raises what is an exception."""

    name = "prefill"

    def __init__(self, *script):
        self.script = script

    def run(self, bench):
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, str):
                bench.progress(step)
            else:
                yield step


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    def prepare(workshop, cell, card, evidence, spans, *, emit, progress, keeper, policy):
        emit(Tagged(PatchRow("a.patch", "1", 0, 1, 0, 0, ("x.py",)), {"arm": "patched"}))
        return SimpleNamespace(progress=progress, prove_trees=lambda: None, moment=None)

    monkeypatch.setattr(worker.LiveBench, "prepare", prepare)
    monkeypatch.setattr(worker.sweep, "sweep", lambda state: run.swept)
    monkeypatch.setenv("FARM_HOST_STATE", str(tmp_path))
    monkeypatch.setenv(FILE, str(tmp_path))

    def run(*script, needs=Needs(), policy=Policy()):
        cell = Cell("prefill-x", ScriptedJob(*script), None, PinSpec("p", PinConfig(version="0.29.0", flavour="cpu")), None,
                    None, (), {}, needs, 1, "5e")
        return list(PlayedWorker(SEAT, RunInfo("run-1", None, None), str(tmp_path), policy).run(cell, 1))

    run.card, run.swept = play(tmp_path, 0, 1), Swept()
    return run


@pytest.mark.parametrize(
    ("script", "verdict", "reason", "says"),
    [
        ((PEAK, FINE), Verdict.PASS, Reason.AS_EXPECTED, "fine"),
        ((PEAK, TreeFailure("no such name")), Verdict.FAIL, Reason.TREE_FAILED, "no such name"),
        ((InvalidMeasurement("cached", reason=Reason.PROMPT_CACHED),), Verdict.INVALID, Reason.PROMPT_CACHED, "cached"),
        ((SkipCell("no sm89"),), Verdict.SKIP, Reason.NEEDS_UNMET, "no sm89"),
        ((BootFailure("died", log_tail="last words"),), Verdict.ERROR, Reason.BOOT_DIED, "died\nlast words"),
        ((ValueError("surprise"),), Verdict.ERROR, Reason.FARM_ERROR, "ValueError: surprise (test_worker.py:"),
        ((PEAK,), Verdict.INVALID, Reason.MISSING_ROWS, "ended without an outcome"),
        ((Tagged(Measurement("kv_peak", 0.5, "ratio"), {"no_such_column": 1}), FINE), Verdict.ERROR, Reason.FARM_ERROR,
         "no column no_such_column"),
    ],
    ids=["outcome", "tree-failure", "invalid", "skip", "boot-failure", "surprise", "no-outcome", "bad-row"],
)
def test_the_stream_ends_with_one_outcome(attempt, script, verdict, reason, says):
    *before, last = attempt(*script)
    assert isinstance(last, Ended)
    assert not any(isinstance(event, Ended) for event in before)
    assert (last.outcome.verdict, last.outcome.reason) == (verdict, reason)
    assert says in last.outcome.detail
    assert (last.row["verdict"], last.row["run"], last.row["cell"]) == (verdict.value, "run-1", "prefill-x")


def test_rows_and_progress_come_before_the_end_in_their_order(attempt):
    events = attempt("booting", PEAK, FINE)
    assert [type(e).__name__ for e in events] == ["Rows", "Progress", "Progress", "Rows", "Ended"]
    assert events[0] == Rows("patches", events[0].rows)
    assert events[1:3] == [Progress("probing the card"), Progress("booting")]
    assert (events[3].table, events[3].rows[0]["value"], events[3].rows[0]["arm"]) == ("measurements", 0.5, "patched")
    assert events[3].rows[0]["card"].startswith("CPU-")


def test_what_an_earlier_life_left_is_told_once(attempt):
    attempt.swept = Swept(("ended process 7",), ("left alone: process 8",))
    events = attempt(FINE)
    assert events[:2] == [Progress("ended process 7"), Progress("left alone: process 8")]
    assert sum(isinstance(e, Progress) for e in events) == 3
    attempt.swept = Swept(("ended process 9",), ("left alone: process 8",))  # the next actor of this run and host
    told = [e.text for e in attempt(FINE) if isinstance(e, Progress)]
    assert told == ["ended process 9", "probing the card"]


@pytest.mark.parametrize(("isolation", "says"), [("bwrap", "No permissions"), ("none", None)])
def test_a_card_says_where_its_machine_can_make_no_sandbox(tmp_path, monkeypatch, attempt, isolation, says):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = PlayedWorker(SEAT, RunInfo("run-1", None, None), str(tmp_path), Policy(isolation=isolation)).card().unsafe
    assert found is None if says is None else says in found


def test_rows_of_a_job_that_fails_later_are_kept(attempt):
    events = attempt(PEAK, ValueError("late"))
    assert [e.table for e in events if isinstance(e, Rows)] == ["patches", "measurements"]


# --- the card of an attempt -----------------------------------------------------------------


def nobody(holder):
    pass


@pytest.mark.parametrize(("played", "script", "verdict", "reason", "says"), [
    ({"probe": "failed"}, (FINE,), Verdict.ERROR, Reason.CARD_UNHEALTHY, "failed its health probe: played: failed"),
    ({"lost": True}, (FINE,), Verdict.ERROR, Reason.CARD_LOST, "no longer answers NVML"),
    ({"clients": [1]}, (FINE,), Verdict.ERROR, Reason.CARD_BUSY, "process 1 ("),
    ({"probe": "unknown"}, (FINE,), Verdict.PASS, Reason.AS_EXPECTED, "fine"),
], ids=["probe-fails", "lost", "foreign-process", "probe-cannot-tell"])
def test_a_card_is_looked_at_before_its_first_use(attempt, tmp_path, monkeypatch, played, script, verdict, reason, says):
    made = PlayedWorker(SEAT, RunInfo("run-1", None, None), str(tmp_path), Policy(busy_wait_s=0))
    attempt.card.say(**played)
    monkeypatch.setattr(__name__ + ".PlayedWorker", lambda *_: made)
    last = attempt(*script)[-1]
    assert (last.outcome.verdict, last.outcome.reason) == (verdict, reason)
    assert says in last.outcome.detail


class Breaks(ScriptedJob):
    """The card breaks while the job runs."""

    def __init__(self, card, *script, **facts):
        super().__init__(*script)
        self._card, self._facts = card, facts

    def run(self, bench):
        self._card.say(**self._facts)
        yield from super().run(bench)


@pytest.mark.parametrize("end", [
    TreeFailure("wrong tokens"), BootFailure("died"), Outcome(Verdict.FAIL, Reason.CHANGED, "lower"),
], ids=["fail-raised", "error", "fail-said"])
def test_what_ends_on_a_card_that_then_fails_its_probe_is_no_verdict_about_a_patch(attempt, monkeypatch, end):
    monkeypatch.setattr(__name__ + ".ScriptedJob", lambda *script: Breaks(attempt.card, *script, probe="failed"))
    last = attempt(end)[-1]
    assert (last.outcome.verdict, last.outcome.reason) == (Verdict.ERROR, Reason.CARD_UNHEALTHY)
    assert "So it is no evidence that before this the attempt ended" in last.outcome.detail
    assert last.row["reason"] == "card-unhealthy" and last.quarantine is None


def test_a_cell_that_uses_no_card_waits_for_none_and_probes_none(attempt, tmp_path):
    attempt.card.say(probe="failed")
    with CardLock(tmp_path, attempt.card.card.uuid).held("other", "c", wait_s=0, waiting=nobody):
        events = attempt(FINE, needs=Needs(own_card=False))
        assert events[-1].outcome.verdict is Verdict.PASS
        busy = attempt(FINE, policy=Policy(busy_wait_s=0))[-1]
    assert (busy.outcome.reason, busy.row["card"]) == (Reason.CARD_BUSY, attempt.card.card.uuid)
    assert "run other, cell c" in busy.outcome.detail


@pytest.mark.parametrize(("busy_wait_s", "verdict"), [(30.0, Verdict.PASS), (0.6, Verdict.ERROR)], ids=["had-it-then", "never"])
def test_the_time_that_an_attempt_waits_for_its_card_is_not_its_own(attempt, tmp_path, busy_wait_s, verdict):
    go = threading.Event()
    with ThreadPoolExecutor(1) as pool, CardLock(tmp_path, attempt.card.card.uuid).held("other", "c", wait_s=0, waiting=nobody):
        begun = time.monotonic()
        ended = pool.submit(lambda: (go.set(), attempt(FINE, policy=Policy(busy_wait_s=busy_wait_s)))[1][-1])
        go.wait(10)
        if verdict is Verdict.ERROR:
            ended.result(60)
        time.sleep(0.3)
        held_s = time.monotonic() - begun
    row = ended.result(60).row
    assert row["verdict"] == verdict.value
    assert 0.2 < row["waited_s"] < held_s + 10 and row["wall_s"] < 10
    if verdict is Verdict.ERROR:
        assert row["waited_s"] >= busy_wait_s and row["wall_s"] < busy_wait_s


def test_a_card_in_quarantine_is_not_used_and_the_driver_is_told(attempt):
    attempt.card.say(probe="failed")
    first, second, third = (attempt(FINE)[-1] for _ in range(3))
    assert first.quarantine is None
    assert second.quarantine.reason is Reason.CARD_UNHEALTHY and len(second.quarantine.errors) == 2
    assert third.quarantine == second.quarantine  # another process's: as its journal has it
    assert "in quarantine until" in third.outcome.detail


@pytest.mark.parametrize("site", [None, "/opt/vllm/site"], ids=["built", "installed"])
def test_the_probe_of_a_gpu_runs_in_the_pins_environment_without_any_tree(tmp_path, monkeypatch, site):
    gpu = Card("GPU-1", "RTX 3090", "cuda", "host-1")
    monkeypatch.setattr(worker.cards, "visible_gpu", lambda: gpu)
    monkeypatch.setattr(worker.cards, "reading", lambda card: Reading())
    monkeypatch.setattr(worker.sweep, "sweep", lambda state: Swept())
    monkeypatch.setenv("FARM_HOST_STATE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    made = Worker(Seat("node", "cuda", 0, 1), RunInfo("run-1", None, None), str(tmp_path))
    environment = Environment(Path("/env/bin/python"), {}, site and Path(site))
    monkeypatch.setattr(type(made._workshop.pins), "environment", lambda self, pin, progress: environment)
    cell = Cell("prefill-x", ScriptedJob(), None, PinSpec("p", PinConfig(version="0.29.0", flavour="cuda")), None, None, (), {},
                Needs(), 1, "5e")
    found = made._interpreter(cell, lambda text: None)
    assert found.python == Path("/env/bin/python")
    assert (found.env["PYTHONPATH"], found.env["CUDA_VISIBLE_DEVICES"]) == (site or "", "GPU-1")
    assert (found.env["FARM_RUN"], found.env["FARM_CELL"]) == ("run-1", "prefill-x")
    assert "HF_TOKEN" not in found.env
