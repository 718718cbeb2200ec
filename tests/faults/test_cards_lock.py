"""Two farms and one card: never both at once; who waits says for whom; who is killed lets go at once.

Real processes, the real worker and its lock; only the card is played (cardfarm.py).
"""

import json
import os
import pwd
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import pytest
from playedcard import play

from farm.cardlock import CardLock, Held
from farm.places import host_state
from farm.quarantine import CardError, Journal
from farm.records import Reason, utc_now
from farm.supervisor import started

FARM = Path(__file__).parent / "cardfarm.py"
PATHS = [str(Path(__file__).parents[up]) for up in (0, 1, 2)]  # cardfarm, playedcard, farm
GOES_ON_S = 5.0  # issue 5: after the holder was killed


class Farm:
    """A running cardfarm.py, and what it says."""

    def __init__(self, folder, run, *, how="alone", cells=1, seconds=0.05, busy_wait_s=60.0):
        self.run, self.heard, self._errors = run, [], folder / f"{run}.err"
        env = {**os.environ, "FARM_HOST_STATE": str(folder / "state"), "TEST_PLAYED_CARDS": str(folder),
               "FARM_CACHE": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(PATHS)}
        words = [how, run, cells, seconds, folder, busy_wait_s, 2, 3600.0]
        self.process = subprocess.Popen([sys.executable, str(FARM), *map(str, words)], env=env, text=True,
                                        stdout=subprocess.PIPE, stderr=self._errors.open("w"))
        self._lines = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def until(self, wanted, within_s=60.0):
        """The first event that is `wanted`, waiting for it; fails where none comes."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                event = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                pytest.fail(f"{self.run} says no such thing within {within_s} s: {self.heard}")
            assert event is not None, f"{self.run} ended: {self.heard} {self._errors.read_text()}"
            self.heard.append(event)
            if wanted(event):
                return event

    def end(self):
        """Everything that it has said, once it has ended by itself."""
        while (event := self._lines.get(timeout=120)) is not None:
            self.heard.append(event)
        assert self.process.wait(60) == 0, self._errors.read_text()
        return self.heard


@pytest.fixture
def farm(tmp_path):
    started = []

    def start(run, **more):
        started.append(Farm(tmp_path, run, **more))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def measuring(event):
    return event.get("text") == "measuring"


def waits(event):
    return event.get("text", "").startswith("waits for")


def ended(event):
    return event["event"] == "ended"


@pytest.mark.faults
def test_two_farms_never_have_the_card_at_once(farm):
    one, two = farm("run-1", cells=25), farm("run-2", cells=25)
    ends = [e for f in (one, two) for e in f.end() if ended(e)]
    assert [e["verdict"] for e in ends] == ["PASS"] * 50, [e for e in ends if e["verdict"] != "PASS"]
    assert any(map(waits, one.heard)) or any(map(waits, two.heard))  # they did meet


@pytest.mark.faults
def test_the_second_says_for_whom_and_goes_on_when_the_first_is_killed(farm, capsys):
    first = farm("run-1", seconds=600)
    first.until(measuring)
    second = farm("run-2")
    said = second.until(waits)["text"]
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert f"held by {user} (process {first.process.pid}, run run-1, cell cell-0, for " in said
    first.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    second.until(measuring)
    took = time.monotonic() - killed
    with capsys.disabled():
        print(f"\n  kill -9 of the holder: the second is on the card after {took:.2f} s")
    assert took < GOES_ON_S
    assert second.until(ended)["verdict"] == "PASS"


@pytest.mark.faults
@pytest.mark.parametrize("busy_wait_s", [0.0, 1.0])
def test_a_card_that_stays_busy_ends_the_attempt_as_card_busy(farm, busy_wait_s):
    first = farm("run-1", seconds=600)
    first.until(measuring)
    second = farm("run-2", busy_wait_s=busy_wait_s)
    end = second.until(ended)
    assert (end["verdict"], end["reason"]) == ("ERROR", "card-busy")
    assert f"process {first.process.pid}, run run-1" in end["detail"]
    assert bool(list(filter(waits, second.heard))) is (busy_wait_s > 0)
    assert first.process.poll() is None  # nobody has ended it


@pytest.mark.faults
def test_a_stopped_holder_still_holds(farm):
    """SIGSTOP is no death: the card stays with it, whatever it is doing there."""
    first = farm("run-1", seconds=600)
    first.until(measuring)
    first.process.send_signal(signal.SIGSTOP)
    assert farm("run-2", busy_wait_s=1.0).until(ended)["reason"] == "card-busy"
    first.process.send_signal(signal.SIGCONT)


@pytest.mark.faults
@pytest.mark.ray
def test_two_whole_farms_with_a_ray_each(farm, tmp_path, capsys):
    """As users start them: the second's driver says for whom it waits; the first's driver is killed, and its actor goes."""
    first = farm("run-1", how="ray", seconds=600)
    first.until(measuring, within_s=120)
    second = farm("run-2", how="ray", cells=3, busy_wait_s=300)
    actor, server = map(int, (tmp_path / "on-card-1").read_text().split())
    said = second.until(waits, within_s=120)
    assert f"(process {actor}, run run-1, cell cell-0, for " in said["text"]
    first.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    second.until(measuring)
    took = time.monotonic() - killed
    with capsys.disabled():
        print(f"\n  kill -9 of a driver: the other farm is on the card after {took:.2f} s")
    assert took < GOES_ON_S
    assert [e["verdict"] for e in second.end() if ended(e)] == ["PASS"] * 3
    deadline = time.monotonic() + 30
    while started(actor) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started(actor) is started(server) is None


@pytest.mark.faults
def test_what_the_killed_farm_has_left_on_the_card_is_waited_for(farm, tmp_path, monkeypatch, capsys):
    """Its server ignores TERM, so its supervisor needs the whole grace; the next farm holds the lock, and its gate waits."""
    monkeypatch.setenv("TEST_STUBBORN", "1")
    first = farm("run-1", seconds=600)
    first.until(measuring)
    _, server = map(int, (tmp_path / "on-card-1").read_text().split())
    second = farm("run-2")
    second.until(waits)
    first.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert f"process {server} (sh of " in second.until(lambda e: waits(e) and "held by" not in e["text"])["text"]
    second.until(measuring)
    with capsys.disabled():
        print(f"\n  kill -9 of a farm with a stubborn server: the second measures after {time.monotonic() - killed:.2f} s")
    assert second.until(ended)["verdict"] == "PASS"  # its witness: neither process was there any more


# --- other users of the host -----------------------------------------------------------------


NOBODY = pwd.getpwnam("nobody").pw_uid


@pytest.fixture
def shared():
    """A host's state as root makes it, in a place that everybody reaches."""
    if os.geteuid() != 0:
        pytest.skip("only root can play two users")
    folder = Path(tempfile.mkdtemp(prefix="farm-test-users-"))
    folder.chmod(0o755)
    state = folder / "state"
    state.mkdir()
    state.chmod(0o1777)
    yield state
    shutil.rmtree(folder)


