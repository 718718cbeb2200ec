"""Stacks of other processes, where py-spy is there."""

import subprocess
import sys
from pathlib import Path

import pytest

from farm import stacks

PYTHON = Path(sys.executable)
HANGS = "import time\ndef hangs_here():\n    print('up', flush=True)\n    time.sleep(99)\nhangs_here()"


@pytest.fixture
def hanging():
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process.pid
        process.kill()


@pytest.mark.skipif(stacks.spy(PYTHON) is None, reason="py-spy is not installed")
def test_the_stack_of_a_process_that_hangs(hanging):
    seen = stacks.taken([hanging, 1 << 22], PYTHON)  # the second is not there
    assert seen.startswith(f"--- py-spy: process {hanging} ---") and "hangs_here" in seen and seen.count("---") == 2


def script(folder: Path, text: str) -> None:
    (folder / "py-spy").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "py-spy").chmod(0o755)


@pytest.mark.parametrize("text", ["echo 'Permission Denied: Try running again with elevated permissions' >&2; exit 1",
                                  "exec sleep 30", "true"], ids=["denied", "hangs", "silent"])
def test_a_py_spy_that_says_nothing_costs_its_deadline_at_most(hanging, tmp_path, monkeypatch, text):
    script(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert stacks.taken([hanging], PYTHON, deadline_s=1.0) == ""


def test_it_is_found_on_path_or_beside_an_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert stacks.spy(tmp_path / "python") is None
    assert stacks.taken([1], tmp_path / "python") == ""
    script(tmp_path, "true")
    assert stacks.spy(tmp_path / "python") == str(tmp_path / "py-spy")


def test_what_is_kept_is_bounded(tmp_path, monkeypatch):
    script(tmp_path, "seq 1000")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    seen = stacks.taken(range(100, 200), PYTHON)
    assert len(seen.splitlines()) == stacks.PROCESSES * (stacks.LINES + 1)
