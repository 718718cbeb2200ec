"""The results root goes wrong: full, read-only, damaged, shared.  Nothing committed is lost, reading goes on, files are named.

Rows without the marker need no Ray and are quick: `make test` runs them too.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toyrun import Toy, attempts, evidence

from farm.bench import Needs
from farm.config import PROJECT
from farm.errors import ResultsUnwritable
from farm.evidence import Evidence, RunInfo
from farm.pinfile import PinConfig
from farm.plan import Cell, PinSpec
from farm.records import Measurement, Outcome, Reason, Tagged, Verdict, utc_now
from farm.store import Store

SEED = int(os.environ.get("FARM_FAULT_SEED", "20"))
RUN = "toy-1"
whole_farm = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(400)]


def commit(store: Store, number: int, *, run: str = RUN, weight: int = 10) -> None:
    cell = Cell(f"cell-{number}", None, None, PinSpec("p", PinConfig(version="0.29.0", flavour="cpu")), None, None, (), {},
                Needs(), 1, "5e")

    class Job:
        name = "toy"

    object.__setattr__(cell, "job", Job)
    evidence = Evidence(RunInfo(run, "c0ffee", False), cell, 1)
    table, row = evidence.row(Tagged(Measurement("kv_peak", float(number), "ratio", note=os.urandom(weight // 2).hex())))
    store.commit(run, cell.id, 1, {table: [row], "cells": [evidence.cell_row(
        Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), final=True)]})


def open_run(store: Store, cells: int, status: str = "finished", run: str = RUN) -> None:
    store.commit_run(run, {"name": "toy", "status": status, "exit_code": 0, "started_utc": utc_now(), "wall_s": 1.0,
                           "cells": cells, "command": ["farm", "matrix", "m.yaml"]})


def values(store: Store, run: str = RUN) -> list[float]:
    return sorted(store.read("measurements", run).column("value").to_pylist())


def farm(root: Path, *argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "farm", *argv, "--results", str(root)], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": str(PROJECT)}, check=False)


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own below `folder`; the test is skipped where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True,
                          check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


# --- a disk that refuses ------------------------------------------------------------------------


def fill(folder: Path, leave: int) -> Path:
    """A file that takes all room but about `leave` bytes."""
    filler = folder / "filler"
    free = os.statvfs(folder)
    with filler.open("wb") as file:
        file.write(b"\0" * max(0, free.f_bavail * free.f_frsize - leave))
    return filler


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_refuses_a_commit_keeps_what_is_committed(tmp_path, trouble):
    with tmpfs(tmp_path / "disk", "8m") as disk:
        store = Store.open(disk / "results")
        open_run(store, 3)
        commit(store, 0)
        filler = fill(disk, 16 * 1024) if trouble == "full" else remount(disk, "ro")
        words = "No space left" if trouble == "full" else "Read-only file system"
        with pytest.raises(ResultsUnwritable, match=rf"run {RUN}: cannot write below {disk}/results .*{words}.*stays"):
            commit(store, 1, weight=200_000)
        assert values(store) == [0.0]
        assert farm(disk / "results", "report", RUN).returncode == 0
        if filler is not None:
            filler.unlink()
        else:
            remount(disk, "rw")
        commit(store, 1, weight=200_000)
        assert values(store) == [0.0, 1.0]
        assert list((disk / "results").rglob("*.tmp")) == []


def test_a_write_that_the_disk_refuses_half_way_leaves_no_file(tmp_path, monkeypatch):
    """As above where nothing may be mounted: /dev/full takes the bytes of one file and says ENOSPC."""
    store = Store.open(tmp_path / "results")
    commit(store, 0)
    opened = Path.open

    def full(path, mode="r", *args, **more):
        if mode != "xb" or "table=cells" not in str(path):
            return opened(path, mode, *args, **more)
        path.touch()
        return opened(Path("/dev/full"), "wb", *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(ResultsUnwritable, match="No space left"):
            commit(store, 1)
    assert values(store) == [0.0]
    assert list((tmp_path / "results").rglob("*.tmp")) == []
    commit(store, 1)
    assert values(store) == [0.0, 1.0]


@pytest.mark.parametrize("trouble", [pytest.param(t, marks=whole_farm) for t in ("full", "read-only")])
def test_a_run_on_a_disk_that_refuses_ends_clearly_and_its_resume_completes(tmp_path, trouble):
    toy = Toy.make(tmp_path / "toy", tmp_path / "cache", cells=6, seconds=1.0, weight=60_000)
    with tmpfs(toy.results, "8m") as disk, contextlib.closing(toy):
        gate = tmp_path / "gate"
        process = toy.start(env={"TOY_GATE": str(gate), "TOY_GATE_FROM": "2"})
        process.until(r"\(2 of 6\)")
        filler = fill(disk, 8 * 1024) if trouble == "full" else remount(disk, "ro")
        gate.touch()
        began = time.monotonic()
        ended = process.end(timeout_s=60)
        assert ended.code == 2, ended.out
        (line,) = [text for text in ended.out.splitlines() if "cannot write below" in text]
        assert f"--resume {toy.run}" in line and "Make room or give access" in line
        before = attempts(toy.store, toy.run)
        assert len(before) >= 2 and all(final for _, _, final in before)
        print(f"\n{trouble}: exit 2 {time.monotonic() - began:.1f} s later, {len(before)} of 6 committed, "
              f"nothing alive {process.gone_s():.1f} s after\n{line}")
        listed = toy.farm("runs")
        assert "\tinterrupted\t" in listed.out or "\tfailed\t" in listed.out, listed.out
        assert toy.farm("report", toy.run).code == 0
        assert toy.farm("sql", "select count(*) from cells").code == 0
        if filler is not None:
            filler.unlink()
        else:
            refused = toy.finish("--resume", toy.run)
            assert refused.code == 3 and "not writable" in refused.out, refused.out
            remount(disk, "rw")
        resumed = toy.finish("--resume", toy.run)
        assert resumed.code == 1, resumed.out
        assert [a for a in attempts(toy.store, toy.run) if a in before] == before
        other = Toy(toy.root, tmp_path / "other", toy.cache, toy.mark)
        assert other.finish().code == 1
        assert evidence(toy.store, toy.run) == evidence(other.store, other.run)


# --- files that are not what they should be -----------------------------------------------------


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.parametrize("table", ["cells", "measurements", "runs"])
def test_a_truncated_file_is_named_and_all_else_is_read(tmp_path, table):
    store = Store.open(tmp_path)
    open_run(store, 3)
    for number in range(3):
        commit(store, number)
    damaged = Path(store.files.path(table, RUN, "run.parquet" if table == "runs" else "cell-1-1.parquet"))
    truncate(damaged)
    reported, listed = farm(tmp_path, "report", RUN), farm(tmp_path, "runs")
    asked = farm(tmp_path, "sql", "select cell from cells")
    for done in (reported, asked, listed):
        assert done.returncode == 0, done.stderr
    assert str(damaged) in "".join(reported.stdout.split()) and str(damaged) in asked.stderr  # a report folds its lines
    assert len(asked.stdout.splitlines()) - 1 == (2 if table == "cells" else 3)
    assert RUN in listed.stdout and ("row unreadable" in listed.stdout) == (table == "runs")
    assert values(store) == ([0.0, 2.0] if table == "measurements" else [0.0, 1.0, 2.0])


@pytest.mark.parametrize("table", ["cells", "measurements"])
def test_a_truncated_cells_file_is_no_commit_any_other_stays_one(tmp_path, table):
    store = Store.open(tmp_path)
    commit(store, 0)
    truncate(Path(store.files.path(table, RUN, "cell-0-1.parquet")))
    assert store.committed(RUN) == (set() if table == "cells" else {("cell-0", 1)})


FOREIGN = {
    "text": lambda file: file.write_text("notes"),
    "parquet-of-others": lambda file: pq.write_table(pa.table({"x": [1]}), file),
    "parquet-with-a-column-twice": lambda file: pq.write_table(
        pa.Table.from_arrays([pa.array([2]), pa.array(["r"]), pa.array(["c"]), pa.array([1]), pa.array(["a"]), pa.array(["b"])],
                             names=["schema_version", "run", "cell", "attempt", "job", "job"]), file),
    "empty": lambda file: file.touch(),
    "folder": lambda file: file.mkdir(),
    "dangling-link": lambda file: file.symlink_to("nowhere"),
}


@pytest.mark.parametrize("name", ["notes.txt", "cell-9-1.parquet", "compacted.7.parquet"])
@pytest.mark.parametrize("what", FOREIGN, ids=str)
def test_a_foreign_file_in_the_root_is_named_and_left_alone(tmp_path, what, name):
    store = Store.open(tmp_path)
    open_run(store, 1)
    commit(store, 0)
    for place in (tmp_path, tmp_path / "table=cells", tmp_path / f"table=cells/run={RUN}"):
        FOREIGN[what](place / name)
    assert values(store) == [0.0]
    reading = store.reading("cells", RUN)
    assert reading.table.num_rows == 1
    if what not in ("folder", "dangling-link"):
        assert [p for p in reading.problems if f"{tmp_path}/table=cells/run={RUN}/{name}" in p]
    assert store.sql("select cell from cells").rows == (("cell-0",),)
    commit(store, 1)
    store.compact(RUN)
    assert values(store) == [0.0, 1.0]
    assert os.path.lexists(tmp_path / f"table=cells/run={RUN}" / name)


# --- many writers, and a compaction that is cut off ---------------------------------------------

COMPACTOR = textwrap.dedent("""
    import sys
    from farm.store import Store
    store = Store.at(sys.argv[1])
    print("go", flush=True)
    sys.stdin.readline()
    store.compact(sys.argv[2])
    print("done", flush=True)
