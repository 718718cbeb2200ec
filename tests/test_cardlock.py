"""One holder per card; who it is, and what a record of somebody who is gone counts for."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from farm.cardlock import GLANCE_S, CardLock, Held, Holder, duration
from farm.hostfile import open_shared
from farm.processid import ProcessId

CARD = "GPU-1"


def nobody(holder):
    pass


@pytest.fixture
def lock(tmp_path):
    return CardLock(tmp_path, CARD)


def test_a_holder_is_named_while_it_holds_and_not_afterwards(lock):
    assert lock.holder() is None
    with lock.held("run-1", "cell-1", wait_s=0, waiting=nobody):
        holder = lock.holder()
        assert (holder.run, holder.cell, holder.process) == ("run-1", "cell-1", ProcessId.here())
        assert holder.age_s() < 60
        assert f"process {os.getpid()}, run run-1, cell cell-1, for " in str(holder)
    assert lock.holder() is None


def test_a_second_one_does_not_get_it_and_learns_from_whom(lock):
    with lock.held("run-1", "cell-1", wait_s=0, waiting=nobody):
        begun = time.monotonic()
        with pytest.raises(Held) as caught, lock.held("run-2", "c", wait_s=0, waiting=nobody):
            pytest.fail("both have it")
        assert time.monotonic() - begun < GLANCE_S  # no wait where the holder is named
        assert caught.value.holder.run == "run-1"


def test_it_waits_as_long_as_it_may_and_tells_once_then_at_intervals(lock, monkeypatch):
    told = []
    with lock.held("run-1", "cell-1", wait_s=0, waiting=nobody):
        with pytest.raises(Held), lock.held("run-2", "c", wait_s=0.5, waiting=told.append):
            pass
        assert [holder.run for holder in told] == ["run-1"]
        monkeypatch.setattr("farm.cardlock.TELL_EVERY_S", 0.15)
        with pytest.raises(Held), lock.held("run-2", "c", wait_s=0.8, waiting=told.append):
            pass
    assert len(told) >= 3


def test_it_goes_on_when_the_other_one_ends(lock):
    waits = threading.Event()
    order = []

    def first():
        with lock.held("run-1", "cell-1", wait_s=0, waiting=nobody):
            assert waits.wait(30)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    while lock.holder() is None:
        time.sleep(0.01)
    with lock.held("run-2", "c", wait_s=30, waiting=lambda holder: waits.set()):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.parametrize("record", [
    pytest.param("", id="none"),
    pytest.param("{", id="cut-off"),
    pytest.param('["a"]', id="not-ours"),
    pytest.param("dead", id="of-a-dead-process"),
    pytest.param("reused", id="of-a-pid-used-again"),
])
def test_a_record_without_a_living_process_names_nobody(lock, record):
    """Whether the file is locked (its new holder has yet to write) or not."""
    if record in ("dead", "reused"):
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        pid, began = (child.pid, 1) if record == "dead" else (os.getpid(), 1)
        owner = {"world": ProcessId.here().world, "pid": pid, "started": began}
        record = json.dumps({"user": "anna", "process": owner, "run": "r", "cell": "c", "since": "2026-12-01T00:00:00+00:00"})
    lock.path.write_text(record)
    assert lock.holder() is None
    with lock.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock.holder() is None
        with pytest.raises(Held, match="not named"), lock.held("run-2", "c", wait_s=0, waiting=nobody):
            pass
    with lock.held("run-2", "c", wait_s=0, waiting=nobody):
        assert lock.holder().run == "run-2"


def test_a_record_of_another_container_counts_by_its_lock(lock):
    here = ProcessId.here()
    boot = here.world.split(" ")[0]
    record = {"user": "anna", "process": {"world": f"{boot} pid:[1]", "pid": 2**22 + 1, "started": 5}, "run": "r", "cell": "c",
              "since": "2026-12-01T00:00:00+00:00"}
    lock.path.write_text(json.dumps(record))
    assert lock.holder() is None
    with lock.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert (lock.holder().user, lock.holder().run) == ("anna", "r")


def test_a_lock_whose_file_was_removed_excludes_nobody_and_is_not_waited_for(lock):
    with lock.held("run-1", "c", wait_s=0, waiting=nobody):
        lock.path.unlink()
        with lock.held("run-2", "c", wait_s=0, waiting=nobody):
            assert lock.holder().run == "run-2"


def test_a_file_that_is_removed_before_it_is_locked_is_let_go(lock, monkeypatch):
    """Somebody cleans the folder at the worst moment: the lock that counts is that of the file which has the name."""
    opened = []

    def open_and_lose(path):
        fd = open_shared(path)
        if not opened:
            path.unlink()
        opened.append(fd)
        return fd

    monkeypatch.setattr("farm.cardlock.open_shared", open_and_lose)
    with lock.held("run-1", "c", wait_s=0, waiting=nobody):
        assert len(opened) == 2
        assert lock.holder().run == "run-1"


def test_a_glance_at_the_holder_is_no_holder(lock):
    """`farm cards` has the lock for an instant; a farm that may not wait at all must get the card all the same."""
    lock.path.touch()
    with lock.path.open() as glance:
        fcntl.flock(glance, fcntl.LOCK_SH)
        threading.Timer(0.2, glance.close).start()
        with lock.held("run-1", "c", wait_s=0, waiting=nobody):
            assert lock.holder().run == "run-1"


def test_a_child_does_not_inherit_the_lock(lock):
    with lock.held("run-1", "c", wait_s=0, waiting=nobody):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with lock.held("run-2", "c", wait_s=0, waiting=nobody):
            assert child.poll() is None
    finally:
        child.communicate(b"\n")


def test_holder_names_the_user_by_the_account_not_by_the_environment(monkeypatch):
    monkeypatch.setenv("LOGNAME", "somebody-else")
    monkeypatch.setenv("USER", "somebody-else")
    assert Holder.me("r", "c").user != "somebody-else"


@pytest.mark.parametrize(("seconds", "words"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2.0 h")])
def test_durations(seconds, words):
    assert duration(seconds) == words
