"""The first signal raises once, the second leaves at once; an import is not cut in two."""

import os
import signal
import subprocess
import sys

import pytest

from farm.interrupts import INTERRUPTED_EXIT, NUMBERS, Interrupts


@pytest.fixture
def signals():
    """A clock that stands still, and what `leave` was told; under nohup, too, every signal is heard."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    class Seen:
        now, left = 0.0, []

    seen = Seen()
    seen.interrupts = Interrupts(clock=lambda: seen.now, leave=seen.left.append)
    seen.left.clear()
    yield seen
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_the_first_interrupts_once_and_the_second_leaves(signals, number):
    with signals.interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # an echo of the same press
        assert signals.left == []
        signals.now = 1.0
        signal.raise_signal(number)
        assert signals.left == [INTERRUPTED_EXIT]


def test_the_handlers_of_before_are_back_afterwards(signals):
    before = [signal.getsignal(n) for n in NUMBERS]
    with signals.interrupts, signals.interrupts:
        assert [signal.getsignal(n) for n in NUMBERS] != before
    assert [signal.getsignal(n) for n in NUMBERS] == before


def test_a_library_that_resets_them_does_not_keep_them_from_us(signals):
    with signals.interrupts:
        with signals.interrupts.kept(), signals.interrupts:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with signals.interrupts.kept():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_what_nohup_ignores_stays_ignored(signals, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert signals.interrupts.first is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_later_means_after_the_block(signals):
    done = []
    with pytest.raises(KeyboardInterrupt), signals.interrupts.later():
        signal.raise_signal(signal.SIGTERM)
        done.append("the import was finished")
    assert done and signals.left == []


def test_a_second_one_does_not_wait_for_the_block(signals):
    with pytest.raises(KeyboardInterrupt), signals.interrupts.later():
        signal.raise_signal(signal.SIGINT)
        signals.now = 1.0
        signal.raise_signal(signal.SIGINT)
        assert signals.left == [INTERRUPTED_EXIT]


def test_a_process_leaves_with_130_and_says_why():
    code = "import os, signal, time\nfrom farm.interrupts import Interrupts\nwith Interrupts():\n" \
           "    try:\n        os.kill(os.getpid(), 2)\n        time.sleep(9)\n    except KeyboardInterrupt:\n" \
           "        time.sleep(0.6)\n        os.kill(os.getpid(), 15)\n        time.sleep(9)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False,
                          env=os.environ)
    assert done.returncode == 130, done.stderr
    assert "interrupted twice" in done.stderr and "farm runs" in done.stderr


AT_THE_END = """
import os, signal, sys
from farm.interrupts import deaf_at_the_end
signal.signal({number}, signal.default_int_handler)
{call}
class Late:  # its end comes when Python has put the default handlers back
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {number})
sys.late = Late()
sys.exit(130)
"""


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.name)
def test_a_signal_that_comes_while_python_ends_does_not_replace_the_exit_code(number):
    def code(call):
        return subprocess.run([sys.executable, "-c", AT_THE_END.format(call=call, number=int(number))], check=False).returncode

    assert code("deaf_at_the_end()") == 130
    assert code("") == -number  # what happens without it
