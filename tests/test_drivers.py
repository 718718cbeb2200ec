"""Who drives a run, and whether it lives: by pid on this machine, by lock where it is held."""

import dataclasses
import os
import subprocess
import sys

import pytest
from pyarrow import fs as pafs

from farm import drivers
from farm.dataset import Dataset
from farm.drivers import Driver, Standing, driving, standing
from farm.errors import ResultsUnwritable, UsageError
from farm.store import Store
from farm.supervisor import started

RUN = "r1"
HOLD = "import sys; from farm.drivers import driving; from farm.store import Store\n" \
       "with driving(Store.at(sys.argv[1]), 'r1'): print('held', flush=True); sys.stdin.read()"


def ended():
    """A process that has ended, and the words of another driver with its pid."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    pid = process.pid
    process.wait()
    return dataclasses.replace(Driver.here(), pid=pid)


@pytest.mark.parametrize(("change", "stands"), [
    pytest.param({}, Standing.ALIVE, id="this-process"),
    pytest.param({"started": 1}, Standing.DEAD, id="its-pid-was-given-anew"),
    pytest.param({"pid": 2**22 + 1}, Standing.DEAD, id="no-such-pid"),
    pytest.param({"boot": "b"}, Standing.DEAD, id="the-machine-was-started-anew"),
    pytest.param({"boot": "b", "host": "other"}, Standing.ELSEWHERE, id="another-machine"),
    pytest.param({"namespace": "pid:[1]"}, Standing.ELSEWHERE, id="another-container"),
])
def test_what_can_be_known_of_a_driver(change, stands):
    assert dataclasses.replace(Driver.here(), **change).standing is stands


def test_a_driver_that_has_ended_is_dead_also_before_its_parent_has_noticed():
    assert ended().standing is Standing.DEAD
    zombie = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    driver = dataclasses.replace(Driver.here(), pid=zombie.pid, started=started(zombie.pid))
    assert driver.standing is Standing.ALIVE
    zombie.kill()
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert driver.standing is Standing.DEAD
    zombie.wait()


def test_a_driver_is_a_word_of_a_row():
    assert Driver.parse(str(Driver.here())) == Driver.here()


@pytest.mark.parametrize("words", [None, "", "pid 12", "[]", "{}", '{"pid": 1}'])
def test_other_words_name_no_driver(words):
    assert Driver.parse(words) is None


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "results")


@pytest.fixture
def holder(store):
    process = subprocess.Popen([sys.executable, "-c", HOLD, store.root], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def row(status="running", **change):
    return {"status": status, "process": str(dataclasses.replace(Driver.here(), **change))}


def test_a_lock_speaks_where_a_pid_means_nothing(store, holder):
    assert standing(store, RUN, row(host="other", boot="b")) is Standing.ALIVE
    with pytest.raises(UsageError, match="run r1 is driven by another process; see: farm runs"), driving(store, RUN):
        pytest.fail("two drive one run")
    holder.kill()
    holder.wait()
    assert standing(store, RUN, row(host="other", boot="b")) is Standing.ELSEWHERE
    with driving(store, RUN):
        pass


@pytest.mark.parametrize("status", ["finished", "failed", "interrupted"])
def test_a_row_that_was_closed_has_no_driver(store, status):
    assert standing(store, RUN, row(status)) is Standing.DEAD
    assert standing(store, RUN, {}) is Standing.DEAD


def test_a_root_that_is_no_folder_has_no_lock():
    remote = Store("mock://root", Dataset(pafs._MockFileSystem(), "root"))
    with driving(remote, RUN):
        assert standing(remote, RUN, row()) is Standing.ALIVE
    assert standing(remote, RUN, row(started=1)) is Standing.DEAD


def test_a_lock_that_cannot_be_made_says_which(store, tmp_path):
    (tmp_path / "results" / "table=runs").write_text("")
    with pytest.raises(ResultsUnwritable, match=r"run r1: .*run=r1/.driver.lock cannot be made"), driving(store, RUN):
        pass


def test_a_file_system_without_locks_is_used_without(store, monkeypatch):
    def none(*_):
        raise OSError(drivers.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(drivers.fcntl, "flock", none)
    with driving(store, RUN):
        assert standing(store, RUN, row()) is Standing.ALIVE
