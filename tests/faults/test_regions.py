"""Several servers with CPU tiers on one host: each has a region of its own, and whoever dies takes no neighbour's along."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import played
import pytest
from played import quiet
from roomfarm import wait_for

from farm import server, sweep
from farm.bench import Prompt
from farm.errors import FarmError
from farm.lifeline import processes_of_run
from farm.records import Reason
from farm.supervisor import regions

pytestmark = pytest.mark.faults
PROJECT = Path(server.__file__).parent.parent
PROMPT = Prompt((1, 2, 3), "0" * 64)
TIER = "--kv-offloading-size=0.01"  # GiB

# A farm of one server, which says where its supervisor is and serves until it is ended.
OTHER_FARM = """
import dataclasses, sys
from pathlib import Path
import played
from farm import server
spec = played.spec_of(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], "engine")
with server.boot(dataclasses.replace(spec, args=(sys.argv[4],), records=Path(sys.argv[5])), played.quiet) as running:
    print(running._child.supervisor_pid, *running._child.processes(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a played tree, and the mark of what runs."""
    played.write_tree(tmp_path / "tree")
    (tmp_path / "state").mkdir()
    run = f"run-{os.getpid()}-{time.monotonic_ns()}"
    yield tmp_path, run
    wait_for(lambda: processes_of_run(run) == [], 20, "processes are left")


def spec(place, name):
    folder, run = place
    (folder / name).mkdir()
    made = played.spec_of(folder / "tree", folder / name, run, "engine")
    return dataclasses.replace(made, args=(TIER,), records=sweep.records(folder / "state"))


def region_of(pids):
    (path,) = regions(pids)
    return Path(path)


def answers(running):
    return running.complete(PROMPT, max_tokens=2, deadline_s=20).completion_tokens == 2


def api(running):
    return running.pid


def engine(running):
    return next(pid for pid in running._child.processes() if regions([pid]))


def supervisor(running):
    return running._child.supervisor_pid


@pytest.mark.parametrize("whom", [api, engine, supervisor], ids=lambda whom: whom.__name__)
def test_a_server_that_is_killed_takes_its_own_region_along_and_no_other(place, whom):
    with contextlib.ExitStack() as neighbours:
        ones = [neighbours.enter_context(server.boot(spec(place, f"n{n}"), quiet)) for n in range(2)]
        theirs = {region_of(one._child.processes()) for one in ones}
        with pytest.raises(FarmError) as caught, server.boot(spec(place, "victim"), quiet) as victim:
            ours = region_of(victim._child.processes())
            assert len({ours, *theirs}) == 3
            assert answers(victim)
            os.kill(whom(victim), signal.SIGKILL)
            began = time.monotonic()
            answers(victim)
        assert caught.value.reason in (Reason.SERVER_LOST, Reason.ENGINE_DEAD)
        wait_for(lambda: not ours.exists(), 20, "the region of the dead server is left")
        print(f"\nkill -9 of the {whom.__name__}: its region was gone after {time.monotonic() - began:.2f} s")
        assert all(region.exists() for region in theirs)
        assert {region_of(one._child.processes()) for one in ones} == theirs
        assert all(map(answers, ones))
    assert not any(region.exists() for region in theirs)  # each went with its own server
    assert not list(sweep.records(place[0] / "state").iterdir())


def test_what_a_dead_farm_left_is_swept_beside_living_neighbours(place):
    """Caller and supervisor killed at once: the next actor that starts finds the region, and no other."""
    folder, run = place
    (folder / "other").mkdir()
    records = sweep.records(folder / "state")
    (folder / "tmp").mkdir()
    argv = [sys.executable, "-c", OTHER_FARM, folder / "tree", folder / "other", run, TIER, records]
    other = subprocess.Popen(argv, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             env={**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{PROJECT / 'tests'}"})
    with contextlib.ExitStack() as neighbours:
        try:
            its_supervisor, *pids = map(int, other.stdout.readline().split())
            ours = region_of(pids)
            ones = [neighbours.enter_context(server.boot(spec(place, f"n{n}"), quiet)) for n in range(2)]
            theirs = {region_of(one._child.processes()) for one in ones}
            os.kill(its_supervisor, signal.SIGSTOP)  # so that neither cleans up after the other
        finally:
            other.kill()
            other.communicate()
        os.kill(its_supervisor, signal.SIGKILL)
        assert ours.exists()
        swept = sweep.sweep(folder / "state", [folder / "tmp"])
        print(f"\n{swept}")
        assert f"removed {ours} of run {run}" in swept.ended
        assert not ours.exists() and all(region.exists() for region in theirs)
        assert all(map(answers, ones))
    assert not any(region.exists() for region in theirs)
