"""A Ray head of the test's own with its job server, and a project that is submitted to it as the README says.

Nothing is played: the project is a copy of farm/ and jobs/ with one more job, its pin an installed package, its cells
real scripts in real trees.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from fake_wheels import install_by_hand, write_wheel
from toyrun import PATCH, until

from farm.config import PROJECT
from farm.lifeline import processes_of_run
from farm.store import Store

ROWS = 3
STARTED_S = 120.0
# Each script starts a process in a session of its own, as vLLM does: an orphan, if nobody looks after it.
JOB = f'''
"""Scripts that sleep: a job for tests of what interrupts one. Cells from the number in DOZE_SHUT on hang."""

import os
from dataclasses import dataclass
from typing import ClassVar

from farm.bench import Needs
from farm.records import Measurement, Outcome, Reason, Tagged, Verdict

SCRIPT = """
import json, os, subprocess, sys, time
import vllm
args = json.load(sys.stdin)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
time.sleep(args["seconds"])
deadline = time.monotonic() + 110
while os.path.exists(args["shut"]) and args["number"] >= int(open(args["shut"]).read()) and time.monotonic() < deadline:
    time.sleep(0.1)
other.kill()
print(json.dumps({{"event": "attest", "vllm_path": vllm.__file__}}))
print(json.dumps({{"event": "slept"}}))
"""


@dataclass(frozen=True)
class Doze:
    number: int
    seconds: float

    name: ClassVar[str] = "doze"
    needs: ClassVar[Needs] = Needs()

    def run(self, bench):
        for n in range({ROWS}):
            bench.progress(f"script {{n}}")
            args = {{"seconds": self.seconds / {ROWS}, "number": self.number, "shut": os.environ["DOZE_SHUT"]}}
            for _ in bench.python("patched", SCRIPT, args, timeout_s=120.0):
                yield Tagged(Measurement("kv_peak", bench.rng.random(), "ratio"), {{"arm": "patched", "pair": n}})
        yield Outcome(Verdict.FAIL if self.number % 4 == 3 else Verdict.PASS, Reason.AS_EXPECTED, f"doze {{self.number}}")
'''


@dataclass(frozen=True)
class Ended:
    code: int
    out: str


class Head:
    """`ray start --head` on loopback: its own ports, token and temporary folder; ended by the process that was started."""

    def __init__(self, root: Path, cpus: int) -> None:
        self.root = root
        self.shut = root / "shut"  # while it is there, cells from the number in it on hang in their first script
        self._temp = Path(tempfile.mkdtemp(prefix="rj-"))  # short: a socket's path has 107 bytes
        self._port, self._dashboard, self._agent, self._client = _free_ports(4)
        (root / "home").mkdir()
        left_out = ("RAY_ADDRESS", "FARM_RESULTS", "PYTHONPATH")
        self.env = {**{k: v for k, v in os.environ.items() if k not in left_out}, "HOME": str(root / "home"),
                    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "RAY_AUTH_MODE": "token",
                    "RAY_worker_niceness": "0", "FARM_CACHE": str(root / "cache"), "FARM_HOST_STATE": str(root / "host"),
                    "DOZE_SHUT": str(self.shut)}
        subprocess.run([*self._ray("get-auth-token"), "--generate"], env=self.env, check=True, capture_output=True, timeout=60)
        self._log = root / "head.log"
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                [*self._ray("start"), "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={self._port}",
                 "--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard}",
                 f"--dashboard-agent-listen-port={self._agent}", f"--ray-client-server-port={self._client}",
                 f"--num-cpus={cpus}", f"--object-store-memory={100 * 2**20}", f"--temp-dir={self._temp}",
                 "--disable-usage-stats"],
                env=self.env, cwd=root, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)

    def wait(self) -> None:
        """Until it takes jobs."""
        until(lambda: self._popen.poll() is not None or "Ray runtime started" in self._log.read_text(), STARTED_S)
        assert self._popen.poll() is None, self._log.read_text()
        until(lambda: self.job("list").code == 0, STARTED_S)

    def submit(self, project: Path, name: str, *entrypoint: str) -> None:
        """`ray job submit`, as it stands in the README, without waiting for the job's end."""
        done = self.job("submit", "--submission-id", name, "--no-wait", "--working-dir", ".", "--", *entrypoint, cwd=project)
        assert done.code == 0, done.out

    def stop(self, name: str) -> tuple[float, str]:
        """`ray job stop`: (seconds that it took, what it said)."""
        began = time.monotonic()
        done = self.job("stop", name)
        assert done.code == 0, done.out
        return time.monotonic() - began, done.out

    def job(self, verb: str, *more: str, cwd: Path | None = None) -> Ended:
        argv = [*self._ray("job"), verb, "--address", f"http://127.0.0.1:{self._dashboard}", *more]
        done = subprocess.run(argv, env=self.env, cwd=cwd or self.root, capture_output=True, text=True, timeout=180,
                              stdin=subprocess.DEVNULL)
        return Ended(done.returncode, done.stdout + done.stderr)

    def log(self, name: str) -> str:
        """What a job has printed so far."""
        file = self._temp / "session_latest" / "logs" / f"job-driver-{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def until(self, name: str, words: str, timeout_s: float = 150.0) -> None:
        """Wait until a job has printed a line that matches."""
        until(lambda: re.search(words, self.log(name)), timeout_s)

    def of_jobs(self) -> list[str]:
        """Drivers of jobs and actors that live below this head."""
        found = []
        for process in psutil.Process(self._popen.pid).children(recursive=True):
            try:
                words = " ".join(process.cmdline())
                if process.status() != psutil.STATUS_ZOMBIE and ("matrix.py" in words or words.startswith("ray::Worker")):
                    found.append(f"{process.pid} {words[:100]}")
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        below = []
        if self._popen.poll() is None:
            below = psutil.Process(self._popen.pid).children(recursive=True)
            self._popen.terminate()
        try:
            self._popen.wait(20)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(20)
        for process in below:
            try:
                process.kill()  # psutil compares the start time first
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(below, timeout=10)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _ray(self, verb: str) -> list[str]:
        return [str(Path(sys.executable).with_name("ray")), verb]