def as_nobody(do):
    """As `in_child`, by the user nobody."""
    def become():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        do()

    return in_child(become)


def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def never(holder):
    raise AssertionError(f"waits for {holder}")


def test_users_share_locks_and_each_sees_who_has_the_card(shared, capsys):
    lock = CardLock(shared, "GPU-1")
    go, gone = os.pipe()

    def nobody_holds():
        with lock.held("run-n", "cell-n", wait_s=0, waiting=never):
            os.write(gone, b"x")
            time.sleep(600)

    with lock.held("run-r", "cell-r", wait_s=0, waiting=never):  # so its file is root's

        def nobody_waits():
            assert lock.holder().run == "run-r" and lock.holder().user == "root"
            try:
                with lock.held("run-n", "cell-n", wait_s=0, waiting=never):
                    pass
            except Held as held:
                assert held.holder.user == "root"
            else:
                raise AssertionError("nobody got a card that root has")

        assert status_of(as_nobody(nobody_waits)) == 0
    child = as_nobody(nobody_holds)  # in root's file
    assert os.read(go, 1) == b"x"
    assert (lock.holder().user, lock.holder().process.pid) == ("nobody", child)
    with pytest.raises(Held), lock.held("run-r", "cell-r", wait_s=0, waiting=never):
        pass
    os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    with lock.held("run-r", "cell-r", wait_s=30, waiting=lambda holder: None):
        took = time.monotonic() - killed
    status_of(child)
    with capsys.disabled():
        print(f"\n  kill -9 of another user's holder: the card is ours after {took:.2f} s")
    assert took < GOES_ON_S


