"""What carries the guard's mark ends with its driver, however that one ends; nothing else does."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from farm.guard import MARK, guarded

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
