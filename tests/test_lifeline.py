"""A process tree that cannot outlive its caller: real processes, none of them heavy."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from farm import lifeline
from farm.lifeline import Supervised, carrying, descendants, processes_of_run
from farm.supervisor import started

PROJECT = Path(lifeline.__file__).parent.parent
WAIT_S = 10.0

# A child that has one more in a session of its own, as vLLM's engine may be; `deaf`: both ignore TERM.
FAMILY = """
import os, signal, subprocess, sys, time
deaf = {deaf}
code = ("import signal, time\\nif {deaf}: signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
        "print('ready', flush=True)\\ntime.sleep(99)")
subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=sys.stdout)
if deaf: signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(99)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def until(condition, what: str, timeout_s: float = WAIT_S):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)
    return value


@pytest.fixture
def start(tmp_path):
    """Start a child whose output goes to tmp_path/out; ended after the test."""
    running = []

    def begin(code: str, **options) -> Supervised:
        options = {"env": {}, "cwd": tmp_path, "stdout_path": tmp_path / "out", **options}
        running.append(Supervised.start(python(code), **options))
        return running[-1]

    yield begin
    for child in running:
        child.terminate(0.0)


@pytest.fixture
def family(start, tmp_path):
    def begin(deaf: bool = False) -> Supervised:
        child = start(FAMILY.format(deaf=deaf))
        until(lambda: (tmp_path / "out").read_text().count("ready") == 2, "the family's start")
        assert len(child.processes()) == 2
        return child

    return begin


# --- what a child gets ----------------------------------------------------------------------


