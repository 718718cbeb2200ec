"""The border of a cell: whatever a job does, the stream ends with exactly one outcome."""

from types import SimpleNamespace

import pytest

from farm import worker
from farm.bench import Needs
from farm.config import PinConfig
from farm.errors import BootFailure, InvalidMeasurement, SkipCell, TreeFailure
from farm.evidence import RunInfo
from farm.plan import Cell, PinSpec
from farm.records import Measurement, Outcome, PatchRow, Reason, Tagged, Verdict
from farm.worker import Ended, Progress, Rows, Seat, Worker

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
    def prepare(workshop, cell, card, evidence, spans, *, emit, progress):
        emit(Tagged(PatchRow("a.patch", "1", 0, 1, 0, 0, ("x.py",)), {"arm": "patched"}))
        return SimpleNamespace(progress=progress, prove_trees=lambda: None, moment=None)

    monkeypatch.setattr(worker.LiveBench, "prepare", prepare)

    def run(*script):
        cell = Cell("prefill-x", ScriptedJob(*script), None, PinSpec("p", PinConfig(version="0.29.0", flavour="cpu")), None,
                    None, (), {}, Needs(), 1, "5e")
        made = Worker(Seat("node", "cpu", 0, 1), RunInfo("run-1", None, None), str(tmp_path))
        return list(made.run(cell, 1))

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
    assert [type(e).__name__ for e in events] == ["Rows", "Progress", "Rows", "Ended"]
    assert events[0] == Rows("patches", events[0].rows)
    assert events[1] == Progress("booting")
    assert (events[2].table, events[2].rows[0]["value"], events[2].rows[0]["arm"]) == ("measurements", 0.5, "patched")
    assert events[2].rows[0]["card"].startswith("CPU-")


def test_rows_of_a_job_that_fails_later_are_kept(attempt):
    events = attempt(PEAK, ValueError("late"))
    assert [e.table for e in events if isinstance(e, Rows)] == ["patches", "measurements"]
