"""Inputs that a hostile session found: each once passed for something that it was not."""
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from farm import bootlog, lifeline, stats
from farm.gnupatch import read_report
from farm.patchfile import PatchSyntaxError, parse_patch

HEAD = b"--- a/v1/pool.py\n+++ b/v1/pool.py\n"
HUNK = b"@@ -1,2 +1,2 @@\n-x0 = 0\n+x0 = 9\n x1 = 1\n"

@pytest.mark.parametrize("data, line", [
    (HEAD + b"1d\n.\n", 1),                                              # an ed script below good headers
    (HEAD + HUNK + b"\n@@ -7,2 +7,2 @@\n x6 = 6\n-x7 = 7\n+x7 = 77\n", 8),  # a blank line: GNU patch drops hunk 2, status 0
    (HEAD + HUNK.replace(b"-1,2 +1,2", b"-1,1 +1,1") + b"", 6),           # more lines than counted
    (HEAD, 1),                                                           # cut off
])
def test_what_gnu_patch_would_silently_leave_out_is_refused(data, line):
    with pytest.raises(PatchSyntaxError) as caught:
        parse_patch(data)
    assert caught.value.line == line

def test_a_mail_with_its_signature_passes():
    mail = b"From abc\nSubject: x\n\n---\n v1/pool.py | 2 +-\n\ndiff --git a/v1/pool.py b/v1/pool.py\nindex 1..2 100644\n"
    assert len(parse_patch(mail + HEAD + HUNK + b"-- \n2.39.2\n\n")) == 1

def test_another_form_than_unified_is_told():
    assert read_report(0, "Hmm...  The next patch looks like an ed script to me...\n").strange_form == "an ed script"
    assert read_report(0, "Hmm...  Looks like a unified diff to me...\n").strange_form is None

@pytest.mark.parametrize("margin", [math.nan, math.inf, -1.0])
def test_a_margin_is_a_finite_number(margin):
    with pytest.raises(ValueError):
        stats.Rule("kv_peak", "unchanged", margin)

@pytest.mark.parametrize("line", ["Padding mamba page size by 1.2.3%", "GPU KV cache size: , tokens",
                                  "GPU KV cache size: " + "9" * 5000 + " tokens"])
def test_odd_numbers_in_a_log_are_gaps(line):
    assert bootlog.parse([line]).gaps

def test_a_renamed_grandchild_is_swept_when_the_supervisor_was_killed(tmp_path):
    pytest.importorskip("setproctitle")  # vLLM's engines name themselves with it
    inner = "import setproctitle, time; setproctitle.setproctitle('VLLM::EngineCore'); open('up', 'w').close(); time.sleep(60)"
    outer = (f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True); "
             "time.sleep(60)")
    child = lifeline.Supervised.start([sys.executable, "-c", outer], env={**os.environ, "FARM_RUN": "t-hostile"}, cwd=tmp_path,
                                      stdout_path=tmp_path / "log")
    while not (tmp_path / "up").exists():
        time.sleep(0.05)
    below = child.processes()
    os.kill(child.supervisor_pid, signal.SIGKILL)
    child.terminate()
    assert [p for p in below if _runs(p)] == []


def _runs(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

