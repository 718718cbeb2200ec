"""What a sandbox shows, and what it refuses to; what it keeps out is shown by tests/faults/test_isolation.py."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from farm import isolation
from farm.errors import FarmError
from farm.isolation import Sandbox
from farm.records import Reason, Verdict


def test_a_missing_bubblewrap_is_told_with_the_next_step(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FarmError, match="apt install bubblewrap") as caught:
        Sandbox.find()
    assert (caught.value.verdict, caught.value.reason) == (Verdict.ERROR, Reason.ISOLATION_MISSING)


def test_a_bubblewrap_that_may_not_is_told_in_its_own_words(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(FarmError, match="No permissions to create new namespace.*user namespaces") as caught:
        Sandbox.find()
    assert caught.value.reason is Reason.ISOLATION_MISSING


def test_a_whole_home_is_never_shown(sandbox, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path, tmp_path.parent, Path("/")):
        with pytest.raises(FarmError, match="all of") as caught:
            sandbox.within([path])
        assert caught.value.reason is Reason.ISOLATION_MISSING


def test_paths_that_a_profile_names_are_found(tmp_path):
    (tmp_path / "drafter").mkdir()
    words = ["--x", f'{{"model": "{tmp_path}/drafter", "n": 3}}', f"--load={tmp_path}", "/no/such/path", "a/b", "/usr/lib", "/"]
    assert isolation.named(words) == [tmp_path, tmp_path / "drafter"]


def printed(sandbox: Sandbox, code: str, readable=(), writable=(), cwd: Path | None = None) -> str:
    python = Path(sys.executable)
    within = sandbox.within([*isolation.interpreter(python), *readable], writable, cwd=cwd)
    done = subprocess.run([*within, sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_paths_are_shown_where_they_are_and_the_deeper_wins(sandbox, tmp_path):
    kept, inner = tmp_path / "kept", tmp_path / "kept" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "secret").touch()
    code = f"import os; open({str(inner / 'new')!r}, 'w').close(); print(os.getcwd(), os.listdir({str(tmp_path)!r}))"
    assert printed(sandbox, code, [kept], [inner], kept) == f"{kept} ['kept']"
    assert (inner / "new").exists()
    assert "Read-only file system" in printed(sandbox, f"open({str(kept / 'new')!r}, 'w')", [kept], [inner], kept)


def test_a_folder_to_write_to_is_made_and_a_missing_one_to_read_is_left_out(sandbox, tmp_path):
    assert printed(sandbox, "print('runs')", [tmp_path / "gone"], [tmp_path / "a" / "b"]) == "runs"
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("path", ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger"])
def test_knobs_of_the_kernel_are_read_only_even_for_root(sandbox, path):
    if not os.path.exists(path):
        pytest.skip(f"{path} is not there")
    said = printed(sandbox, f"open({path!r}, 'a').close(); print('opened')")
    assert "Read-only file system" in said or "Permission denied" in said


def test_what_not_every_user_may_read_of_etc_is_masked(sandbox):
    closed = [p for p in Path("/etc").rglob("*") if not p.is_symlink() and p.is_file() and not p.stat().st_mode & stat.S_IROTH]
    code = f"""
def read(path):
    try:
        with open(path, 'rb') as file:
            return file.read()
    except OSError:
        return b''
print([path for path in {list(map(str, closed))!r} if read(path)], len(read('/etc/passwd')) > 0)
"""
    assert printed(sandbox, code) == "[] True"


def test_an_interpreter_of_an_environment_brings_the_one_below_it(tmp_path):
    base, env = tmp_path / "base", tmp_path / "env"
    for folder in (base / "bin", env / "bin"):
        folder.mkdir(parents=True)
    (base / "bin" / "python3.11").touch()
    (env / "bin" / "python3").symlink_to(base / "bin" / "python3.11")
    (env / "bin" / "python").symlink_to("python3")
    (env / "pyvenv.cfg").write_text(f"home = {tmp_path}/other/bin\nversion = 3.11\n")
    assert isolation.interpreter(env / "bin" / "python") == [env, tmp_path / "other", base]
