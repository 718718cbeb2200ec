"""One worker of the fuzzer: it checks inputs one after the other in a workspace of its own, and tells faults."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import psutil
from fuzz_cases import Case, make_case
from fuzz_corpus import Corpus, corpus, lay_canaries
from fuzz_guard import Guard, adopt_orphans, bound_memory, children_left, difference, digest, entries, stamps
from rich.console import Console

from farm.apply import judge
from farm.check import render, to_json
from farm.findings import CheckReport, Status
from farm.listing import read_listing

PLAIN = ("patch", "-p1", "--fuzz", "0", "--forward", "--no-backup-if-mismatch")
# A diff's own names that are rooted at vLLM's repository, by the text alone: what the plain loop decides by.
_REPOSITORY = re.compile(rb'^(?:diff --git "?[^/\s]+/vllm/|\+\+\+ "?[^/\s]+/vllm/.*\n@@ -|'
                         rb'--- "?[^/\s]+/vllm/.*\n\+\+\+ /dev/null)', re.MULTILINE)
_LOOK_EVERY = 500  # inputs between two looks at every byte
# What no terminal should be sent by a name or a line of somebody's patch; tabs are fine.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Task:
    """What a worker does: inputs `numbers` of `seed`, in `folder`; `subject` is MODULE:FUNCTION, called as farm.check.check."""

    seed: int
    numbers: range
    folder: Path
    subject: str
    compare: float
    cpu_limit_s: float


@dataclass
class Outcome:
    """What became of one input.  Seconds by the clock and of CPU are of its check; `faults` are (sort, words)."""

    number: int
    made: str = ""
    statuses: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    exit_code: int = -1
    wall_s: float = 0.0
    cpu_s: float = 0.0
    print_s: float = 0.0  # of CPU, to print the report as text and as an object
    compared: int = 0
    control: bool = False  # the printed report holds control characters of the input
    elsewhere: int = 0  # runs of GNU patch whose temporary files were not among the check's own
    taken: list[str] = field(default_factory=list)  # statuses of refused patches that plain GNU patch applies
    faults: list[tuple[str, str]] = field(default_factory=list)


class Workspace:
    """A package, canaries all around it, and the four directories that a check may fill.

        FOLDER/                 canaries, as in `outside`
          outside/              canaries: where the package's links and absolute names lead
          tree/vllm/            the package
          series/ temporary/ cache/ copies/
    """

    def __init__(self, folder: Path, made_of: Corpus) -> None:
        self.folder, self.corpus = folder, made_of
        self.outside, self.tree = folder / "outside", folder / "tree"
        self.series, self.temporary, self.cache, self.copies = own = [folder / name for name in (
            "series", "temporary", "cache", "copies")]
        for place in own:
            place.mkdir(parents=True, exist_ok=True)
        self.build()

    def build(self) -> None:
        """Everything as it should be; what a fault left behind goes away."""
        for place in (self.outside, self.tree, *(p for p in self.folder.iterdir() if p not in self.own)):
            _remove(place)
        for place in (self.series, self.temporary, self.copies):
            for left in place.iterdir():
                _remove(left)
        lay_canaries(self.corpus, self.folder)
        self.package = self.corpus.lay_out(self.tree, self.outside)
        self.stamps, self.digest = self.stamp(), self.hash()

    @property
    def own(self) -> tuple[Path, ...]:
        return self.series, self.temporary, self.cache, self.copies

    def watched(self) -> list[Path]:
        return sorted(place for place in self.folder.iterdir() if place.is_dir() and place not in self.own)

    def stamp(self) -> dict[str, object]:
        found: dict[str, object] = dict.fromkeys(os.listdir(self.folder))
        for name in ("canary.py", "sched.py"):
            info = os.lstat(self.folder / name)
            found[name] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        for place in self.watched():
            found |= {f"{place.name}/{name}": stamp for name, stamp in stamps(place).items()}
        return found

    def hash(self) -> dict[str, str]:
        return {place.name: digest(place) for place in self.watched()}

    def package_digest(self) -> str:
        return digest(self.package)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def work(task: Task, pipe: Connection) -> None:
    """Check the task's inputs; send each number before, and its Outcome after."""
    adopt_orphans()
    bound_memory()
    module, _, name = task.subject.partition(":")
    made_of = corpus()
    task.folder.mkdir(exist_ok=True)
    space = Workspace(task.folder, made_of)
    os.environ["TMPDIR"] = tempfile.tempdir = str(space.temporary)
    guard = Guard((f"{os.path.realpath(space.temporary)}/", f"{os.path.realpath(space.cache)}/"))
    worker = Worker(task, space, guard, getattr(importlib.import_module(module), name))
    sys.addaudithook(guard)
    pipe.send(("package", space.package_digest()))
    for position, number in enumerate(task.numbers):
        pipe.send(("begin", (number, _cpu_s())))
        case = make_case(made_of, task.seed, number)
        last = position == len(task.numbers) - 1
        pipe.send(("end", worker.one(case, look=last or position % _LOOK_EVERY == _LOOK_EVERY - 1)))
    pipe.send(("package", space.package_digest()))
    peak = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    pipe.send(("peak", peak))