@dataclass(frozen=True)
class Project:
    """What is submitted, and where its rows go."""

    root: Path
    results: Path

    @classmethod
    def make(cls, root: Path, results: Path, cells: int, seconds: float) -> Project:
        for package in ("farm", "jobs"):
            shutil.copytree(PROJECT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
        (root / "jobs" / "doze.py").write_text(JOB)
        with (root / "jobs" / "__init__.py").open("a") as registry:
            registry.write("\nfrom jobs.doze import Doze  # noqa: E402\n\nREGISTRY[Doze.name] = Doze\n")
        for folder in ("configs/matrix", "configs/pins", "configs/profiles", "patches/tests"):
            (root / folder).mkdir(parents=True)
        site = install_by_hand(write_wheel(root.parent / "index", "vllm"), root.parent / "site")
        (root / "configs/pins/p29.yaml").write_text(
            f"version: 0.29.0\nflavour: cpu\nsource: installed\npython: {sys.executable}\nsite: {site}\n")
        (root / "patches/series").write_text("one.patch\n")
        (root / "patches/one.patch").write_text(PATCH)
        lines = "".join(f"  - {{job: doze, name: c{n}, with: {{number: {n}, seconds: {seconds}}}}}\n" for n in range(cells))
        (root / "configs/matrix/m.yaml").write_text(
            f"name: doze\npins: [p29]\narms:\n  patched: {{patches: all}}\ncards: {{cpu_slots: 2}}\ncells:\n{lines}")
        return cls(root, results)

    @property
    def store(self) -> Store:
        return Store.at(self.results)

    def runs(self) -> list[str]:
        return self.store.runs() if self.results.is_dir() else []

    def entrypoint(self, *more: str) -> Sequence[str]:
        return ["python", "farm/matrix.py", "configs/matrix/m.yaml", "--results", str(self.results), *more]

    def left(self, head: Head) -> list[str]:
        """What lives of its runs."""
        return [*head.of_jobs(), *(f"{pid} of run {run}" for run in self.runs() for pid in processes_of_run(run))]


def _free_ports(count: int) -> list[int]:
    taken = [socket.socket() for _ in range(count)]
    try:
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]
    finally:
        for one in taken:
            one.close()
