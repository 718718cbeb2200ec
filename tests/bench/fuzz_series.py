#!/usr/bin/env python3
"""Fuzz `farm check`: mutated patches and series lists, each in a directory of 1 to 4 patches, on a small package.

    python tests/bench/fuzz_series.py --inputs 20000 --seed 1 --jobs 2
    python tests/bench/fuzz_series.py --first 4711 --inputs 1              # one input again

Faults are: an exception, also while the report is printed; a hang; a write outside of the check's own temporary
directories and cache; a change of the package, the series or the canaries around them; a process or a temporary
directory that is left; a good status where the plain loop of GNU patch does not make the same files.  A hang is more
than 2 s of CPU (worker and children), or 20 s by the clock.  The same seed gives the same inputs, whatever --jobs says.

Prints counts by class, the slowest inputs, and where the failing ones are kept.  Exit code: 0 no fault, 1 faults.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

import psutil  # noqa: E402
from fuzz_cases import make_case  # noqa: E402
from fuzz_corpus import corpus  # noqa: E402
from fuzz_worker import Outcome, Task, work  # noqa: E402

from farm.findings import Kind, Problem, Status  # noqa: E402

MOST_KEPT = 100
SLOWEST = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--compare", type=float, default=0.25, help="share of the inputs that plain GNU patch does as well")
    parser.add_argument("--cpu-limit", type=float, default=2.0, help="seconds of CPU that a check may take")
    parser.add_argument("--wall-limit", type=float, default=20.0, help="seconds by the clock after which it is killed")
    parser.add_argument("--work", type=Path, help="where to work [default: memory, else the temporary directory]")
    parser.add_argument("--keep", type=Path, help="where failing inputs are kept [default: a new temporary directory]")
    parser.add_argument("--subject", default="farm.check:check", help="MODULE:FUNCTION that is fuzzed")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    options.work = options.work or (memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir()))
    run = Run(options)
    run.go()
    run.tell()
    return 1 if run.faults else 0


@dataclass
class Lane:
    """One worker: what it has still to do, the input that it is at first, and since when it is at that."""

    numbers: range
    folder: Path
    process: multiprocessing.process.BaseProcess | None = None
    pipe: Connection | None = None
    at: int | None = None
    since: float = 0.0
    begun: bool = False
    cpu_s: float = 0.0  # that the worker and its children had used by then
    done: bool = False


@dataclass
class Run:
    options: argparse.Namespace
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[tuple[int, str, str]] = field(default_factory=list)
    packages: Counter[str] = field(default_factory=Counter)
    peaks: list[list[float]] = field(default_factory=list)
    kept: Path | None = None
    took_s: float = 0.0

    def go(self) -> None:
        """Run all lanes to their ends; a worker that hangs or dies is replaced, past the input that did it."""
        began, options = time.monotonic(), self.options
        self.load = os.getloadavg()[0]
        numbers = range(options.first, options.first + options.inputs)
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-series-", dir=options.work))
        try:
            lanes = [Lane(numbers[at::options.jobs], self.folder / f"worker-{at}") for at in range(options.jobs)]
            for lane in lanes:
                self._start(lane)
            while running := [lane for lane in lanes if not lane.done]:
                for pipe in wait([lane.pipe for lane in running], timeout=0.5):
                    self._hear(next(lane for lane in running if lane.pipe is pipe))
                for lane in running:
                    if lane.at is not None and time.monotonic() - lane.since > options.wall_limit:
                        self._fault(lane.at, "hang", f"no end after {options.wall_limit} s by the clock; {_stop(lane)}")
                        self._restart(lane)
            if strange := sorted(set(os.listdir(self.folder)) - {lane.folder.name for lane in lanes}):
                self._fault(-1, "outside", f"beside the workers' directories: {', '.join(strange)}")
            if elsewhere := sum(outcome.elsewhere for outcome in self.outcomes):
                self._fault(-1, "outside", f"GNU patch ran {elsewhere:,} times with its temporary files outside of the check's "
                                           "own directories (no TMPDIR: /tmp), where they stay if it is killed")
            if len(self.packages) > 1:
                self._fault(-1, "package", f"it had more than one hash: {', '.join(self.packages)}")
        finally:
            for lane in lanes:
                if lane.process is not None and lane.process.is_alive():
                    _stop(lane)
            shutil.rmtree(self.folder)
        self.took_s = time.monotonic() - began

    def _start(self, lane: Lane) -> None:
        options, context = self.options, multiprocessing.get_context("spawn")
        lane.pipe, theirs = context.Pipe(duplex=False)
        task = Task(options.seed, lane.numbers, lane.folder, options.subject, options.compare, options.cpu_limit)
        lane.process = context.Process(target=work, args=(task, theirs))
        lane.process.start()
        theirs.close()
        lane.at, lane.begun = None, False

    def _restart(self, lane: Lane) -> None:
        if lane.at is not None:
            lane.numbers = lane.numbers[1:]
        shutil.rmtree(lane.folder)
        if lane.numbers and lane.begun:  # one that never comes to its first input would not do so another time
            self._start(lane)
        else:
            lane.done = True

    def _hear(self, lane: Lane) -> None:
        try:
            what, value = lane.pipe.recv()
        except EOFError:
            lane.process.join()
            if lane.process.exitcode == 0:
                lane.done = True
            else:
                self._fault(-1 if lane.at is None else lane.at, "died", f"the worker ended with {lane.process.exitcode}")
                self._restart(lane)
            return
        if what == "begin":
            (lane.at, lane.cpu_s), lane.since, lane.begun = value, time.monotonic(), True
        elif what == "package":
            self.packages[value] += 1
        elif what == "peak":
            self.peaks.append(value)
        else:
            lane.at, lane.numbers = None, lane.numbers[1:]
            self.outcomes.append(value)
            for sort, words in value.faults:
                self._fault(value.number, sort, words)
            if sys.stderr.isatty() and len(self.outcomes) % 100 == 0:
                print(f"\r{len(self.outcomes)} inputs, {len(self.faults)} faults", end="", file=sys.stderr)

    def _fault(self, number: int, sort: str, words: str) -> None:
        self.faults.append((number, sort, words))
        if len(self.faults) > MOST_KEPT or number < 0:
            return
        if self.kept is None:
            self.kept = self.options.keep or Path(tempfile.mkdtemp(prefix="fuzz-series-failing-"))
        folder = self.kept / f"{number:06}-{sort}"
        if not folder.exists():
            case = make_case(corpus(), self.options.seed, number)
            case.lay_out(folder / "series", Path("/tmp/OUTSIDE"))
            (folder / "WHY").write_text(f"input {number} of seed {self.options.seed}: {case.made}\n{sort}: {words}\n",
                                        encoding="utf-8", errors="backslashreplace")

    def tell(self) -> None:
        """Print what was found."""
        found, options = self.outcomes, self.options
        found.sort(key=lambda outcome: outcome.number)
        patches = sum(len(outcome.statuses) for outcome in found)
        print(f"{len(found):,} inputs of seed {options.seed} (from {options.first}), {patches:,} patches, in "
              f"{self.took_s:.1f} s: {len(found) / self.took_s:.0f}/s with {options.jobs} jobs on {os.cpu_count()} cores, load "
              f"{self.load:.1f}")
        _table("patches by status", (status for o in found for status in o.statuses), [s.value for s in Status])
        _table("lists by problem", (problem for o in found for problem in {*o.problems}), [p.value for p in Problem])
        _table("faults of code", (kind for o in found for kind in o.findings), [k.value for k in Kind])
        _table("inputs by exit code", (str(o.exit_code) for o in found if o.exit_code >= 0), ["0", "1", "2"])
        for name, times in (("a check by the clock", [o.wall_s for o in found]), ("a check of CPU", [o.cpu_s for o in found]),
                            ("printing it", [o.print_s for o in found])):
            times.sort()
            if times:
                print(f"seconds of {name}: median {times[len(times) // 2]:.3f}, 99 % within "
                      f"{times[int(len(times) * 0.99)]:.3f}, most {times[-1]:.3f}, over 2 s: {sum(t > 2 for t in times)}")
        print("slowest: " + "; ".join(f"#{o.number} {o.cpu_s:.2f} s CPU, {o.wall_s:.2f} s ({o.made})" for o in sorted(
            found, key=lambda o: -o.cpu_s)[:SLOWEST]))
        compared = [o for o in found if o.compared]
        print(f"held against the plain loop of GNU patch: {sum(o.compared for o in compared):,} good patches of "
              f"{len(compared):,} inputs")
        taken = [f"#{o.number} {words}" for o in found for words in o.taken]
        print(f"refused as rejected or fuzz, and taken by the plain loop: {len(taken)}"
              + "".join(f"\n  {words[:300]}" for words in taken[:SLOWEST]))
        control = [f"#{o.number}" for o in found if o.control]
        print(f"printed reports with control characters of the input: {len(control)}"
              + (f" ({', '.join(control[:SLOWEST])})" if control else ""))
        print(f"the package, hashed {sum(self.packages.values())} times: "
              + ("; ".join(f"{value[:16]} {count} times" for value, count in self.packages.items())))
        if self.peaks:
            worker, child = (max(peak[at] for peak in self.peaks) for at in (0, 1))
            print(f"most memory: worker {worker:.0f} MiB, a child {child:.0f} MiB")
        _table("faults", (sort for _, sort, _ in self.faults), [])
        for number, sort, words in self.faults[:20]:
            lines = words.strip().splitlines()
            print(f"  #{number} {sort}: {lines[-1 if lines[0].startswith('Traceback') else 0][:300]}")
        print(f"failing inputs are kept in {self.kept}" if self.kept else "no input failed" if self.faults else "no fault")


def _table(title: str, words: Iterable[str], order: list[str]) -> None:
    counts = Counter(words)
    rows = [(word, counts[word]) for word in [*order, *sorted(counts.keys() - set(order))]]
    print(f"{title}: {sum(counts.values()):,}" + (" = " if rows else "") + " · ".join(f"{word} {n:,}" for word, n in rows))


def _stop(lane: Lane) -> str:
    """Kill a worker with all that it started; what used its time."""
    worker = psutil.Process(lane.process.pid)
    used = sum(worker.cpu_times()[:4]) - lane.cpu_s  # its own and that of children which have ended
    children = worker.children(recursive=True)
    ran = [f"{' '.join(child.cmdline())[:200]} ({sum(child.cpu_times()[:2]):.1f} s of CPU)" for child in children]
    for one in (worker, *children):
        one.kill()
    lane.process.join()
    return f"check, printing and comparison had used {used:.1f} s of CPU, and then ran: {'; '.join(ran) or 'no program'}"


if __name__ == "__main__":
    sys.exit(main())
