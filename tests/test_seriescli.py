"""The verbs from outside: exit codes, JSON, a reader that goes."""

import json
import os
import subprocess
import sys

import pytest

from farm.config import PROJECT

LINES = "".join(f"x{n} = {n}\n" for n in range(1, 21))
PATCH = "--- a/v1/a.py\n+++ b/v1/a.py\n@@ -8,5 +8,5 @@\n x8 = 8\n x9 = 9\n-x10 = 10\n+x10 = 100\n x11 = 11\n x12 = 12\n"


@pytest.fixture
def farm(tmp_path):
    (tmp_path / "tree/vllm/v1").mkdir(parents=True)
    (tmp_path / "tree/vllm/v1/a.py").write_text(LINES)
    (tmp_path / "s").mkdir()
    (tmp_path / "s/series").write_text("x.patch\n")
    (tmp_path / "s/x.patch").write_text(PATCH)

    def go(*words, cache=tmp_path / "cache", stdout=subprocess.PIPE):
        return subprocess.run([sys.executable, "-m", "farm", *words], cwd=tmp_path, stdout=stdout, stderr=subprocess.PIPE,
                              text=True, timeout=60, check=False,
                              env={**os.environ, "PYTHONPATH": str(PROJECT), "FARM_CACHE": str(cache)})

    return go


def test_check_prints_one_object(farm, tmp_path):
    done = farm("check", "s", "--source", "tree", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert [(p["name"], p["status"], p["hunks"], p["offsets"], p["detail"]) for p in found["patches"]] == [
        ("x.patch", "clean", 1, [], "")]
    assert found["series"] == [] and (tmp_path / "tree/vllm/v1/a.py").read_text() == LINES


@pytest.mark.parametrize(("spoil", "code"), [
    pytest.param(lambda s: (s / "x.patch").write_text(PATCH.replace("-x10 = 10", "-x10 = 7")), 1, id="rejected"),
    pytest.param(lambda s: (s / "y.patch").write_text(PATCH), 2, id="unlisted"),
])
def test_exit_codes(farm, tmp_path, spoil, code):
    spoil(tmp_path / "s")
    assert farm("check", "s", "--source", "tree").returncode == code


@pytest.mark.parametrize("words", [("check", "nowhere"), ("check", "s", "--source", "nowhere"),
                                   ("check", "s", "--source", "tree", "--pin", "0.29.0"), ("triage", "s"), ("check",),
                                   ("triage", "s", "--pin", "1", "--json", "--markdown"), ("merge-check", "main")])
def test_bad_usage_is_3(farm, words):
    done = farm(*words)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr


def test_a_cache_that_cannot_be_is_bad_usage(farm, tmp_path):
    done = farm("check", "s", "--source", "tree", cache=tmp_path / "s/series")
    assert done.returncode == 3 and "set FARM_CACHE to another" in done.stderr


def test_a_reader_that_goes_does_not_change_the_exit_code(farm):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        assert farm("check", "s", "--source", "tree", stdout=closed).returncode == 0
        assert farm("check", "s", "--source", "tree", "--json", stdout=closed).returncode == 0


ESCAPE = "\x1b[2J\x9b31m"  # clears a terminal; a C1 control in its one-byte form


@pytest.mark.parametrize("words", [("check", "s\x1b[2J", "--source", "tree"), ("check", "s\x1b[2J"),
                                   ("triage", "s\x1b[2J", "--pin", "x\x1b[2J"), ("report", "x\x1b[2J")])
def test_no_name_reaches_the_terminal_as_it_is(farm, tmp_path, words):
    folder = tmp_path / "s\x1b[2J"
    folder.mkdir()
    (folder / "series").write_text(f"{ESCAPE}.patch\nmissing{ESCAPE}\n")
    (folder / f"{ESCAPE}.patch").write_text(f"--- a/v1/{ESCAPE}\n+++ b/v1/{ESCAPE}\n@@ -1 +1 @@\n-a\n+b\n")
    (folder / f"unlisted{ESCAPE}.patch").write_text(PATCH)
    done = farm(*words)
    assert done.returncode in (1, 2, 3) and "Traceback" not in done.stderr, done.stderr
    assert not [c for c in done.stdout + done.stderr if c in "\x1b\x9b"]


def test_names_that_are_no_text_are_printed(farm, tmp_path):
    (tmp_path / "s/x.patch").write_bytes(b"diff --git a/v1/ne\xd6er/__init__.py b/v1/newer/__init__.py\nnew file mode 100644\n")
    done = farm("check", "s", "--source", "tree")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr


def test_a_disk_that_is_full_is_said(farm):
    with open("/dev/full", "w") as full:
        for words in [("check", "s", "--source", "tree", "--json"), ("check", "s", "--source", "tree")]:
            done = farm(*words, stdout=full)
            assert (done.returncode, done.stderr) == (
                2, "farm: cannot write what it prints: No space left on device. Make room and run it again\n")
