"""What carries the guard's mark ends with its driver, however that one ends; nothing else does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from farm.family import carriers
from farm.guard import MARK, guarded
from farm.supervisor import line_of

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
DRIVER = """
import os, subprocess, sys, time
from farm.guard import guarded
with guarded():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"PATH": os.environ["PATH"]})
    print(child.pid, stranger.pid, flush=True)
    time.sleep(60)
"""


def gone(pid, within_s=20.0):
    """Seconds until a process is no more, or fails."""
    began = time.monotonic()
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < within_s, f"process {pid} lives"
        time.sleep(0.05)
    return time.monotonic() - began


def test_what_is_left_when_the_block_ends_is_ended():
    with guarded():
        child = subprocess.Popen(SLEEP, start_new_session=True)
        quick = subprocess.Popen([sys.executable, "-c", ""])
    assert child.wait(timeout=5) == -signal.SIGKILL  # the guard has left: it was ended before
    assert quick.wait(timeout=5) == 0
    assert MARK not in os.environ


def test_a_block_that_left_nothing_ends_soon():
    began = time.monotonic()
    with guarded():
        assert os.environ["SPT_NOENV"] == "1"
    assert time.monotonic() - began < 20
    assert os.environ.get("SPT_NOENV") is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "term"])
def test_a_driver_that_is_killed_takes_all_along_but_strangers(number):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    child, stranger = map(int, driver.stdout.readline().split())
    try:
        os.kill(driver.pid, number)
        driver.wait(timeout=20)
        print(f"gone {gone(child):.1f} s after its driver")
        assert psutil.pid_exists(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_a_copy_of_the_mark_is_left_alone(bystander):
    with guarded():
        child, pid = subprocess.Popen(SLEEP), bystander({MARK: os.environ[MARK]})
    assert child.wait(timeout=5) == -signal.SIGKILL
    assert psutil.Process(pid).environ()[MARK]


LARGE = """
import subprocess, sys, time
held = bytearray(2**30)
held[::4096] = b"1" * (2**30 // 4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_who_hangs_below_one_that_is_ending_is_seen_all_the_while():
    """The kernel needs a while for a gigabyte; until then that one has no environment, and keeps its children."""
    line = line_of(os.getpid())
    start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {LARGE!r}])"
    between = subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, MARK: "ending"})
    child = int(between.stdout.readline())
    large = psutil.Process(child).ppid()
    between.wait(timeout=20)
    os.kill(large, signal.SIGKILL)
    try:
        looks = []
        while psutil.pid_exists(large) and psutil.Process(child).ppid() == large:
            looks.append(child in [pid for pid, _ in carriers(MARK, "ending", since=line[0][1], ancestors=line)])
        print(f"{len(looks)} looks at one that was ending")
        assert all(looks)
        assert child in [pid for pid, _ in carriers(MARK, "ending", since=line[0][1], ancestors=line)]
    finally:
        os.kill(child, signal.SIGKILL)
