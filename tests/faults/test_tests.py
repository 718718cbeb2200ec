"""Processes of the unit job are killed from outside: what becomes of the tests, of the verdict, and of the processes."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farm import sweep
from farm.bench import Arm, Card, Suite
from farm.lifeline import descendants, processes_of_run
from farm.records import Outcome, Reason, Verdict
from farm.testrun import TestRunSpec, run_suite
from jobs.unit import Unit

WAIT_S = 60.0
SUITE = Suite("core", "series", workers=1, timeout_s=60.0, deadline_s=240.0)
# The first time that the patched arm runs it, it waits to be killed.
TESTS = """
import os, time, vllm
def test_before(): ...
def test_held():
    if os.environ["ARM"] == "patched":
        try:
            held = os.open(os.environ["HELD"], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return
        os.write(held, str(os.getpid()).encode())
        time.sleep(50)
def test_after(): ...
"""


class Bench:
    """Two arms of one tree's text, in real pytest processes."""

    card = Card("c", "cpu", "cpu", "here")
    pin, version, profile, cell = "0.29.0-cpu", "0.29.0", None, "unit-0.29.0-cpu-1"
    rng = random.Random(0)
    arms = {name: Arm(name, f"tree-{name}", ()) for name in ("baseline", "patched")}

    def __init__(self, root: Path, run: str) -> None:
        self.root, self.run, self.turns = root, run, 0
        (root / "tree" / "vllm").mkdir(parents=True)
        (root / "tree" / "vllm" / "__init__.py").touch()
        (root / "state").mkdir()
        self.records = sweep.records(root / "state")

    def progress(self, text: str) -> None:
        pass

    def pytest(self, arm: str, suite: Suite):
        self.turns += 1
        scratch = self.root / f"s{self.turns}"
        scratch.mkdir()
        return run_suite(TestRunSpec(
            python=Path(sys.executable), tree_root=self.root / "tree", suite=suite, scratch=scratch, records=self.records,
            env={"PATH": os.environ["PATH"], "HOME": str(self.root), "ARM": arm, "HELD": str(self.root / "held"),
                 "FARM_RUN": self.run}, series_tests={"test_x.py": TESTS.encode()}), self.progress)


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path, f"run-{os.getpid()}-{time.monotonic_ns()}")
    yield made
    assert processes_of_run(made.run) == [], "processes are left"
    assert list(made.records.iterdir()) == [], "records are left"


def worker(held: int) -> int:
    return held


def controller(held: int) -> int:
    return _parent(held)


def supervisor(held: int) -> int:
    return _parent(_parent(held))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.faults
@pytest.mark.parametrize(("whom", "verdict", "reason", "fates"), [
    (worker, Verdict.PASS, Reason.FLAKY, {"test_before": "passed", "test_held": "crashed", "test_after": "passed"}),
    (controller, Verdict.ERROR, Reason.TESTS_CRASHED, {"test_held": "crashed", "test_after": "missing"}),
    (supervisor, Verdict.ERROR, Reason.TESTS_CRASHED, {"test_held": "crashed", "test_after": "missing"}),
], ids=["worker", "controller", "supervisor"])
def test_a_killed_process_of_the_tests_is_never_a_verdict_against_the_tree(bench, whom: Callable, verdict, reason, fates):
    hit_at: list[float] = []

    def strike() -> None:
        deadline = time.monotonic() + WAIT_S
        while not ((held := bench.root / "held").exists() and held.read_text()):
            assert time.monotonic() < deadline, "the test was not begun"
            time.sleep(0.02)
        pid = whom(int(held.read_text()))
        assert pid in descendants(os.getpid())
        os.kill(pid, signal.SIGKILL)
        hit_at.append(time.monotonic())

    threading.Thread(target=strike, daemon=True).start()
    noticed_at = None
    events = []
    for event in Unit(suites=(SUITE,)).run(bench):
        events.append(event)
        if noticed_at is None and not isinstance(event, Outcome) and event.record.outcome == "crashed":
            noticed_at = time.monotonic()
    outcome = events[-1]
    print(f"{whom.__name__} killed: {outcome.verdict.value} {outcome.reason.value}, noticed after "
          f"{noticed_at - hit_at[0]:.1f} s")
    seen = {e.record.nodeid.partition("::")[2]: e.record.outcome for e in events[:-1]
            if e.conditions["arm"] == "patched" and e.record.round == 0}
    assert fates.items() <= seen.items()
    assert (outcome.verdict, outcome.reason) == (verdict, reason), outcome.detail
    assert sum(e.conditions["arm"] == "baseline" and e.record.round == 0 for e in events[:-1]) == 3  # none lost
    assert noticed_at - hit_at[0] < 30.0