@pytest.mark.parametrize("first", ["root", "nobody"])
def test_users_share_quarantines_whoever_made_the_file(shared, first):
    journal = Journal(shared, "GPU-1", "RTX 3090")

    def err():
        journal.erred(CardError(utc_now(), Reason.MEMORY_HELD, "held", "r", "c"), after=2, for_s=60)

    for who in (first, "nobody" if first == "root" else "root"):
        if who == "root":
            err()
        else:
            assert status_of(as_nobody(err)) == 0
    assert len(journal.history().quarantine.errors) == 2

    def nobody_sees():
        assert len(journal.history().quarantine.errors) == 2

    assert status_of(as_nobody(nobody_sees)) == 0


# --- a foreign process on the card ------------------------------------------------------------


@pytest.mark.faults
def test_a_foreign_process_is_waited_for_named_and_untouched(farm, tmp_path, capsys):
    """Its pid is played as a client of the card; the process is real, and nobody of ours."""
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        card = play(tmp_path, 0, 1)
        card.say(clients=[stranger.pid])
        one = farm("run-1", busy_wait_s=1.0)
        end = one.until(ended)
        assert (end["verdict"], end["reason"]) == ("ERROR", "card-busy")
        user = pwd.getpwuid(os.geteuid()).pw_name
        assert f"process {stranger.pid} (sleep of {user})" in end["detail"]
        assert f"process {stranger.pid} (sleep of {user})" in next(filter(waits, one.heard))["text"]
        assert not any(map(measuring, one.heard))
        assert stranger.poll() is None  # not a signal
        two = farm("run-2")
        two.until(waits)
        card.say(clients=[])
        left = time.monotonic()
        two.until(measuring)
        with capsys.disabled():
            print(f"\n  the foreign process left: measuring after {time.monotonic() - left:.2f} s")
        assert two.until(ended)["verdict"] == "PASS"
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# --- the very first use of a host, by many at once ----------------------------------------------


def in_child(do):
    """Start `do` in a forked process; its exit status: 0, unless it raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        do()
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


@pytest.mark.faults
def test_a_host_is_used_first_by_many_at_once(tmp_path, monkeypatch):
    """The folder, the lock and the journal are made by whoever is first; nobody fails, and nobody is doubled."""
    for attempt in range(5):
        state = tmp_path / f"state-{attempt}"
        monkeypatch.setenv("FARM_HOST_STATE", str(state))
        start, go = os.pipe()

        def use(state=state, start=start):
            os.read(start, 1)
            folder = host_state()
            with CardLock(folder, "GPU-1").held("run", "cell", wait_s=60, waiting=lambda holder: None):
                os.close(os.open(state / "witness", os.O_CREAT | os.O_EXCL))
                Journal(folder, "GPU-1").probed("passed", str(os.getpid()))
                os.unlink(state / "witness")

        pids = [in_child(use) for _ in range(12)]
        os.write(go, b"x" * len(pids))
        assert [status_of(pid) for pid in pids] == [0] * len(pids)
        lines = (state / "GPU-1.journal").read_text().splitlines()
        assert sorted(int(json.loads(line)["detail"]) for line in lines) == sorted(pids)
        assert sorted(os.listdir(state)) == ["GPU-1.journal", "GPU-1.lock"]
        os.close(start), os.close(go)
    assert sorted(os.listdir(tmp_path)) == [f"state-{n}" for n in range(5)]
