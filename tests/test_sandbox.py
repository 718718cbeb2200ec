"""What a sandbox shows, and what it refuses to; what it keeps out is shown by tests/faults/test_isolation.py."""

import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from farm import isolation
from farm.bench import Card
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


# A user namespace that may have none below it, and in it a user without rights: as where the host denies them.
DENIED = ("unshare", "--user", "--map-user=1000", "--keep-caps", "/bin/sh", "-c",
          'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all --ambient-caps=-all "$@"', "sh")
FIND = """
from farm.errors import FarmError
from farm.isolation import Sandbox
try:
    print(Sandbox.find())
except FarmError as error:
    print(error.reason.value, error)
"""


def test_denied_user_namespaces_are_told_with_what_allows_them(sandbox):
    if subprocess.run([*DENIED, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("unshare of util-linux 2.38 and user namespaces are needed to deny them")
    done = subprocess.run([*DENIED, sys.executable, "-c", FIND], capture_output=True, text=True, check=False,
                          cwd=Path(isolation.__file__).parent.parent)
    assert done.stdout.startswith("isolation-missing"), done
    assert "namespace" in done.stdout.partition("It needs")[0] and "sysctl user.max_user_namespaces above 0" in done.stdout


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


def test_what_it_writes_to_memory_is_bounded(sandbox):
    code = """
import os
def bytes_of(path):
    there = os.statvfs(path)
    return there.f_blocks * there.f_frsize
def refused(path):
    try:
        open(os.path.join(path, 'x'), 'w').close()
    except OSError:
        return True
mounts = [line.split() for line in open('/proc/self/mounts')]
closed = [path for _, path, kind, options, *_ in mounts if kind == 'tmpfs' and options.startswith('rw')]
print(sorted(closed), refused('/dev'), bytes_of('/tmp'), bytes_of('/dev/shm'))
"""
    there = printed(sandbox, code)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    places, refused, tmp, shm = there.rsplit(maxsplit=3)
    assert (places, refused) == ("['/dev/shm', '/tmp']", "True")
    assert int(shm) <= 0.51 * memory and int(tmp) <= (0.13 if sandbox.sizes else 0.51) * memory


def test_a_bubblewrap_that_knows_no_sizes_makes_a_sandbox_nonetheless(sandbox, tmp_path, monkeypatch):
    older = tmp_path / "bwrap"
    older.write_text(f"#!/bin/sh\ncase \"$*\" in --help) exit 0;; *--size*) exit 1;; esac\nexec {sandbox.program} \"$@\"\n")
    older.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = Sandbox.find()
    assert (found.program, found.sizes) == (str(older), False)
    assert printed(found, "print('runs')") == "runs"


FORKS = "i=0; while [ $i -lt 120 ]; do sleep 60 & i=$((i+1)); done; echo all"
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--") if os.getuid() == 0 else ()


@pytest.mark.skipif(shutil.which("prlimit") is None or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
                    reason="takes prlimit, and Linux 5.14")
@pytest.mark.parametrize(("most", "says"), [(100, "fork"), (1000, "all")])
def test_processes_are_counted_by_sandbox(sandbox, most, says):
    """Of a user without rights, whose sandbox has a user namespace; beside it the user has as many as it likes."""
    limited = replace(sandbox, limiter=("prlimit", f"--nproc={most}:{most}"))
    with subprocess.Popen([*AS_NOBODY, "/bin/sh", "-c", f"{FORKS}; read end"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          start_new_session=True) as others:
        try:
            assert others.stdout.readline() == b"all\n"
            done = subprocess.run([*AS_NOBODY, *limited.within(), "/bin/sh", "-c", FORKS], capture_output=True, text=True,
                                  timeout=60, check=False)
        finally:
            os.killpg(others.pid, signal.SIGKILL)
    assert says in done.stdout + done.stderr


def test_processes_are_bounded_where_a_user_namespace_makes_the_sandbox(sandbox):
    assert sandbox.limiter == () if os.getuid() == 0 else sandbox.limiter[1].startswith("--nproc=")


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


@pytest.mark.parametrize(("card", "files"), [
    pytest.param(Card("GPU-3", "RTX 3090", "cuda", "h", facts={"platform": "native"}),
                 ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"], id="its-own-and-the-drivers"),
    pytest.param(Card("GPU-3", "RTX 3090", "cuda", "h", facts={"platform": "WSL2"}), ["/dev/dxg"], id="wsl2-has-one-for-all"),
    pytest.param(Card("CPU-0", "cpu slot 1/1", "cpu", "h"), [], id="cpu-slot"),
    pytest.param(None, [], id="no-card"),
])
def test_of_device_files_only_those_of_the_card_are_shown(sandbox, monkeypatch, card, files):
    played = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMinorNumber=lambda uuid: int(uuid.decode()[-1]), NVMLError=pynvml.NVMLError)
    monkeypatch.setattr(isolation, "pynvml", played)
    argv = sandbox.within(card=card)
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--dev-bind-try"] == files


def test_an_interpreter_of_an_environment_brings_the_one_below_it(tmp_path):
    base, env = tmp_path / "base", tmp_path / "env"
    for folder in (base / "bin", env / "bin"):
        folder.mkdir(parents=True)
    (base / "bin" / "python3.11").touch()
    (env / "bin" / "python3").symlink_to(base / "bin" / "python3.11")
    (env / "bin" / "python").symlink_to("python3")
    (env / "pyvenv.cfg").write_text(f"home = {tmp_path}/other/bin\nversion = 3.11\n")
    assert isolation.interpreter(env / "bin" / "python") == [env, tmp_path / "other", base]


@pytest.fixture
def masked(monkeypatch):
    """A folder of the system, as /opt, of which what only its owner may read is hidden."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # a sandbox has a /tmp of its own
        place = Path(folder)
        place.chmod(0o755)
        monkeypatch.setattr(isolation, "_SYSTEM", (*isolation._SYSTEM, folder))
        monkeypatch.setattr(isolation, "_MASKED", {**isolation._MASKED, folder: 3})
        monkeypatch.setattr(isolation, "_PARTLY_SHOWN", folder)
        yield place


def _said(argv, script) -> str:
    return subprocess.run([*argv, "/bin/sh", "-c", script], capture_output=True, text=True, timeout=30, check=False).stdout


def test_a_hidden_folder_that_is_named_to_write_to_is_written_to(sandbox, masked):
    (masked / "caches").mkdir(mode=0o700)
    assert _said(sandbox.within(writable=[masked / "caches"]), f"touch {masked}/caches/new && echo written") == "written\n"


def test_what_is_hidden_below_a_named_folder_is_shown_and_no_more(sandbox, masked):
    for name in ("env", "other"):
        (masked / name / "bin").mkdir(parents=True)
        (masked / name / "bin" / "tool").write_text(f"{name}\n")
        (masked / name / "bin").chmod(0o700)
    assert _said(sandbox.within([masked / "env"]), f"cat {masked}/*/bin/tool") == "env\n"
    assert _said(sandbox.within([masked]), f"cat {masked}/*/bin/tool") == ""


def test_a_model_that_a_command_line_names_is_shown_where_it_would_be_hidden(masked):
    (masked / "models" / "m").mkdir(parents=True)
    assert isolation.named([f"--model={masked}/models/m", f"--all={masked}", "--etc=/etc/ssl"]) == [masked / "models/m"]


def test_a_folder_of_the_system_that_is_a_link_makes_a_sandbox_nonetheless(sandbox, masked, monkeypatch):
    (masked / "there" / "secret").mkdir(parents=True)
    (masked / "there" / "secret").chmod(0o700)
    link = masked / "link"
    link.symlink_to("there")
    monkeypatch.setattr(isolation, "_SYSTEM", (*isolation._SYSTEM[:-1], str(link)))
    monkeypatch.setattr(isolation, "_MASKED", {str(link): 3})
    assert _said(sandbox.within(), "echo made") == "made\n"


def test_what_only_its_owner_may_read_is_hidden_but_for_what_is_named_below_it(sandbox, monkeypatch):
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # a sandbox has a /tmp of its own
        place = Path(folder)
        place.chmod(0o755)
        (place / "ours" / "deep").mkdir(parents=True)
        for name in ("ours/other", "ours/deep/named", "secret", "open"):
            (place / name).write_text(f"{name}\n")
        (place / "ours").chmod(0o700)
        (place / "secret").chmod(0o600)
        monkeypatch.setattr(isolation, "_SYSTEM", (*isolation._SYSTEM, folder))
        monkeypatch.setattr(isolation, "_MASKED", {**isolation._MASKED, folder: 3})
        argv = sandbox.within([place / "ours/deep/named"], cwd=place)
        done = subprocess.run([*argv, "/bin/sh", "-c", "cat open secret ours/deep/named ours/other; touch ours/new"],
                              capture_output=True, text=True, timeout=30)
        assert done.stdout == "open\nours/deep/named\n", done.stderr
        assert not (place / "ours/new").exists()
