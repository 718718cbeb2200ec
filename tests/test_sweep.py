"""What a killed farm leaves behind, and what must not be taken for it: real processes, none of them heavy."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farm import folders, lifeline, sweep
from farm.lifeline import carrying
from farm.processid import ProcessId
from farm.supervisor import parents, started, world

PROJECT = Path(lifeline.__file__).parent.parent
WAIT_S = 20.0
SLEEP = "import time; time.sleep(99)"

CALLER = """
import sys
from pathlib import Path
from farm.lifeline import Supervised
child = Supervised.start([sys.executable, "-c", sys.argv[1]], env={"FARM_RUN": sys.argv[2], "FARM_CELL": "c"}, cwd="/",
                         stdout_path="/dev/null", records=Path(sys.argv[3]))
print(child.supervisor_pid, child.mark, flush=True)
sys.stdin.read()
"""
# A child with an engine in a session of its own.
FAMILY = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"


def until(condition, what: str):
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s"
        time.sleep(0.02)
    return value


@pytest.fixture
def state(tmp_path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def empty(tmp_path) -> list[Path]:
    """A temporary directory without anybody's folders, so that a sweep touches only this test's."""
    (tmp_path / "tmp").mkdir()
    return [tmp_path / "tmp"]


@pytest.fixture
def farm(state):
    """Another farm with one tree of child and engine: (its process, supervisor, mark)."""
    made = []

    def begin(code: str = FAMILY, count: int = 2) -> tuple[subprocess.Popen, int, str]:
        process = subprocess.Popen([sys.executable, "-c", CALLER, code, "run-s", sweep.records(state)], text=True,
                                   env={**os.environ, "PYTHONPATH": str(PROJECT)}, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)
        supervisor, mark = process.stdout.readline().split()
        made.append((process, mark))
        until(lambda: len(carrying(lifeline.MARK, mark)) == count + 2, "the family's start")  # and shim, supervisor
        return process, int(supervisor), mark

    yield begin
    for process, mark in made:
        process.kill()
        process.communicate()
        for pid in carrying(lifeline.MARK, mark):
            with contextlib.suppress(ProcessLookupError):  # its supervisor was faster
                os.kill(pid, signal.SIGKILL)


def kill_both(process: subprocess.Popen, supervisor: int) -> None:
    """Caller, shim and supervisor, so that none can clean up after the others."""
    os.kill(supervisor, signal.SIGSTOP)
    with contextlib.suppress(ProcessLookupError):
        os.kill(parents()[supervisor], signal.SIGKILL)
    process.kill()
    process.wait()
    os.kill(supervisor, signal.SIGKILL)


def test_what_a_killed_farm_and_supervisor_left_is_ended_and_told(farm, state, empty):
    process, supervisor, mark = farm()
    kill_both(process, supervisor)
    left = until(lambda: [p for p in carrying(lifeline.MARK, mark) if started(p)], "the engine")
    begun = time.monotonic()
    swept = sweep.sweep(state, empty)
    print(f"swept in {time.monotonic() - begun:.2f} s: {swept}")
    assert left
    until(lambda: not carrying(lifeline.MARK, mark), "the end of the shim, which waits for the supervisor")
    assert any("of run run-s, whose farm is gone" in line for line in swept.ended)
    assert not list(sweep.records(state).iterdir())
    assert not sweep.sweep(state, empty).ended


def test_a_record_is_removed_with_its_tree(farm, state):
    process, _, mark = farm()
    file = sweep.records(state) / f"{mark}.json"
    assert json.loads(file.read_text())["run"] == "run-s" and file.stat().st_mode & 0o077 == 0
    process.kill()
    until(lambda: not file.exists(), "the record's end")


def test_a_living_farm_keeps_its_server(farm, state, empty):
    process, _, mark = farm()
    before = set(carrying(lifeline.MARK, mark))
    assert sweep.sweep(state, empty).ended == ()
    assert set(carrying(lifeline.MARK, mark)) == before


def test_a_supervisor_that_still_ends_its_tree_is_left_to_it(farm, state, empty):
    process, supervisor, mark = farm(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}", 1)
    until(lambda: _ignores_term(_child(state, mark)), "a deaf child")
    process.kill()
    process.wait()
    sweep.sweep(state, empty)
    until(lambda: not carrying(lifeline.MARK, mark), "the end of the shim, which waits for the supervisor")
    assert started(supervisor) is None


def _child(state, mark) -> int:
    return json.loads((sweep.records(state) / f"{mark}.json").read_text())["child"][0]


def _ignores_term(pid: int) -> bool:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("copied", ["run", "mark"])
def test_a_look_alike_is_left_alone(farm, bystander, state, empty, copied):
    process, supervisor, mark = farm()
    own = {"FARM_RUN": "run-s", "FARM_CELL": "c", lifeline.MARK: mark if copied == "mark" else "0" * 32}
    pid = bystander(own)
    kill_both(process, supervisor)
    sweep.sweep(state, empty)
    assert started(pid) is not None
    assert pid in carrying(lifeline.MARK, mark) or copied == "run"
    # Nothing else of the family, once the shim has seen its supervisor's end: the bystander's parent carries the copy too.
    until(lambda: all(_line_holds(pid, other) for other in carrying(lifeline.MARK, mark)), "the end of the family")


def _line_holds(pid: int, other: int) -> bool:
    return other in [p for p, _ in lifeline.line_of(pid)]


def test_an_id_that_was_given_anew_is_left_alone(bystander, state, empty):
    pid = bystander({"FARM_RUN": "run-s", "FARM_CELL": "c"})
    record(state, supervisor=(pid, started(pid) - 100), child=(pid, started(pid) - 100))
    assert sweep.sweep(state, empty).ended == ()
    assert started(pid) is not None


def test_a_process_older_than_its_record_is_left_alone(bystander, state, empty):
    pid = bystander({lifeline.MARK: "m1"})
    record(state, supervisor=(1 << 22, started(pid) + 1000))
    assert sweep.sweep(state, empty).ended == ()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"mark": "x"}', '{"mark": "x", "world": "w", "owners": [1], "supervisor": 3}'])
def test_what_is_no_record_is_left_alone(state, empty, text):
    file = sweep.records(state) / "x.json"
    file.write_text(text)
    assert sweep.sweep(state, empty).ended == ()
    assert file.exists()


def test_a_record_of_another_container_is_left_alone(bystander, state, empty):
    pid = bystander({lifeline.MARK: "m1"})
    record(state, supervisor=(pid, started(pid)), world=world().partition(" ")[0] + " pid:[1]")
    assert sweep.sweep(state, empty).ended == ()


def test_a_folder_of_somebody_else_holds_no_records(state):
    (state / f"lives-{os.getuid()}").symlink_to("/tmp")
    with pytest.raises(PermissionError, match="is not ours"):
        sweep.records(state)


def record(state: Path, **changes) -> Path:
    """A record of a farm that is gone."""
    said = {"mark": "m1", "run": "run-s", "cell": "c", "world": world(), "owners": [(1 << 22, 1), (1, started(1))],
            "supervisor": (1 << 22, 1), **changes}
    file = sweep.records(state) / f"{said['mark']}.json"
    file.write_text(json.dumps(said))
    return file


# --- files ----------------------------------------------------------------------------------


@pytest.fixture
def region():
    """Files of offloaded blocks with names of this test alone."""
    made = []

    def make(name: str, uid: int | None = None) -> Path:
        path = Path(f"/dev/shm/vllm_offload_farm-test-{os.getpid()}-{name}.mmap")
        path.write_bytes(b"\0" * 4096)
        made.append(path)
        if uid is not None:
            os.chown(path, uid, uid)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


HOLDER = """
import mmap, sys, time
file = open(sys.argv[1], "r+b")
held = mmap.mmap(file.fileno(), 0)
print("up", flush=True)
sys.stdin.read() if len(sys.argv) == 2 else time.sleep(99)
"""


def test_regions_of_a_recorded_life_are_removed_all_others_named(region, state, empty):
    ours, used, unknown = region("ours"), region("used"), region("unknown")
    record(state, regions=[str(ours), str(used), "/dev/shm/vllm_offload_farm-test-gone.mmap", "/etc/hostname"])
    with subprocess.Popen([sys.executable, "-c", HOLDER, used], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        swept = sweep.sweep(state, empty)
        holder.stdin.close()
    assert (ours.exists(), used.exists(), unknown.exists()) == (False, True, True)
    assert [line for line in swept.ended if str(ours) in line] and Path("/etc/hostname").exists()
    assert any(str(used) in line and "in use" in line for line in swept.untouched)
    assert any(str(unknown) in line and "mapped by no process" in line for line in swept.untouched)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_region_of_another_user_is_untouched_and_named(region, state, empty):
    theirs = region("theirs", uid=65534)
    record(state, regions=[str(theirs)])
    swept = sweep.sweep(state, empty)
    assert theirs.exists() and theirs.stat().st_uid == 65534
    assert any(f"{theirs} (0 MiB) of user nobody" in line for line in swept.untouched)


def test_a_supervisor_removes_the_regions_that_its_tree_leaves(region, state, tmp_path):
    path = region("tree")
    child = lifeline.Supervised.start([sys.executable, "-c", HOLDER, path, "stay"], env={}, cwd="/",
                                      stdout_path=tmp_path / "out", records=sweep.records(state))
    until(lambda: "up" in (tmp_path / "out").read_text(), "the mapping")
    child.note_regions()
    until(lambda: str(path) in json.loads(child.record.read_text()).get("regions", ()), "the note")
    child.terminate(0.0)
    assert not path.exists() and not child.record.exists()


@pytest.mark.parametrize(("whose", "removed"), [("gone", True), ("living", False), ("unknown", False), ("forged", False)])
def test_private_folders_of_dead_owners_are_removed(state, empty, whose, removed):
    folder = empty[0] / "farm-x"
    folder.mkdir()
    notes = {"gone": {"world": world(), "pid": 1 << 22, "started": 1}, "forged": {"pid": 1},
             "living": {"world": world(), "pid": os.getpid(), "started": started(os.getpid())}}
    if whose in notes:
        (folder / folders.NOTE).write_text(json.dumps(notes[whose]))
    (empty[0] / "other-x").mkdir()
    swept = sweep.sweep(state, empty)
    assert folder.exists() is not removed and (empty[0] / "other-x").exists()
    assert bool([line for line in swept.ended if str(folder) in line]) is removed
    assert bool([line for line in swept.untouched if str(folder) in line]) is (whose in ("unknown", "forged"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_named(state, empty):
    folder = empty[0] / "farm-x"
    folder.mkdir()
    (folder / folders.NOTE).write_text(json.dumps({"world": world(), "pid": 1 << 22, "started": 1}))
    os.chown(folder, 65534, 65534)
    assert f"{folder}, a folder of user nobody: left alone" in sweep.sweep(state, empty).untouched
    assert folder.exists()


def test_a_name_of_any_bytes_is_told_in_one_line_of_text(state, empty):
    os.mkdir(os.fsencode(empty[0]) + b"/farm-\xff\n\x1b[2J")
    said = sweep.sweep(state, empty).untouched[-1]
    assert said.isprintable() and "farm-\\udcff\\n\\x1b[2J" in said and said.encode()


def test_many_folders_alike_are_one_sentence_with_an_example(state, empty):
    for n in range(34):
        (empty[0] / f"farm-{n:02}").mkdir()
    said = [line for line in sweep.sweep(state, empty).untouched if str(empty[0]) in line]
    assert said == [f"{empty[0]}/farm-00 and 33 more folders without a note of whose they are: left alone"]


def test_one_process_of_a_run_and_host_tells_what_all_see(state, empty):
    code = ("import sys; from pathlib import Path; from farm import sweep\n"
            f"print(sweep.first_to_tell(Path({str(state)!r}), 'run-t'), flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as first:
        assert first.stdout.readline() == "True\n"
        sweep.sweep(state, empty)
        assert not sweep.first_to_tell(state, "run-t")
        assert sweep.first_to_tell(state, "run-u")
        first.stdin.close()
    assert not sweep.first_to_tell(state, "run-t")
    sweep.sweep(state, empty)  # whoever told is gone: an actor that starts in its place tells again
    assert sweep.first_to_tell(state, "run-t") and not sweep.first_to_tell(state, "run-u")
    assert sorted(p.name for p in sweep.records(state).iterdir()) == ["run-t.told", "run-u.told"]


def test_a_private_folder_is_ours_while_it_lasts(empty):
    with folders.private(empty[0]) as folder:
        assert folder.stat().st_mode & 0o077 == 0
        assert folders.owner(folder) == ProcessId.here() and not folders.owner(folder).gone
    assert not folder.exists()
