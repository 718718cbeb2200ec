"""The probe of a CPU slot for real, scripts that end in every other way, and whose making an outcome is."""

import os
import sys
from pathlib import Path

import psutil
import pytest

from farm import cards, health
from farm.health import Blame, Interpreter
from farm.records import Outcome, Reason, Verdict

SLOT = cards.cpu_slot(0, 1)


@pytest.fixture
def own():
    return health.own_interpreter({"FARM_RUN": "run-health", "FARM_CELL": "c"})


def test_a_slot_that_works_passes(own):
    found = health.examine(SLOT, own)
    assert found.passed, found.detail
    assert "32 MiB read back" in found.detail and found.took_s < health.DEADLINE_S["cpu"]


@pytest.mark.parametrize(("right", "wrong", "says"), [
    ("hashlib.sha256(b\"a\" ", "hashlib.sha256(b\"b\" ", "SHA-256 of a million letters a is "),
    ("held.count(pattern)", "held.replace(pattern, b\"\", 1).count(pattern)", "do not hold the pattern 5aa5"),
    ("product = [[sum(", "product = [[1 + sum(", "row 0 of a product of two 96 x 96 matrices is wrong"),
], ids=["hash", "memory", "arithmetic"])
def test_each_check_can_fail(own, tmp_path, right, wrong, says):
    """A machine that hashes, keeps or adds up otherwise, played by a changed line of the script."""
    text = health.SCRIPTS["cpu"].read_text()
    assert text.count(right) == 1
    script = tmp_path / "script.py"
    script.write_text(text.replace(right, wrong))
    found = health.examine(SLOT, own, script=script)
    assert (found.outcome, says in found.detail) == ("failed", True), found.detail


@pytest.mark.parametrize(("code", "outcome", "says"), [
    ("print('{\"passed\": \"all\"}')", "passed", "all"),
    ("print('{\"unknown\": \"no torch\"}')", "unknown", "no torch"),
    ("print('{\"failed\": \"row 1\"}'); raise SystemExit(1)", "failed", "row 1"),
    ("print('{\"passed\": \"all\"}'); raise SystemExit(1)", "failed", "exit status 1"),
    ("import time; time.sleep(600)", "failed", "did not end within 1 s"),
    ("import signal; signal.signal(15, signal.SIG_IGN); import time; time.sleep(600)", "failed", "did not end within 1 s"),
    ("raise MemoryError('no more')", "failed", "exit status 1: MemoryError: no more"),
    ("import os; os.kill(os.getpid(), 11)", "failed", "signal SIGSEGV"),
    ("import os; os.kill(os.getpid(), 9)", "unknown", "SIGKILL; is the machine short of memory?"),
    ("pass", "failed", "exit status 0: it said nothing"),
    ("print('[1, 2]')", "failed", "exit status 0"),
], ids=["passed", "unknown", "failed", "passed-but-exit-1", "hangs", "hangs-and-ignores-term", "raises", "crashes", "killed",
        "silent", "other-words"])
def test_every_end_of_a_probe_says_something(own, tmp_path, code, outcome, says):
    script = tmp_path / "script.py"
    script.write_text(code)
    found = health.examine(SLOT, own, script=script, deadline_s=1.0 if "sleep" in code else 60.0)
    assert (found.outcome, says in found.detail) == (outcome, True), found.detail
    assert not [p for p in psutil.process_iter() if str(script) in " ".join(_argv(p))]  # nothing is left of it


def _argv(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_an_interpreter_that_is_not_there_says_nothing_of_the_card():
    found = health.examine(SLOT, Interpreter(Path("/nowhere/python")))
    assert (found.outcome, "could not be started" in found.detail) == ("unknown", True)


def test_the_probe_gets_no_environment_of_ours(own, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps({'passed': ' '.join(sorted(os.environ))}))")
    names = set(health.examine(SLOT, own, script=script).detail.split())
    assert {"FARM_RUN", "FARM_CELL", "PATH"} <= names and "MY_TOKEN" not in names


def test_the_cuda_script_without_torch_or_without_cuda_says_nothing_of_the_card(own, tmp_path):
    """Its work on a real card is proved by tests marked `gpu`; here, what it says where it cannot work."""
    cuda = health.SCRIPTS["cuda"]
    assert "torch cannot be imported" in health.examine(SLOT, own, script=cuda).detail
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("class version: cuda = None\n")
    found = health.examine(SLOT, Interpreter(Path(sys.executable), {**own.env, "PYTHONPATH": str(tmp_path)}), script=cuda)
    assert (found.outcome, found.detail) == ("unknown", "torch is built without CUDA here")


# --- whose making ------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "reason", "whose"), [
    (Verdict.ERROR, Reason.CARD_UNHEALTHY, Blame.CARD),
    (Verdict.ERROR, Reason.CARD_LOST, Blame.CARD),
    (Verdict.ERROR, Reason.MEMORY_HELD, Blame.CARD),
    (Verdict.ERROR, Reason.BOOT_STALLED, Blame.SUSPECT),
    (Verdict.ERROR, Reason.SERVER_LOST, Blame.SUSPECT),
    (Verdict.ERROR, Reason.ENGINE_DEAD, Blame.SUSPECT),
    (Verdict.ERROR, Reason.TESTS_CRASHED, Blame.SUSPECT),
    (Verdict.ERROR, Reason.FARM_ERROR, Blame.SUSPECT),
    (Verdict.FAIL, Reason.CHANGED, Blame.SUSPECT),
    (Verdict.FAIL, Reason.TREE_FAILED, Blame.SUSPECT),
    (Verdict.ERROR, Reason.CARD_BUSY, Blame.ELSEWHERE),
    (Verdict.ERROR, Reason.CARD_CHANGED, Blame.ELSEWHERE),
    (Verdict.ERROR, Reason.ENV_BUILD_FAILED, Blame.ELSEWHERE),
    (Verdict.PASS, Reason.AS_EXPECTED, Blame.ELSEWHERE),
    (Verdict.INVALID, Reason.COLD_JIT, Blame.ELSEWHERE),
    (Verdict.SKIP, Reason.NEEDS_UNMET, Blame.ELSEWHERE),
], ids=str)
def test_whose_making_an_outcome_is(verdict, reason, whose):
    assert health.blame(Outcome(verdict, reason, "")) is whose


def test_what_a_server_printed_is_no_evidence_about_a_card():
    """A patch under test may print anything; it must not be able to take cards out."""
    said = Outcome(Verdict.ERROR, Reason.BOOT_DIED, "CUDA error: uncorrectable ECC error encountered")
    assert health.blame(said) is Blame.SUSPECT


def test_cores_of_the_slot_are_the_probes(own, tmp_path):
    core = min(os.sched_getaffinity(0))
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps({'passed': str(os.sched_getaffinity(0))}))")
    slot = cards.Card("c", "n", "cpu", "h", cores=(core,))
    assert health.examine(slot, own, script=script).detail == f"{{{core}}}"
