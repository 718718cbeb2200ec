"""Ctrl-C once and twice, SIGTERM, `ray job stop`: at random moments of a run, and in its first and last ones.

Each row: nothing of ours is left alive, the exit code is the one that is promised, the resume runs what is missing,
and the union of rows equals an uninterrupted run's, cell for cell.  FARM_FAULT_SEED chooses other moments.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from toyrun import Process, Toy, attempts, evidence, until

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(400)]

SEED = int(os.environ.get("FARM_FAULT_SEED", "20"))
CELLS, SECONDS = 6, 1.0
MOMENTS = 12


def ctrl_c(process: Process) -> None:
    process.signal(signal.SIGINT, group=True)


def ctrl_c_twice(process: Process) -> None:
    ctrl_c(process)
    time.sleep(random.Random(SEED).uniform(0.5, 1.0))  # a second press, not the echo of the first
    if process.popen.poll() is None:
        ctrl_c(process)


def term(process: Process) -> None:
    process.signal(signal.SIGTERM)


KINDS: list[Callable[[Process], None]] = [ctrl_c, ctrl_c_twice, term]
# The shell's word for a process that a signal ended: only before the farm's own handlers are there, while Python starts.
UNHANDLED = {-signal.SIGINT, -signal.SIGTERM}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """(an uninterrupted run's evidence, the lines that it prints up to its last verdict)."""
    toy = Toy.make(tmp_path_factory.mktemp("whole"), cache, cells=CELLS, seconds=SECONDS)
    toy.finish("--only", "c0")  # fetches the pin: nothing below prints a line about that
    ended = toy.finish()
    assert ended.code == 1, ended.out  # one toy fails
    run = max(toy.store.runs(), key=lambda r: len(attempts(toy.store, r)))
    lines = ended.out.splitlines()
    last = max(n for n, line in enumerate(lines, 1) if f"({CELLS} of {CELLS})" in line)
    print(f"\nuninterrupted: {ended.wall_s:.1f} s, {last} lines up to the last verdict, seed {SEED}")
    return evidence(toy.store, run), last


@pytest.fixture
def toy(tmp_path, cache):
    made = Toy.make(tmp_path / "toy", cache, cells=CELLS, seconds=SECONDS)
    yield made
    made.close()


def interrupted_and_resumed(toy: Toy, process: Process, interrupt: Callable[[Process], None], whole: dict) -> str:
    """Interrupt, and assert all that a row of this suite does; a line about what was seen."""
    began = time.monotonic()
    interrupt(process)
    ended = process.end(timeout_s=60)
    ended_s = time.monotonic() - began
    gone_s = process.gone_s()
    runs = toy.store.runs() if toy.results.is_dir() else []
    before = sorted({cell for cell, _, final in attempts(toy.store, runs[0]) if final}) if runs else []
    said = f"exit {ended.code} after {ended_s:.1f} s, nothing left {gone_s:.1f} s later, {len(before)} of {CELLS} committed"
    print(f"\n{interrupt.__name__}: {said}")
    if ended.code not in (130, *UNHANDLED):
        assert (ended.code, len(before)) == (1, CELLS), ended.out  # it was done already
    if ended.code in UNHANDLED:
        assert runs == [], ended.out
    if not runs:
        return said
    status = toy.store.read("runs", runs[0]).to_pylist()
    listed = toy.farm("runs")
    if ended.code == 130 and len(before) < CELLS:
        assert "\tinterrupted\t" in listed.out and f"{len(before)} of {CELLS if status else '?'}" in listed.out, listed.out
        assert f"--resume {runs[0]}" in listed.out
    resumed = toy.finish("--resume", runs[0])
    assert resumed.code == 1, resumed.out
    ran = {line.split("] ")[1].split(":")[0] for line in resumed.out.splitlines() if ": attempt " in line}
    assert len(ran) == CELLS - len(before) and not ran & set(before), "it ran what was committed, or not all else"
    assert evidence(toy.store, runs[0]) == whole
    assert len([1 for _, _, final in attempts(toy.store, runs[0]) if final]) == CELLS
    assert "\tfinished\t" in toy.farm("runs").out
    return said


def random_moment(number: int, lines: int) -> tuple[int, float]:
    """(lines of output to wait for, seconds after): spread over a run by what it has done, which no load shifts.

    The first falls while Python imports, two while Ray starts, and the others between the first line of a cell and the last.
    """
    dice = random.Random(SEED * 1000 + number)
    if number == 0:
        return 0, dice.uniform(0.0, 2.0)
    if number < 3:
        return 1, dice.uniform(0.0, 5.0)
    stratum = (number - 3 + dice.random()) / (MOMENTS - 3)
    return 2 + int(stratum * (lines - 2)), dice.uniform(0.0, 0.3)


@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_signal_at_a_random_moment(toy, whole, moment):
    rows, lines = whole
    line, after_s = random_moment(moment, lines)
    interrupt = KINDS[moment % len(KINDS)]
    print(f"\nmoment {moment}, seed {SEED}: {interrupt.__name__} {after_s:.2f} s after line {line} of {lines}")
    process = toy.start()
    until(lambda: process.popen.poll() is not None or process.out.count("\n") >= line, 120)
    time.sleep(after_s)
    interrupted_and_resumed(toy, process, interrupt, rows)


PHASES = ["preflight", "cluster", "compaction", "rendering"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_in_a_phase(toy, whole, phase, kind, tmp_path):
    marker = tmp_path / "there"
    process = toy.start(env={"TOY_PAUSE": phase, "TOY_PAUSE_S": "3", "TOY_MARKER": str(marker)})
    until(marker.exists, 120)
    interrupted_and_resumed(toy, process, kind, whole[0])