""")


@pytest.mark.faults
def test_a_compaction_killed_at_any_moment_loses_no_row(tmp_path):
    """kill -9 at seeded moments of the time that a whole one takes; then one that ends, over what the kill left."""
    dice, cells, moments = random.Random(SEED), 40, 20
    master = Store.open(tmp_path / "master")
    for number in range(cells):
        commit(master, number, weight=2_000)
    rows, attempted = values(master), master.committed(RUN)
    took, killed, changed = None, 0, 0
    for moment in range(moments + 1):
        root = tmp_path / f"moment-{moment}"
        shutil.copytree(tmp_path / "master", root)
        store, before = Store.at(root), sorted(p.name for p in root.rglob("*.parquet"))
        process = subprocess.Popen([sys.executable, "-c", COMPACTOR, str(root), RUN], stdin=subprocess.PIPE, text=True,
                                   stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(PROJECT)})
        assert process.stdout.readline() == "go\n"
        began = time.monotonic()
        process.stdin.write("\n")
        process.stdin.flush()
        if took is not None:
            time.sleep(dice.uniform(0.0, took))
            process.kill()
        done = process.stdout.read() != ""
        process.wait(timeout=60)
        took = time.monotonic() - began if took is None else took
        killed += not done
        changed += not done and sorted(p.name for p in root.rglob("*.parquet")) != before
        assert values(store) == rows and store.committed(RUN) == attempted
        store.compact(RUN)
        assert values(store) == rows and store.committed(RUN) == attempted
        assert len(list(root.glob(f"table=measurements/run={RUN}/*.parquet"))) == 1
    print(f"\nseed {SEED}: a compaction takes {took:.2f} s; {killed} of {moments} killed in it, {changed} with files changed")
    assert killed >= moments / 4


@pytest.mark.parametrize("table", ["cells", "measurements"])
@pytest.mark.parametrize("step", ["written", "half-deleted"])
def test_a_compaction_cut_off_between_its_steps(tmp_path, monkeypatch, table, step):
    """The same, at the two moments that are too short to be hit by chance."""
    from farm.dataset import Dataset

    store = Store.open(tmp_path)
    for number in range(4):
        commit(store, number)

    class Cut(BaseException):
        pass

    deletes = Dataset.delete

    def cut(self, paths):
        paths = list(paths)
        if any(f"table={table}" in p for p in paths):
            deletes(self, paths[:2] if step == "half-deleted" else [])
            raise Cut
        deletes(self, paths)

    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "delete", cut)
        with pytest.raises(Cut):
            store.compact(RUN)
    assert values(store) == [0.0, 1.0, 2.0, 3.0] and len(store.committed(RUN)) == 4
    assert store.sql("select count(*) from measurements").rows == ((4,),)
    store.compact(RUN)
    assert values(store) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("_marked", [pytest.param(None, marks=whole_farm, id="")])
def test_two_runs_at_once_into_the_same_root(tmp_path, _marked):
    toy = Toy.make(tmp_path / "toy", tmp_path / "cache", cells=4, seconds=1.0)
    gate = tmp_path / "gate"
    processes = [toy.start(env={"TOY_GATE": str(gate), "TOY_GATE_FROM": "0", "FARM_HOST_STATE": str(tmp_path / f"host-{n}")})
                 for n in range(2)]  # as two machines: else the second would wait for the first one's cards
    for process in processes:
        process.until("row 0")
    assert toy.farm("runs").out.count("\trunning\t") == 2
    gate.touch()
    ended = [p.end() for p in processes]
    assert [e.code for e in ended] == [1, 1], [e.out for e in ended]
    one, two = toy.store.runs()
    assert evidence(toy.store, one) == evidence(toy.store, two)
    assert all(len(attempts(toy.store, run)) == 4 for run in (one, two))
    for process in processes:
        process.gone_s()
    assert toy.farm("runs").out.count("\tfinished\t") == 2
    toy.close()
