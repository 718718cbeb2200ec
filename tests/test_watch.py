"""Who of a server is still there, by the process table; real processes that sleep."""

import signal
import subprocess
import sys
import time

import pytest

from farm import watch
from farm.supervisor import started
from farm.watch import Member, Watch

WAIT_S = 20.0


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def sleeper():
    made = []

    def begin() -> tuple[subprocess.Popen, Member]:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
        made.append(process)
        return process, Member(process.pid, started(process.pid), "sleeper")

    yield begin
    for process in made:
        process.kill()
        process.wait()


def test_an_engine_that_is_gone_is_told_while_its_server_is_there(sleeper):
    (_, main), (process, engine), (_, other) = sleeper(), sleeper(), sleeper()
    watching = Watch((main, engine, other))
    assert watching.dead_engine() is None
    process.kill()
    until(lambda: watching.dead_engine() is not None)  # not collected yet: a zombie is gone too
    assert watching.dead_engine() == engine


def test_where_the_server_is_gone_too_it_is_no_dead_engine(sleeper):
    (first, main), (second, engine) = sleeper(), sleeper()
    for process in (first, second):
        process.kill()
        process.wait()
    assert Watch((main, engine)).dead_engine() is None


def test_an_id_that_was_given_anew_is_gone(sleeper):
    _, main = sleeper()
    assert Member(main.pid, main.started - 1, "x").gone and not main.gone


def test_a_process_that_stays_stopped_is_hung_and_a_short_stop_is_not(sleeper):
    process, main = sleeper()
    now = 0.0
    watching = Watch((main,), lambda: now)
    process.send_signal(signal.SIGSTOP)
    until(lambda: main.stopped)
    assert watching.hung() is None
    now = watch.STOPPED_S - 0.1
    assert watching.hung() is None
    process.send_signal(signal.SIGCONT)
    until(lambda: not main.stopped)
    now = 2 * watch.STOPPED_S
    assert watching.hung() is None
    process.send_signal(signal.SIGSTOP)
    until(lambda: main.stopped)
    assert watching.hung() is None  # the clock begins anew
    now = 3 * watch.STOPPED_S
    assert watching.hung() == main


@pytest.mark.parametrize(("line", "counts"), [
    ("(APIServer pid=1) INFO 01-02 03:04:05 [loggers.py:1] Engine 000: Avg prompt throughput: 0.1 tokens/s", True),
    ('(APIServer pid=1) INFO:     127.0.0.1:5 - "GET /metrics HTTP/1.1" 200 OK', False),
    ('INFO:      - "GET /health HTTP/1.1" 200 OK', False), ("  ", False),
    ('INFO:      - "POST /v1/completions HTTP/1.1" 200 OK', True),
], ids=["progress", "metrics", "health", "blank", "request"])
def test_our_own_looks_are_no_sign_of_life(line, counts):
    assert bool(watch.said([line])) is counts


@pytest.mark.parametrize(("line", "dead"), [
    ("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)", True),
    ("(APIServer pid=1) ERROR [core_client.py:729] [shutdown] MPClient: engine core exited unexpectedly", True),
    ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
], ids=["dead-error", "monitor", "other"])
def test_words_of_an_api_server_whose_engine_is_dead(line, dead):
    assert watch.tells_of_dead_engine([line]) is dead
