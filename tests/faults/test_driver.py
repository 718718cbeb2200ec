"""`kill -9` of the driver, and what `--resume` then makes of it: nothing of ours alive, nothing committed lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from toyrun import Toy, attempts, evidence, until

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(400)]

SEED = int(os.environ.get("FARM_FAULT_SEED", "20"))
CELLS = 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    toy = Toy.make(tmp_path_factory.mktemp("whole"), cache, cells=CELLS, seconds=2.0)
    ended = toy.finish()
    assert ended.code == 1, ended.out
    return evidence(toy.store, toy.run)


@pytest.fixture
def toy(tmp_path, cache):
    made = Toy.make(tmp_path / "toy", cache, cells=CELLS, seconds=2.0)
    yield made
    made.close()


def test_kill_9_leaves_an_interrupted_run_and_nothing_alive(toy, whole, tmp_path):
    process = toy.start(env={"TOY_GATE": str(tmp_path / "never"), "TOY_GATE_FROM": "2"})
    process.until(r": PASS .* \(1 of ")
    assert "\trunning\t" in toy.farm("runs").out
    refused = toy.finish("--resume", toy.run)
    assert refused.code == 3, refused.out
    assert f"it is still running on {os.uname().nodename}, pid {process.pid}" in refused.out

    process.signal(signal.SIGKILL)
    process.end(timeout_s=30)
    noticed = time.monotonic()
    listed = toy.farm("runs").out
    committed = attempts(toy.store, toy.run)
    assert "\tinterrupted\t" in listed and f"{len(committed)} of {CELLS}" in listed, listed
    print(f"\nkill -9 of the driver: shown as interrupted at the next look ({time.monotonic() - noticed:.1f} s, a process's "
          f"start), nothing alive {process.gone_s():.1f} s later, {len(committed)} of {CELLS} cells committed")

    resumed = toy.finish("--resume", toy.run)
    assert resumed.code == 1, resumed.out
    assert evidence(toy.store, toy.run) == whole
    assert [a for a in attempts(toy.store, toy.run) if a in committed] == committed

    again = toy.finish("--resume", toy.run)
    assert again.code == 1 and "is finished, all 4 cells are committed; nothing is run" in again.out, again.out
    assert "PASS" in again.out and ": attempt " not in again.out


def test_kill_9_at_a_random_moment_of_the_end(toy, whole):
    """Between the last cell and the end: finishing, Ray's shutdown, compaction, the report."""
    process = toy.start()
    process.until(rf"\({CELLS} of {CELLS}\)")
    wait = random.Random(SEED).uniform(0.0, 3.0)
    print(f"\nseed {SEED}: kill -9 {wait:.2f} s after the last cell")
    time.sleep(wait)
    process.signal(signal.SIGKILL)
    process.end(timeout_s=30)
    print(f"nothing alive {process.gone_s():.1f} s later; {toy.farm('runs').out.splitlines()[-1]}")
    resumed = toy.finish("--resume", toy.run)
    assert resumed.code == 1 and "attempt 1" not in resumed.out, resumed.out
    assert evidence(toy.store, toy.run) == whole


@pytest.mark.parametrize("phase", ["cluster", "compaction"])
def test_kill_9_in_a_phase(toy, whole, phase, tmp_path):
    marker = tmp_path / "there"
    process = toy.start(env={"TOY_PAUSE": phase, "TOY_PAUSE_S": "5", "TOY_MARKER": str(marker)})
    until(marker.exists, 120)
    process.signal(signal.SIGKILL)
    process.end(timeout_s=30)
    print(f"\nkill -9 in {phase}: nothing alive {process.gone_s():.1f} s later")
    assert toy.finish("--resume", toy.run).code == 1
    assert evidence(toy.store, toy.run) == whole


def test_two_processes_do_not_drive_one_run(toy, tmp_path):
    """Both are asked to resume at the same time: one does, the other says so and leaves."""
    process = toy.start(env={"TOY_GATE": str(tmp_path / "never"), "TOY_GATE_FROM": "0"})
    process.until(r": row 0")
    process.signal(signal.SIGKILL)
    process.end(timeout_s=30)
    process.gone_s()
    gate = tmp_path / "gate"
    both = [toy.start("--resume", toy.run, env={"TOY_GATE": str(gate), "TOY_GATE_FROM": "0"}) for _ in range(2)]
    until(lambda: any(p.popen.poll() is not None for p in both), 120)
    gate.touch()
    codes = sorted(p.end().code for p in both)
    assert codes == [1, 3], [p.out for p in both]
    (refused,) = [p for p in both if p.popen.returncode == 3]
    assert "driven by another process" in refused.out or "still running on" in refused.out, refused.out
    assert sorted({cell for cell, _, final in attempts(toy.store, toy.run) if final}) == sorted(
        cell for cell, _, final in attempts(toy.store, toy.run) if final)