class Worker:
    def __init__(self, task: Task, space: Workspace, guard: Guard, subject: Callable[..., CheckReport]) -> None:
        self.task, self.space, self.guard, self.subject = task, space, guard, subject

    def one(self, case: Case, look: bool) -> Outcome:
        """One input; `look`: hash every byte afterwards as well."""
        space, found = self.space, Outcome(case.number, case.made)
        series = case.lay_out(space.series / f"series-{case.number:06}", space.outside)
        before = stamps(series)
        report = self._check(series, found)
        self._left(series, before, found, look)
        if report is not None:
            self._tell(report, found)
            if not found.faults and Random(f"compare-{self.task.seed}-{case.number}").random() < self.task.compare:
                self._compare(series, report, found)
        if found.faults:
            for process in psutil.Process().children(recursive=True):
                process.kill()
                process.wait(10)
            space.build()
        else:
            _remove(series)
        return found

    def _check(self, series: Path, found: Outcome) -> CheckReport | None:
        report = None
        began, cpu = time.perf_counter(), _cpu_s()
        self.guard.watching = True
        try:
            report = self.subject(series, self.space.package, self.space.cache)
        except Exception:  # that there is none is what the fuzzer is for
            found.faults.append(("exception", traceback.format_exc()))
        finally:
            self.guard.watching = False
        found.elsewhere, self.guard.elsewhere = self.guard.elsewhere, 0
        found.wall_s, found.cpu_s = time.perf_counter() - began, _cpu_s() - cpu
        if found.cpu_s > self.task.cpu_limit_s:
            found.faults.append(("hang", f"it took {found.cpu_s:.2f} s of CPU ({found.wall_s:.2f} s by the clock)"))
        return report

    def _left(self, series: Path, before: dict[str, tuple[int, ...]], found: Outcome, look: bool) -> None:
        """What the check left behind, and what it changed."""
        space = self.space
        if self.guard.seen:
            found.faults.append(("outside", "; ".join(self.guard.seen[:5])))
            self.guard.seen.clear()
        if left := children_left():
            found.faults.append(("process", left))
        if left := sorted(os.listdir(space.temporary)):
            found.faults.append(("temporary", f"left behind: {', '.join(left[:8])}"))
        if changed := difference(before, stamps(series)):
            found.faults.append(("series", changed))
        if changed := difference(space.stamps, space.stamp()):
            found.faults.append(("package" if "tree/" in changed else "outside", changed))
        elif look and (changed := difference(space.digest, space.hash())):
            found.faults.append(("outside", f"bytes changed since an earlier input, and no time did: {changed}"))

    def _tell(self, report: CheckReport, found: Outcome) -> None:
        """Count the report, and print it as the command does, to a terminal that takes UTF-8 alone."""
        found.statuses = [result.application.status.value for result in report.patches]
        found.problems = [problem.problem.value for problem in report.problems]
        found.findings = [finding.kind.value for result in report.patches for finding in result.findings]
        found.exit_code = report.exit_code
        cpu = _cpu_s()
        try:
            json.dumps(to_json(report), indent=1, ensure_ascii=True).encode("utf-8")
            printed = io.BytesIO()
            console = Console(file=io.TextIOWrapper(printed, encoding="utf-8", newline=""), soft_wrap=True)
            render(report, console)
            console.file.flush()
            found.control = _CONTROL.search(printed.getvalue().decode()) is not None
        except Exception:  # likewise
            found.faults.append(("printing", traceback.format_exc()))
        found.print_s = _cpu_s() - cpu
        if found.print_s > self.task.cpu_limit_s:
            found.faults.append(("hang", f"printing its report took {found.print_s:.2f} s of CPU"))

    def _compare(self, series: Path, report: CheckReport, found: Outcome) -> None:
        """Clean never lies: the plain loop of GNU patch makes the same files on a copy of the whole package."""
        good = [result.application.status.good for result in report.patches]
        patches = read_listing(series).patches
        with tempfile.TemporaryDirectory(dir=self.space.copies) as folder:
            ours, plain = (shutil.copytree(self.space.tree, Path(folder, "in", "it", name), symlinks=True) for name in (
                "ours", "plain"))
            lay_canaries(self.space.corpus, Path(folder, "outside"))
            for patch, result in zip(patches, report.patches, strict=True):
                said, again = result.application, judge(ours / "vllm", patch)
                if (again.status, again.offsets, again.files) != (said.status, said.offsets, said.files):
                    found.faults.append(("lie", f"{patch.name} is {said.status.value} to check, and {again.status.value} to "
                                                f"judge on a copy of the whole package: {again.detail}"))
                    return
                if not said.status.good:
                    if said.status in (Status.REJECTED, Status.FUZZ) and _taken(plain, patch.data):
                        found.taken.append(f"{said.status.value}: {said.detail}")
                    continue
                done = _plain(plain, patch.data)
                aside = _REPOSITORY.search(patch.data) and any(not path.startswith("vllm/") for path in patch.files)
                if done.returncode and not aside:
                    found.faults.append(("lie", f"{patch.name} is {said.status.value}, and plain GNU patch ended with "
                                                f"{done.returncode}: {done.stdout.decode(errors='replace')}"))
            if changed := difference(_contents(ours / "vllm"), _contents(plain / "vllm")):
                found.faults.append(("lie", f"plain GNU patch made other files: {changed}"))
            found.compared = sum(good)


def _plain(tree: Path, data: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(PLAIN, cwd=tree if _REPOSITORY.search(data) else tree / "vllm", input=data, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=20, start_new_session=True,
                          env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"})


def _taken(tree: Path, data: bytes) -> bool:
    """Whether the plain command takes a patch that was refused; on a copy that goes away."""
    with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
        copy = shutil.copytree(tree, Path(folder, "copy"), symlinks=True)
        return _plain(copy, data).returncode == 0


def _contents(package: Path) -> dict[str, object]:
    """Files and links; directories that a removal left empty do not count."""
    return {path: (info.st_mode, os.readlink(package / path) if stat.S_ISLNK(info.st_mode) else (package / path).read_bytes())
            for path, info in entries(package) if not stat.S_ISDIR(info.st_mode)}


def _cpu_s() -> float:
    """Seconds of CPU of this process and of those that it waited for."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (
        resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
