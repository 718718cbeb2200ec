"""An actor's process ends with the one that started it; dispatch asks for that, a process of a test does not."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""
CHILD = """
import os, time
from farm.worker import Worker
Worker.tether(object())
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_tethered_process_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])})
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        assert child.is_running()
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
        child.wait(15)
    finally:
        if child.is_running():
            child.kill()
