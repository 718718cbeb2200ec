"""Files that all users of a host share: their modes, and how they are opened."""

import os
import signal
import stat
import subprocess
import sys
import threading

import pytest

from farm import places
from farm.errors import FarmError, UsageError
from farm.hostfile import is_at, lock, open_shared, open_to_read, told


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o022, 0o077], ids=["umask-022", "umask-077"])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_a_new_file_may_be_written_by_everybody_whatever_the_umask(tmp_path, umask):
    os.close(open_shared(tmp_path / "a.lock"))
    assert mode(tmp_path / "a.lock") == 0o666
    assert os.listdir(tmp_path) == ["a.lock"]


def test_an_existing_file_is_opened_as_it_is_and_without_o_creat(tmp_path, monkeypatch):
    """fs.protected_regular refuses O_CREAT on a file of another user in a sticky folder: played here."""
    (tmp_path / "a.lock").write_text("kept")
    real = os.open

    def protected(path, flags, *mode):
        if flags & os.O_CREAT and os.path.exists(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", protected)
    fd = open_shared(tmp_path / "a.lock")
    assert os.pread(fd, 10, 0) == b"kept"
    assert is_at(fd, tmp_path / "a.lock")
    (tmp_path / "a.lock").unlink()
    assert not is_at(fd, tmp_path / "a.lock")
    (tmp_path / "a.lock").write_text("another one")
    assert not is_at(fd, tmp_path / "a.lock")
    os.close(fd)


def test_a_symbolic_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "a.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        open_shared(tmp_path / "a.lock")
    assert (tmp_path / "victim").read_text() == "mine"


LOCKS = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


def test_a_lock_is_waited_for_as_long_as_one_likes_and_freed_by_its_holders_death(tmp_path):
    fd = open_shared(tmp_path / "a.lock")
    with subprocess.Popen([sys.executable, "-c", LOCKS, tmp_path / "a.lock"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert not lock(fd, 0.0) and not lock(fd, 0.1)
        threading.Timer(0.3, holder.kill).start()
        assert lock(fd, 30.0)
        assert holder.wait() == -signal.SIGKILL  # and not before
    os.close(fd)


# --- the folder ------------------------------------------------------------------------------


def test_the_named_folder_is_made_with_its_mode(tmp_path, monkeypatch, umask):
    monkeypatch.setenv("FARM_HOST_STATE", str(tmp_path / "deep" / "state"))
    assert places.host_state() == tmp_path / "deep" / "state"
    assert mode(tmp_path / "deep" / "state") == 0o1777
    (tmp_path / "deep" / "state" / "a.lock").touch()
    assert places.host_state() == tmp_path / "deep" / "state"
    assert os.listdir(tmp_path / "deep") == ["state"]


@pytest.mark.parametrize(("there", "used"), [((), 0), ((1,), 1), ((0, 1), 0)], ids=["none-yet", "second-only", "both"])
def test_everybody_finds_the_same_default(tmp_path, monkeypatch, there, used):
    """A folder that somebody has made already is used, even where a better place could be made by now."""
    both = (tmp_path / "lock" / "patch-farm", tmp_path / "tmp" / "patch-farm")
    monkeypatch.setattr(places, "_SHARED", both)
    monkeypatch.delenv("FARM_HOST_STATE")
    for folder in both:
        folder.parent.mkdir()
    for index in there:
        both[index].mkdir(mode=0o1777)
    assert places.host_state() == both[used]


def test_where_the_first_cannot_be_made_the_second_is(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(places, "_SHARED", (tmp_path / "file" / "patch-farm", tmp_path / "patch-farm"))
    monkeypatch.delenv("FARM_HOST_STATE")
    assert places.host_state() == tmp_path / "patch-farm"


@pytest.mark.parametrize("lay", ["file", "link"])
def test_what_cannot_be_used_is_told_with_the_next_step(tmp_path, monkeypatch, lay):
    state = tmp_path / "state"
    if lay == "file":
        state.touch()
    else:
        (tmp_path / "elsewhere").mkdir()
        state.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("FARM_HOST_STATE", str(state))
    with pytest.raises(UsageError, match="set FARM_HOST_STATE to one that every user"):
        places.host_state()


@pytest.mark.parametrize("lay", ["pipe", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path, lay):
    """A pipe that somebody laid there would be waited for without an end."""
    path = tmp_path / "a.journal"
    os.mkfifo(path) if lay == "pipe" else path.mkdir()
    for use in (open_shared, open_to_read):
        with pytest.raises(FarmError, match="a.journal, which all users of this host share, cannot be used"), told(path):
            use(path)
    assert open_to_read(tmp_path / "none") is None
