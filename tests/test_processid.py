"""Which process an id means, and whether it is there: real processes."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from farm.processid import ProcessId
from farm.supervisor import started, world

BOOT, _, NAMESPACE = world().partition(" ")


@pytest.mark.parametrize(("change", "lives"), [
    pytest.param({}, True, id="this-process"),
    pytest.param({"started": 1}, False, id="its-pid-was-given-anew"),
    pytest.param({"pid": 2**22 + 1}, False, id="no-such-pid"),
    pytest.param({"world": f"b {NAMESPACE}"}, False, id="the-machine-was-started-anew"),
    pytest.param({"world": f"{BOOT} pid:[1]"}, None, id="another-container"),
])
def test_whether_it_lives(change, lives):
    found = replace(ProcessId.here(), **change)
    assert found.lives is lives and found.gone is (lives is False)


def test_one_that_has_ended_is_gone_also_before_its_parent_has_noticed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = ProcessId(world(), child.pid, started(child.pid))
    assert known.lives
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert known.gone
    child.communicate()
    assert known.gone