def test_status_and_output(start, tmp_path):
    (tmp_path / "out").write_text("before\n")
    child = start("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert child.wait(WAIT_S) == 3
    assert child.poll() == 3
    assert (tmp_path / "out").read_text().splitlines()[0] == "before"
    assert sorted((tmp_path / "out").read_text().split()) == ["before", "err", "out"]


def test_a_signal_is_a_negative_status(start):
    assert start("import os; os.kill(os.getpid(), 9)").wait(WAIT_S) == -9


def test_poll_is_none_while_it_runs(start):
    assert start("import time; time.sleep(99)").poll() is None


def test_stderr_and_stdin_of_their_own(start, tmp_path):
    (tmp_path / "in").write_text('{"a": 1}')
    start("import sys; print(sys.stdin.read()); print('err', file=sys.stderr)", stdin_path=tmp_path / "in",
          stderr_path=tmp_path / "err").wait(WAIT_S)
    assert (tmp_path / "out").read_text() == '{"a": 1}\n'
    assert (tmp_path / "err").read_text() == "err\n"


def test_stdin_is_empty(start, tmp_path):
    start("import sys; print(repr(sys.stdin.read()))").wait(WAIT_S)
    assert (tmp_path / "out").read_text() == "''\n"


def test_the_environment_is_the_given_one_and_the_mark(start, tmp_path, monkeypatch):
    monkeypatch.setenv("FARM_TEST_LEAK", "1")
    child = start("import os; print(sorted(set(os.environ) - {'LC_CTYPE'}))", env={"A": "1"})
    child.wait(WAIT_S)
    assert (tmp_path / "out").read_text().strip() == str(["A", lifeline.MARK, "SPT_NOENV"])


def test_directory_cores_core_dumps_session(start, tmp_path):
    core = min(os.sched_getaffinity(0))
    child = start("import os, resource\n"
                  "print(os.getcwd(), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CORE)[0],\n"
                  "      os.getsid(0) == os.getpid() == os.getpgid(0))", cores=[core])
    child.wait(WAIT_S)
    assert (tmp_path / "out").read_text().strip() == f"{tmp_path} {{{core}}} 0 True"


def test_no_descriptor_and_no_ignored_signal_is_inherited(start, tmp_path):
    start("import os, signal\n"
          "print(sorted(int(f) for f in os.listdir('/proc/self/fd'))[:3], len(os.listdir('/proc/self/fd')))\n"
          "print([s.name for s in (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGTERM)\n"
          "       if signal.getsignal(s) is signal.SIG_IGN])").wait(WAIT_S)
    assert (tmp_path / "out").read_text().splitlines() == ["[0, 1, 2] 4", "[]"]  # the fourth is the listing's own


@pytest.mark.parametrize("options", [{"cwd": "/no/such/folder"}, {"stdout_path": "/no/such/folder/out"}],
                         ids=["directory", "log"])
def test_what_cannot_be_started_is_an_error_here(start, options):
    with pytest.raises(OSError, match="cannot start .*no/such/folder"):
        start("pass", **options)


def test_a_missing_command_is_an_error_here(tmp_path):
    with pytest.raises(OSError, match="cannot start /no/such/command"):
        Supervised.start(["/no/such/command"], env={}, cwd=tmp_path, stdout_path=tmp_path / "out")


# --- its end --------------------------------------------------------------------------------


def test_terminate_asks_first(start, tmp_path):
    child = start("import signal, sys, time\n"
                  "signal.signal(signal.SIGTERM, lambda *_: (print('asked'), sys.exit(7)))\n"
                  "print('ready'); time.sleep(99)")
    until(lambda: "ready" in (tmp_path / "out").read_text(), "the child's start")
    assert child.terminate(WAIT_S) == 7
    assert "asked" in (tmp_path / "out").read_text()
    assert child.terminate(WAIT_S) == 7


def test_whole_tree_ends_and_nothing_of_it_stays(family):
    child = family()
    assert child.terminate(WAIT_S) == -signal.SIGTERM
    assert carrying(lifeline.MARK, child.mark) == []
    assert descendants(os.getpid()) == []  # no zombie either


def test_the_deaf_are_killed_after_the_grace(family):
    child = family(deaf=True)
    begun = time.monotonic()
    assert child.terminate(0.3) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - begun < 3.0
    assert carrying(lifeline.MARK, child.mark) == []


def test_what_a_dead_child_leaves_is_ended_at_once(family):
    child = family()
    os.kill(child.pid, signal.SIGKILL)  # as a killed API server leaves its engine
    assert child.wait(WAIT_S) == -signal.SIGKILL
    until(lambda: not carrying(lifeline.MARK, child.mark), "the end of the rest")


def test_the_context_ends_it(tmp_path):
    with pytest.raises(ZeroDivisionError), Supervised.start(
            python("import time; time.sleep(99)"), env={}, cwd=tmp_path, stdout_path=tmp_path / "out") as child:
        raise ZeroDivisionError
    assert carrying(lifeline.MARK, child.mark) == []


def test_terminate_frees_a_thread_that_waits(start):
    child = start("import time; time.sleep(99)")
    seen = []
    waiter = threading.Thread(target=lambda: seen.append(child.wait(WAIT_S)))
    waiter.start()
    child.terminate(WAIT_S)
    waiter.join(WAIT_S)
    assert seen == [-signal.SIGTERM]


def test_ctrl_c_does_not_reach_it(start):
    child = start("import time; time.sleep(99)")
    os.kill(child.supervisor_pid, signal.SIGINT)
    assert child.wait(0.3) is None


def test_a_terminated_supervisor_takes_the_tree_along(family):
    child = family()
    os.kill(child.supervisor_pid, signal.SIGTERM)
    assert child.wait(WAIT_S) == -signal.SIGTERM
    until(lambda: not carrying(lifeline.MARK, child.mark), "the end of the tree")


def test_a_killed_supervisor_takes_the_child_along_and_the_caller_sweeps_the_rest(family):
    child = family()
    engine = child.processes()[-1]
    os.kill(_parent(child.supervisor_pid), signal.SIGKILL)  # the shim, which would end the rest
    os.kill(child.supervisor_pid, signal.SIGKILL)
    assert child.wait(WAIT_S) == -signal.SIGKILL
    assert engine in carrying(lifeline.MARK, child.mark)  # else this test shows nothing
    child.terminate(0.1)
    assert carrying(lifeline.MARK, child.mark) == []


WIPED = """
import subprocess, sys, time
p = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], env={}, start_new_session=True)
print(p.pid, flush=True)
time.sleep(99)
"""
# Its first thread ends, and it reads as a zombie that has no environment.
HEADLESS = """
import ctypes, os, threading, time
if os.fork() == 0:
    os.setsid()
    threading.Thread(target=time.sleep, args=(99,)).start()
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).syscall(60, 0)
time.sleep(99)
"""


@pytest.mark.parametrize("shim", ["lives", "killed"])
@pytest.mark.parametrize("code", [
    pytest.param(WIPED, id="without-a-mark"),
    pytest.param(HEADLESS, id="without-a-first-thread"),
])
def test_a_killed_supervisor_leaves_nobody(start, tmp_path, code, shim):
    if code == WIPED and shim == "killed":
        pytest.skip("nothing tells it from a stranger any more")
    if code == HEADLESS and platform.machine() != "x86_64":
        pytest.skip("the number of a system call")
    child = start(code)
    pid = int(until(lambda: (tmp_path / "out").read_text(), "the orphan's start"))
    if code == HEADLESS:
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", "the first thread's end")
    assert started(pid) is not None
    if shim == "killed":
        os.kill(_parent(child.supervisor_pid), signal.SIGKILL)
    os.kill(child.supervisor_pid, signal.SIGKILL)
    child.wait(WAIT_S)
    child.terminate(0.1)
    until(lambda: started(pid) is None, "the orphan's end")


def test_a_copy_of_the_mark_is_left_alone_when_the_caller_sweeps(family, bystander):
    child = family()
    engine, pid = child.processes()[-1], bystander({lifeline.MARK: child.mark})
    os.kill(child.supervisor_pid, signal.SIGKILL)
    child.wait(WAIT_S)
    child.terminate(0.1)
    left = carrying(lifeline.MARK, child.mark)
    assert pid in left and engine not in left


def test_processes_of_a_run_are_found_by_its_mark(start):
    run = f"run-{os.getpid()}"
    child = start("import time; time.sleep(99)", env={"FARM_RUN": run})
    assert {child.pid, child.supervisor_pid} <= set(processes_of_run(run))
    assert processes_of_run(run[:-1]) == []
    child.terminate(WAIT_S)
    assert processes_of_run(run) == []


# --- the caller's end -----------------------------------------------------------------------

CALLER = """
import sys, time
from farm.lifeline import Supervised
family = sys.argv[1]
child = Supervised.start([sys.executable, "-u", "-c", family], env={"FARM_RUN": sys.argv[2]}, cwd="/",
                         stdout_path=sys.argv[3])
print(child.pid, flush=True)
time.sleep(99)
"""


@pytest.fixture
def caller(tmp_path):
    """Another process that supervises a family; (process, run)."""
    run = f"run-{os.getpid()}-{time.monotonic_ns()}"

    def begin(deaf: bool = False) -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen([sys.executable, "-c", CALLER, FAMILY.format(deaf=deaf), run, tmp_path / "out"],
                                   env={"PYTHONPATH": str(PROJECT)}, stdout=subprocess.PIPE, start_new_session=True)
        until(lambda: (tmp_path / "out").exists() and (tmp_path / "out").read_text().count("ready") == 2,
              "the family's start")
        assert len(processes_of_run(run)) == 4  # shim, supervisor, child, engine
        return process, run

    yield begin
    for pid in processes_of_run(run):
        os.kill(pid, signal.SIGKILL)


def _kill(process: subprocess.Popen) -> None:
    process.kill()


def _kill_group(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)


def _kill_as_ray_does(process: subprocess.Popen) -> None:
    """The worker and its direct children."""
    children = [pid for pid in descendants(process.pid) if _parent(pid) == process.pid]
    assert len(children) == 1
    for pid in (process.pid, *children):
        os.kill(pid, signal.SIGKILL)


def _interrupt(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGINT)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("end", [_kill, _kill_group, _kill_as_ray_does, _interrupt])
def test_nothing_outlives_the_caller(caller, end):
    process, run = caller()
    end(process)
    process.wait(WAIT_S)
    until(lambda: not processes_of_run(run), "the end of the family", 3.0)


def test_not_even_the_deaf_outlive_it(caller):
    process, run = caller(deaf=True)
    process.kill()
    process.wait(WAIT_S)
    until(lambda: not processes_of_run(run), "the end of the deaf", lifeline.GRACE_S + 3.0)
