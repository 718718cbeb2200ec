"""Runs of tests/faults/toyfarm.py as a user starts them: a process of its own, watched from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from fake_wheels import write_wheel

from farm.config import PROJECT
from farm.store import Store

HERE = Path(__file__).parent
GONE_S = 25.0  # a bound for a loaded machine; each test prints what it took
PATCH = "Say why.\n\n--- a/v1/pool.py\n+++ b/v1/pool.py\n@@ -1,3 +1,3 @@\n x0 = 0\n-x1 = 1\n+x1 = 10\n x2 = 2\n"
# What differs between two runs of the same thing: when, where, by whom, and how often it was cut off.
TIMES = ("started_utc", "ended_utc", "wall_s", "vllm_s", "spans", "run", "attempt", "card", "card_name", "project_commit",
         "project_dirty", "series", "other_clients", "temperature_c", "clock_sm_mhz", "clock_memory_mhz", "waited_s")
TABLES = ("cells", "boots", "measurements", "samples", "tests", "patches")


@dataclass(frozen=True)
class Ended:
    """A finished process."""

    code: int
    out: str
    wall_s: float


@dataclass(frozen=True)
class Toy:
    """A project folder with one matrix of toy cells, its results root, and the cache that toy projects share."""

    root: Path
    results: Path
    cache: Path
    mark: str  # value of TOY_MARK in the environment of all that its processes start
    started: list[Process] = field(default_factory=list)

    @classmethod
    def make(cls, root: Path, cache: Path, *, cells: int, seconds: float, weight: int = 10, slots: int = 2) -> Toy:
        for folder in ("configs/matrix", "configs/pins", "configs/profiles", "patches/tests"):
            (root / folder).mkdir(parents=True)
        write_wheel(cache / "index")
        (root / "configs/pins/p29.yaml").write_text(
            f"version: 0.29.0\nflavour: cpu\npip_args: [--no-index, --find-links, {cache / 'index'}]\n")
        (root / "patches/series").write_text("one.patch\n")
        (root / "patches/one.patch").write_text(PATCH)
        lines = "".join(f"  - {{job: toy, name: c{n}, with: {{number: {n}, seconds: {seconds}, weight: {weight}}}}}\n"
                        for n in range(cells))
        (root / "configs/matrix/m.yaml").write_text(
            f"name: toy\npins: [p29]\ncards: {{cpu_slots: {slots}}}\ncells:\n{lines}")
        return cls(root, root / "results", cache, str(root))

    @property
    def store(self) -> Store:
        return Store.at(self.results)

    @property
    def run(self) -> str:
        """The one run of the root."""
        (run,) = self.store.runs()
        return run

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        left_out = ("RAY_ADDRESS", "FARM_RESULTS")
        return {**{k: v for k, v in os.environ.items() if k not in left_out}, "FARM_CACHE": str(self.cache / "farm"),
                "PYTHONPATH": f"{PROJECT}{os.pathsep}{HERE}", "TOY_MARK": self.mark, "PYTHONUNBUFFERED": "1",
                "FARM_HOST_STATE": str(self.root / "host"), **(more or {})}

    def start(self, *more: str, env: Mapping[str, str] | None = None) -> Process:
        """`farm matrix` in a session of its own, as a terminal has it."""
        return Process(self, ["matrix", "configs/matrix/m.yaml", "--results", str(self.results), *more], env)

    def close(self) -> None:
        """For a test's end, also a failed one's: kill what it left running."""
        for process in self.started:
            if process.popen.poll() is None:
                process.signal(signal.SIGKILL)
                process.popen.wait(timeout=30)

    def finish(self, *more: str, env: Mapping[str, str] | None = None) -> Ended:
        """As `start`, to its end."""
        return self.start(*more, env=env).end()

    def farm(self, *argv: str, env: Mapping[str, str] | None = None) -> Ended:
        """Another verb."""
        return Process(self, [*argv, "--results", str(self.results)], env).end()


class Process:
    """A farm process.  Its output goes to a file: nothing to drain, and the tests may wait for a line of it."""

    def __init__(self, toy: Toy, argv: list[str], env: Mapping[str, str] | None) -> None:
        self._log = toy.root / f"out-{time.monotonic_ns()}.log"
        self._toy, self._began = toy, time.monotonic()
        with self._log.open("wb") as log:
            self.popen = subprocess.Popen([sys.executable, str(HERE / "toyfarm.py"), *argv], cwd=toy.root, stdout=log,
                                          stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                                          env=toy.environment(env))
        toy.started.append(self)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def out(self) -> str:
        return self._log.read_text(errors="replace")

    def until(self, words: str, timeout_s: float = 90.0) -> None:
        """Wait until it has printed a line that matches."""
        until(lambda: re.search(words, self.out) or self.popen.poll() is not None, timeout_s)
        assert re.search(words, self.out), f"ended {self.popen.returncode} without {words!r}:\n{self.out}"

    def end(self, timeout_s: float = 150.0) -> Ended:
        code = self.popen.wait(timeout=timeout_s)
        return Ended(code, self.out, time.monotonic() - self._began)

    def signal(self, number: int, *, group: bool = False) -> None:
        """To the process, or as a terminal does to its whole group."""
        (os.killpg if group else os.kill)(self.pid, number)

    def orphans(self) -> list[str]:
        """What lives of all that was started below it, itself left out: by environment, session, or the run's own mark."""
        found = []
        for process in psutil.process_iter():
            try:
                env = Path(f"/proc/{process.pid}/environ").read_bytes()
                session = os.getsid(process.pid)
                if process.pid not in (os.getpid(), self.pid) and (
                        f"TOY_MARK={self._toy.mark}\0".encode() in env or session == self.pid or self._is_of_run(env)
                ) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
            except (OSError, psutil.Error):
                continue
        return found

    def _is_of_run(self, env: bytes) -> bool:
        runs = self._toy.store.runs() if self._toy.results.is_dir() else []
        return any(f"FARM_RUN={run}".encode() in env for run in runs)

    def gone_s(self) -> float:
        """Seconds until nothing of it is left.  Fails after GONE_S, naming what is."""
        began = time.monotonic()
        while left := self.orphans():
            assert time.monotonic() - began < GONE_S, f"still there after {GONE_S:.0f} s: {left}"
            time.sleep(0.1)
        return time.monotonic() - began


def until(true: Callable[[], Any], timeout_s: float) -> Any:
    """Wait for a condition; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(0.02)
    return value


def evidence(store: Store, run: str) -> dict[str, list[str]]:
    """Rows of final attempts by table, without what two runs of the same thing differ in; sorted, to be compared."""
    final = {(r["cell"], r["attempt"]) for r in store.read("cells", run).to_pylist() if r["final"]}
    return {table: sorted(repr({k: v for k, v in row.items() if k not in TIMES})
                          for row in store.read(table, run).to_pylist() if (row["cell"], row["attempt"]) in final)
            for table in TABLES}


def attempts(store: Store, run: str) -> list[tuple[str, int, bool]]:
    return sorted((r["cell"], r["attempt"], r["final"]) for r in store.read("cells", run).to_pylist())
