"""Cells that need no vLLM, run by the real dispatch on real Ray actors: what the tests of dying actors and nodes share."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray

from farm import dispatch, worker
from farm.attempts import is_last_word
from farm.bench import Needs
from farm.config import PinConfig
from farm.evidence import RunInfo
from farm.lifeline import Supervised
from farm.plan import Cell, PinSpec
from farm.records import Measurement, Outcome, Reason, Tagged, Verdict
from farm.store import Store

CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], " \
        "start_new_session=True); time.sleep(300)"


@dataclass(frozen=True)
class Nap:
    """Says where it is (a line of JSON in `folder`), and sleeps; with `child` beside two supervised processes.

    On the node `slow_on` it takes five minutes; with a `gate` it ends when that file is there, two minutes later at most.
    """

    folder: str
    seconds: float
    child: bool = False
    slow_on: str = ""
    gate: str = ""
    name: str = "prefill"

    def run(self, bench):
        me = {"cell": bench.cell, "attempt": bench.attempt, "pid": os.getpid(), "node": os.environ.get("FARM_NODE"),
              "card": bench.card.uuid, "cache": str(bench.cache), "t": time.time()}
        with open(Path(self.folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as told:
            told.write(json.dumps(me) + "\n")
        yield Tagged(Measurement("kv_peak", 0.5, "ratio"))
        with bench.children(self.child):
            until = time.monotonic() + (300.0 if self.slow_on and self.slow_on == me["node"] else self.seconds)
            while time.monotonic() < until or (
                    self.gate and not Path(self.gate).exists() and time.monotonic() < until + 120.0):
                time.sleep(0.05)
        yield Outcome(Verdict.PASS, Reason.AS_EXPECTED, "rested")


class Bench:
    """What a Nap needs of one."""

    def __init__(self, cell, attempt, card, cache, run, progress):
        self.cell, self.attempt, self.card, self.cache, self.progress = cell, attempt, card, cache, progress
        self._run = run

    @contextmanager
    def children(self, wanted):
        if not wanted:
            yield
            return
        marks = {"PATH": os.environ["PATH"], "FARM_RUN": self._run, "FARM_CELL": self.cell}
        with Supervised.start([sys.executable, "-c", CHILD], env=marks, cwd=self.cache, stdout_path=self.cache / "child.log"):
            yield


class Bare(worker.Worker):
    """A worker whose bench is the one above: no pin, no tree, no gate."""

    def _measure(self, cell, evidence, spans, events):
        bench = Bench(cell.id, evidence.attempt, self._card, self._workshop.root, evidence.info.run,
                      lambda text: events.put(worker.Progress(text)))
        return driven(cell.job, bench, evidence, events)


def driven(job, bench, evidence, events):
    """Run a job on a bench, send its rows, and return its outcome."""
    outcome = None
    for event in job.run(bench):
        if isinstance(event, Outcome):
            outcome = event
        else:
            table, row = evidence.row(event)
            events.put(worker.Rows(table, [row]))
    return outcome


class Heard:
    """A watcher that remembers, with the time of each line."""

    def __init__(self):
        self.lines, self.ends = [], Counter()

    def event(self, card, cell, text):
        self.lines.append((time.time(), card, cell, text))

    def finished(self, cell, outcome):
        self.ends[cell] += 1

    def when(self, words):
        """When the first line came that holds the words."""
        return next((t for t, _, _, text in self.lines if words in text), None)


@dataclass
class Room:
    """A run to be: its folder, its store, and who listens."""

    folder: Path
    run: str = "run-1"

    def __post_init__(self):
        self.store, self.heard, self.told = Store.open(self.folder / "results"), Heard(), self.folder / "told"
        self.told.mkdir(exist_ok=True)

    def cells(self, count, seconds, child=False):
        pin = PinSpec("p", PinConfig(version="0.29.0", flavour="cpu"))
        return [Cell(f"cell-{i:03}", Nap(str(self.told), seconds, child), None, pin, None, None, (), {}, Needs(), i, "5e")
                for i in range(count)]

    def go(self, cells, *, slots, attempts, patience=dispatch.Patience(), cache="cache"):
        return dispatch.run_cells(cells, RunInfo(self.run, "c0ffee", False), self.store, self.heard, cpu_slots=slots,
                                  attempts=attempts, cache=str(self.folder / cache), opened=lambda: None, patience=patience)

    def said(self):
        """What cells said of where they ran, in the order of time."""
        lines = [line for file in self.told.glob("*.jsonl") for line in file.read_text(encoding="utf-8").splitlines()]
        return sorted(map(json.loads, lines), key=lambda said: said["t"])

    def rows(self, table="cells"):
        return self.store.read(table).to_pylist()

    def one_verdict_each(self, cells, outcomes):
        """Every cell has one last row, final unless it wanted a card, numbered attempts up to it, one end that was told, and
        the outcome that came back."""
        rows = self.rows()
        for cell in cells:
            mine = sorted((r for r in rows if r["cell"] == cell.id), key=lambda r: r["attempt"])
            assert [r["attempt"] for r in mine] == list(range(1, len(mine) + 1)), cell.id
            assert [r["final"] for r in mine] == [False] * (len(mine) - 1) + [is_last_word(outcomes[cell.id])], cell.id
            assert all(r["verdict"] == "ERROR" for r in mine[:-1]), cell.id
            assert mine[-1]["verdict"] == outcomes[cell.id].verdict.value, cell.id
        assert set(outcomes) == {cell.id for cell in cells} == set(self.heard.ends)
        assert set(self.heard.ends.values()) == {1}


def by_value():
    """The actors cannot import this file: its classes travel whole."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def end(pid, started, number=signal.SIGKILL):
    """Signal a process that we started, if it is still the same one; whether it was."""
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - started) < 0.1:
            process.send_signal(number)
            return True
    except psutil.NoSuchProcess:
        pass
    return False


def wait_for(condition, seconds, what):
    """Wait until a condition holds; how long it took."""
    began = time.monotonic()
    while not (found := condition()):
        if time.monotonic() - began > seconds:
            pytest.fail(f"after {seconds} s: {what}")
        time.sleep(0.05)
    return found
