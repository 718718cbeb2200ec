"""The Parquet dataset: what a reader sees, whatever writers, kills and compactions do."""

import logging
import multiprocessing
import pickle
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs as pafs

from farm.dataset import Dataset
from farm.errors import FarmError, UsageError
from farm.records import Measurement, Outcome, Reason, Sample, Verdict, utc_now
from farm.schemas import stamp
from farm.store import Store

RUN = "r1"
CONDITIONS = {
    "job": "prefill", "arm": "patched", "pin": "0.29.0-cpu", "env": {"VLLM_X": "1"}, "argv": ["vllm", "serve"],
    "patches": [{"name": "a.patch", "sha256": "ab", "hunks": 2, "offset_hunks": 0, "max_offset": 0}],
}


def attempt_rows(run, cell, attempt, values=(1.0,), samples=()):
    identity = {"run": run, "cell": cell, "attempt": attempt, "started_utc": utc_now()}
    records = [Measurement("kv_peak", v, "ratio") for v in values]
    records += [Sample("kv", t, v) for t, v in samples]
    records.append(Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"))
    rows = {}
    for record in records:
        table, row = stamp(record, identity, CONDITIONS)
        rows.setdefault(table, []).append(row)
    return rows


def commit(store, cell, attempt=0, run=RUN, **more):
    return store.commit(run, cell, attempt, attempt_rows(run, cell, attempt, **more))


def values(store, run=None):
    return sorted(store.read("measurements", run).column("value").to_pylist())


def names(store, table="measurements", run=RUN):
    return sorted(p.name for p in Path(store.files.path(table, run, "")).iterdir())


@pytest.fixture
def store(tmp_path):
    return Store.open(tmp_path / "results")


# --- the root -------------------------------------------------------------------------------


def test_open_creates_the_root_and_leaves_nothing_in_it(tmp_path):
    root = tmp_path / "a" / "b"
    Store.open(root)
    assert root.is_dir() and list(root.iterdir()) == []


@pytest.mark.parametrize("opening", [Store.open, Store.at], ids=["open", "at"])
def test_a_root_below_a_file_is_refused_by_name(tmp_path, opening):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"results root {tmp_path}/file/root .*name"):
        opening(tmp_path / "file" / "root")


def test_a_root_that_refuses_the_probe_is_refused(tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()

    class ReadOnly(pafs.LocalFileSystem):
        def open_output_stream(self, path, **_):
            raise OSError(30, f"Read-only file system: {path}")

    monkeypatch.setattr("farm.store._locate", lambda root: Dataset(ReadOnly(), str(root)))
    with pytest.raises(UsageError, match="is not writable .*Read-only file system"):
        Store.open(tmp_path / "results")


def test_an_unknown_scheme_says_which_are_known():
    with pytest.raises(UsageError, match="ftp://x/y cannot be opened .*file, s3 or gs URI"):
        Store.open("ftp://x/y")


def test_a_file_uri_is_the_same_root(tmp_path):
    commit(Store.open(f"file://{tmp_path}/results"), "c")
    assert values(Store.at(tmp_path / "results")) == [1.0]


def test_a_store_travels_between_processes(store):
    commit(pickle.loads(pickle.dumps(store)), "c")
    assert values(store) == [1.0]


def test_reading_needs_no_write(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        Store.at(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# --- commit ---------------------------------------------------------------------------------


def test_one_file_per_table_and_the_cells_file_last(store):
    paths = commit(store, "unit-a", 3, samples=[(0.0, 0.5)])
    base = store.files.base
    assert sorted(paths[:-1]) == [f"{base}/table={t}/run={RUN}/unit-a-3.parquet" for t in ("measurements", "samples")]
    assert paths[-1] == f"{base}/table=cells/run={RUN}/unit-a-3.parquet"
    assert sorted(str(p) for p in Path(base).rglob("*") if p.is_file()) == sorted(paths)


def test_rows_come_back_as_they_were(store):
    rows = attempt_rows(RUN, "c", 1, values=(0.25,))
    store.commit(RUN, "c", 1, rows)
    back = {k: v for k, v in store.read("measurements", RUN).to_pylist()[0].items() if v is not None}
    back["env"] = dict(back["env"])
    assert back == {k: v for k, v in rows["measurements"][0].items() if v is not None}


def spoil(table="measurements", **values):
    rows = attempt_rows(RUN, "c", 0)
    rows[table][0].update(values)
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (spoil(valeu=1.0), "table measurements has no column valeu"),
        (spoil(value="fast"), "table measurements, column value: 'fast' is not double"),
        (spoil(value=True), "column value: True is not double"),
        (spoil(n=1.5), "column n: 1.5 is not int64"),
        (spoil(boot=2**40), "column boot: Value 1099511627776 too large"),
        (spoil(argv="vllm serve"), "column argv: 'vllm serve' is not list"),
        (spoil(env={"A": 1}), "column env: {'A': 1} is not map"),
        (spoil(patches=[{"nmae": "a"}]), "column patches: .*nmae.* is not list<"),
        (spoil(started_utc=utc_now().replace(tzinfo=None)), "column started_utc: .* is not timestamp"),
        (spoil(metric="\ud800"), "column metric: .*surrogates not allowed"),
        (spoil(schema_version=None), "column schema_version: a row has no value"),
        (spoil(cell="d"), "column cell: a row says 'd', its commit 'c'"),
        (spoil(attempt=1), "column attempt: a row says 1, its commit 0"),
        ({"measurements": spoil()["measurements"]}, "exactly one row for cells"),
        (spoil() | {"cells": spoil()["cells"] * 2}, "exactly one row for cells"),
        (spoil() | {"runs": []}, "no rows for runs"),
    ],
    ids=["unknown-column", "text-for-number", "bool-for-number", "fraction-for-integer", "overflow", "text-for-list",
         "map-value", "nested-unknown", "naive-time", "surrogate", "identity-missing", "other-cell", "other-attempt",
         "no-cells-row", "two-cells-rows", "runs-table"],
)
def test_a_row_that_does_not_fit_writes_nothing(store, rows, message):
    with pytest.raises(FarmError, match=message):
        store.commit(RUN, "c", 0, rows)
    assert not list(Path(store.files.base).rglob("*"))


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "run=1", "x" * 151, "a\n", None])
def test_an_id_that_cannot_name_a_file_is_refused(store, name):
    with pytest.raises(UsageError, match="cannot name a file"):
        commit(store, "c", run=name)
    with pytest.raises(UsageError, match="cannot name a file"):
        commit(store, name)
    with pytest.raises(UsageError, match="cannot name a file"):
        store.read("cells", name) if name is not None else store.committed(name)


def test_cells_whose_names_end_alike_stay_apart(store):
    commit(store, "c", 11)
    commit(store, "c-1", 1)
    assert store.committed(RUN) == {("c", 11), ("c-1", 1)}


@pytest.mark.parametrize("compacted", [False, True])
def test_an_attempt_is_committed_once(store, compacted):
    commit(store, "c")
    commit(store, "d")
    if compacted:
        store.compact(RUN)
    with pytest.raises(FarmError, match="c-0.parquet is committed already; a retry takes the next attempt"):
        commit(store, "c")
    assert values(store) == [1.0, 1.0]


def test_a_full_disk_says_what_to_do(store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("farm.dataset.os.fsync", full)
    with pytest.raises(FarmError, match="No space left on device.*Make room or give access"):
        commit(store, "c")
    assert [p for p in Path(store.files.base).rglob("*") if p.is_file()] == []


def test_an_object_store_takes_the_same_files():
    fs, _ = pafs.FileSystem.from_uri("mock:///")
    store = Store("mock://root", Dataset(fs, "root"))
    for table in ("runs", "cells", "measurements"):  # an object store needs none; this stand-in does
        fs.create_dir(f"root/table={table}/run={RUN}")
    commit(store, "c")
    commit(store, "d")
    store.commit_run(RUN, {"status": "done"})
    assert store.compact(RUN) == [] and values(store) == [1.0, 1.0]
    assert store.sql("select count(*), any_value(status) from cells join runs using (run)").rows == ((2, "done"),)


# --- runs -----------------------------------------------------------------------------------


def test_a_run_row_is_replaced_when_the_run_ends(store):
    store.commit_run(RUN, {"status": "running", "cells": 4})
    store.commit_run(RUN, {"status": "done", "exit_code": 1, "cells": 4})
    assert [(r["status"], r["exit_code"], r["cells"]) for r in store.read("runs").to_pylist()] == [("done", 1, 4)]


def test_runs_are_listed_whether_or_not_they_ended(store):
    commit(store, "c", run="killed")
    store.commit_run("began", {"status": "running"})
    assert store.runs() == ["began", "killed"]


def test_card_events_are_read_without_any_cell_and_survive_compaction(store):
    event = {"card": "GPU-1", "card_name": "RTX 3090", "host": "h", "at_utc": utc_now(), "event": "ready"}
    store.commit_cards(RUN, [event])
    store.commit_cards(RUN, [event, {**event, "event": "quarantined", "reason": "card-unhealthy", "until_utc": utc_now()}])
    commit(store, "a")
    commit(store, "b")
    store.compact(RUN)
    assert [r["event"] for r in store.read("cards", RUN).to_pylist()] == ["ready", "quarantined"]
    assert sorted(store.sql("select event from cards").rows) == [("quarantined",), ("ready",)]
    with pytest.raises(FarmError, match="no column colour"):
        store.commit_cards(RUN, [{**event, "colour": "red"}])
    with pytest.raises(FarmError, match="a cell has no rows for cards"):
        store.commit(RUN, "c", 0, {**attempt_rows(RUN, "c", 0), "cards": [event]})


def test_a_run_row_is_checked_too(store):
    with pytest.raises(FarmError, match="table runs has no column verdict"):
        store.commit_run(RUN, {"verdict": "PASS"})


# --- kills ----------------------------------------------------------------------------------


def test_an_attempt_killed_before_its_cells_file_is_not_there(store):
    commit(store, "whole", values=(1.0,))
    *_, last = commit(store, "cut", values=(2.0,))
    Path(last).unlink()
    assert store.committed(RUN) == {("whole", 0)}
    assert values(store) == [1.0]
    assert store.sql("select value from measurements").rows == ((1.0,),)


def test_the_attempt_after_a_kill_replaces_what_was_left(store):
    *_, last = commit(store, "c", values=(2.0,), samples=[(0.0, 0.1)])
    Path(last).unlink()
    commit(store, "c", values=(3.0,))
    assert values(store) == [3.0]
    assert store.read("samples").num_rows == 0


def test_a_temporary_file_of_a_killed_writer_is_ignored(store):
    commit(store, "c")
    Path(store.files.path("measurements", RUN, ".c-1.parquet.0123.tmp")).write_bytes(b"PAR1half")
    assert store.reading("measurements").problems == () and values(store) == [1.0]


# --- files that are not ours, or not whole --------------------------------------------------


def broken(store, table, name, content):
    path = Path(store.files.path(table, RUN, name))
    if isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        path.write_bytes(content)
    return str(path)


def truncated(store):
    path = Path(store.files.path("measurements", RUN, "bad-0.parquet"))
    path.write_bytes(path.read_bytes()[:-100])
    return str(path), "not a readable Parquet file"


def corrupt_page(store):
    path = Path(store.files.path("measurements", RUN, "bad-0.parquet"))
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(bytes(data))
    return str(path), "not a readable Parquet file"


def empty(store):
    return broken(store, "measurements", "bad-0.parquet", b""), "not a readable Parquet file"


def foreign_columns(store):
    table = pa.table({"value": [1.0]})
    return broken(store, "measurements", "bad-0.parquet", table), "no column schema_version, run, cell, attempt"


def foreign_type(store):
    table = store.read("measurements", RUN).slice(0, 1)
    table = table.set_column(table.schema.get_field_index("value"), "value", pa.array(["fast"]))
    return broken(store, "measurements", "bad-0.parquet", table), "column value does not convert"


def foreign_name(store):
    commit(store, "other")
    Path(store.files.path("measurements", RUN, "bad-0.parquet")).unlink()
    Path(store.files.path("measurements", RUN, "other-0.parquet")).unlink()
    return broken(store, "measurements", "notes.txt", b"hello"), "not written by the farm"


@pytest.mark.parametrize("damage", [truncated, corrupt_page, empty, foreign_columns, foreign_type, foreign_name])
def test_a_damaged_file_is_named_and_the_rest_is_read(store, damage, caplog):
    commit(store, "good", values=(1.0, 2.0))
    commit(store, "bad", values=(9.0,))
    path, why = damage(store)
    reading = store.reading("measurements", RUN)
    assert sorted(reading.table.column("value").to_pylist()) == [1.0, 2.0]
    assert len(reading.problems) == 1 and path in reading.problems[0] and why in reading.problems[0]
    with caplog.at_level(logging.WARNING):
        assert values(store) == [1.0, 2.0]
    assert path in caplog.text
    problems = store.compact(RUN)
    assert [path in p for p in problems] == [True] and Path(path).exists() and values(store) == [1.0, 2.0]


def test_a_damaged_cells_file_commits_nothing_and_may_be_written_again(store):
    *_, last = commit(store, "c")
    Path(last).write_bytes(b"PAR1")
    assert store.committed(RUN) == set()
    commit(store, "c")
    assert store.committed(RUN) == {("c", 0)}


def test_an_older_file_reads_with_nulls_for_columns_it_lacks(store):
    commit(store, "c")
    path = store.files.path("measurements", RUN, "c-0.parquet")
    table = store.files.load("measurements", path).drop_columns(["interval_s", "note", "pool_tokens"])
    old_patch = pa.list_(pa.struct([("name", pa.string()), ("sha256", pa.string())]))
    narrow = pa.array([[{"name": "a.patch", "sha256": "ab"}]], old_patch)
    table = table.set_column(table.schema.get_field_index("patches"), "patches", narrow)
    table = table.set_column(table.schema.get_field_index("n"), "n", pa.array([7], pa.int32()))
    pq.write_table(table.append_column("of_the_future", pa.array([1])), path)
    row = store.read("measurements").to_pylist()[0]
    assert (row["value"], row["interval_s"], row["n"]) == (1.0, None, 7)
    assert row["patches"] == [{"name": "a.patch", "sha256": "ab", "hunks": None, "offset_hunks": None,
                               "max_offset": None}]
    query = "select value, interval_s, n, patches[1].name, patches[1].hunks from measurements"
    assert store.sql(query).rows == ((1.0, None, 7, "a.patch", None),)


# --- compaction -----------------------------------------------------------------------------


def fill(store, cells=3):
    for i in range(cells):
        commit(store, f"c{i}", values=(float(i), i + 0.5), samples=[(0.0, float(i))])
    return sorted(v for i in range(cells) for v in (float(i), i + 0.5))


def test_compaction_leaves_one_file_a_table_and_the_same_rows(store):
    expected, before = fill(store), store.committed(RUN)
    assert store.compact(RUN) == []
    assert {t: names(store, t) for t in ("cells", "measurements", "samples")} == dict.fromkeys(
        ("cells", "measurements", "samples"), ["compacted.1.parquet"])
    assert values(store) == expected and store.committed(RUN) == before


def test_a_resumed_run_is_compacted_again(store):
    expected = fill(store)
    store.compact(RUN)
    commit(store, "late", values=(99.0,))
    assert values(store) == [*expected, 99.0]
    store.compact(RUN)
    assert names(store) == ["compacted.2.parquet"] and values(store) == [*expected, 99.0]
    assert ("late", 0) in store.committed(RUN) and len(store.committed(RUN)) == 4
    store.compact(RUN)
    assert names(store) == ["compacted.2.parquet"]


def test_compaction_leaves_uncommitted_files_out(store):
    expected = fill(store, 2)
    *_, last = commit(store, "cut", values=(77.0,))
    Path(last).unlink()
    store.compact(RUN)
    assert values(store) == expected


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program runs after it."""


def killed_after(monkeypatch, target, calls):
    """Let the method of Dataset run `calls` times, then die instead of running."""
    real, done = getattr(Dataset, target), []

    def dying(self, *args):
        if len(done) == calls:
            raise Killed
        done.append(1)
        return real(self, *args)

    monkeypatch.setattr(Dataset, target, dying)


def delete_one_then_die(monkeypatch):
    real = Dataset.delete

    def dying(self, paths):
        paths = list(paths)
        real(self, paths[:1])
        if paths:
            raise Killed

    monkeypatch.setattr(Dataset, "delete", dying)


KILLS = {
    "before-the-first-swap": lambda m: killed_after(m, "put_new", 0),
    "swapped-nothing-deleted": lambda m: killed_after(m, "delete", 1),  # the first call sweeps leftovers: none
    "swapped-one-deleted": delete_one_then_die,
    "between-tables": lambda m: killed_after(m, "put_new", 1),
    "second-table-swapped": lambda m: killed_after(m, "put_new", 2),
}


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS.keys())
@pytest.mark.parametrize("resumed", [False, True], ids=["first", "second-compaction"])
def test_each_row_is_read_once_after_a_kill_and_compaction_ends_later(store, monkeypatch, kill, resumed):
    expected = fill(store)
    if resumed:
        store.compact(RUN)
        commit(store, "late", values=(99.0,), samples=[(0.0, 1.0)])
        expected = [*expected, 99.0]
    before = store.committed(RUN)
    with monkeypatch.context() as patched:
        kill(patched)
        with pytest.raises(Killed):
            store.compact(RUN)
    assert values(store) == expected and store.committed(RUN) == before
    assert store.sql("select count(*), count(distinct value) from measurements").rows == ((len(expected),) * 2,)
    commit(store, "next", values=(100.0,))
    assert store.compact(RUN) == []
    assert values(store) == [*expected, 100.0] and len(names(store)) == 1
    assert store.committed(RUN) == before | {("next", 0)}


def test_a_second_compactor_that_comes_late_loses_nothing(store, monkeypatch):
    expected = fill(store)
    real, raced = Dataset.put_new, []

    def overtaken(self, path, payload):
        if not raced:
            raced.append(path)
            commit(store, "late", values=(99.0,))
            store.compact(RUN)  # the other process: takes the same name, with more in it
        return real(self, path, payload)

    monkeypatch.setattr(Dataset, "put_new", overtaken)
    store.compact(RUN)
    assert raced and values(store) == [*expected, 99.0] and len(store.committed(RUN)) == 4


def test_a_reader_overtaken_by_a_compaction_starts_over(store, monkeypatch):
    expected = fill(store)
    real, passed = Dataset.load, []

    def slow(self, table, path):
        if not passed:
            passed.append(path)
            store.compact(RUN)  # takes away all files that this reader has listed
        return real(self, table, path)

    monkeypatch.setattr(Dataset, "load", slow)
    assert values(store) == expected


@pytest.mark.parametrize("torn", ["measurements", "cells"])
def test_a_listing_torn_by_a_compaction_loses_nothing(store, monkeypatch, torn):
    """Reading a directory is not atomic: it may miss both the files taken away meanwhile and the one put there."""
    expected = fill(store)
    real, passed = Dataset.listing, []

    def listing(self, table, run, committed=None):
        seen = real(self, table, run, committed)
        if table == torn and not passed:
            passed.append(table)
            store._compact_table(torn, RUN)
            return replace(seen, live=())
        return seen

    monkeypatch.setattr(Dataset, "listing", listing)
    assert values(store, RUN) == expected


def test_a_query_overtaken_by_a_compaction_starts_over(store, monkeypatch):
    expected = fill(store)
    real, passed = Store._connect, []

    def slow(self, paths):
        if not passed:
            passed.append(paths)
            store.compact(RUN)
        return real(self, paths)

    monkeypatch.setattr(Store, "_connect", slow)
    assert store.sql("select sum(value) from measurements").rows == ((sum(expected),),)


def test_readers_beside_a_writer_and_a_compactor_see_whole_attempts_once(store):
    cells, ended, torn = 21, threading.Event(), []

    def write():
        for i in range(cells):
            commit(store, f"c{i}", values=(float(i), i + 0.5))
            if i % 7 == 6:
                store.compact(RUN)
        ended.set()

    def look():
        seen = 0
        while not ended.is_set():
            known = len(store.committed(RUN))
            now = values(store)
            pairs = len(now) // 2
            if now != sorted(v for i in range(pairs) for v in (float(i), i + 0.5)) or pairs < max(seen, known):
                torn.append((seen, known, now))
            seen = pairs

    threads = [threading.Thread(target=write), threading.Thread(target=look), threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert ended.is_set() and torn == [] and len(values(store)) == 2 * cells


def write_run(root, run):
    store = Store.open(root)
    for i in range(10):
        commit(store, f"c{i}", run=run)
    store.commit_run(run, {"status": "done"})
    store.compact(run)


def test_two_processes_commit_to_one_root(store):
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_run, args=(store.root, run)) for run in ("left", "right")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [w.exitcode for w in writers] == [0, 0]
    assert store.runs() == ["left", "right"] and len(store.committed("left")) == len(store.committed("right")) == 10
    assert store.read("cells").num_rows == 20


# --- queries --------------------------------------------------------------------------------


def test_an_empty_root_has_all_tables(store):
    result = store.sql("select (select count(*) from cells), (select count(*) from samples)")
    assert result.rows == ((0, 0),)
    assert store.read("cells").num_rows == 0 and store.committed("never-ran") == set()


def test_sql_gives_columns_and_python_values(store):
    commit(store, "c", values=(0.5,))
    store.commit_run(RUN, {"status": "done", "exit_code": 0})
    result = store.sql("select c.run, verdict, value, m.env['VLLM_X'] as x, status, m.started_utc < now() as past "
                       "from cells c join measurements m using (cell, attempt) join runs r on r.run = c.run")
    assert result.columns == ("run", "verdict", "value", "x", "status", "past")
    assert result.rows == ((RUN, "PASS", 0.5, "1", "done", True),)


@pytest.mark.parametrize(("query", "words"), [
    ("selec 1", "syntax error"),
    ("select verdict from celles", "celles does not exist"),
    ("select verdikt from cells", "verdikt"),
])
def test_a_bad_query_is_told_in_duckdbs_words_with_the_tables(store, query, words):
    with pytest.raises(UsageError, match=f"(?s){words}.*Tables: runs, cells, boots"):
        store.sql(query)


@pytest.mark.parametrize("query", ["", "  ", "-- nothing"], ids=["empty", "blank", "comment"])
def test_an_empty_query_is_bad_usage(store, query):
    with pytest.raises(UsageError, match="the query is empty"):
        store.sql(query)


def test_sql_gives_times_as_aware_utc(store):
    commit(store, "c")
    ((began,),) = store.sql("select started_utc from cells").rows
    assert began == store.read("cells").column("started_utc")[0].as_py() and began.utcoffset() == timedelta(0)


def test_connect_serves_several_queries(store):
    fill(store, 2)
    with store.connect() as connection:
        assert connection.execute("select count(*) from measurements").fetchone() == (4,)
        assert connection.execute("select count(*) from cells where verdict = 'PASS'").fetchone() == (2,)


def test_plain_duckdb_reads_the_same_files(store):
    expected = fill(store, 3)
    for _ in ("as committed", "compacted"):
        pattern = f"{store.files.base}/table=measurements/*/*.parquet"
        found = duckdb.sql(f"select value from '{pattern}' order by 1").fetchall()
        assert [v for (v,) in found] == expected
        store.compact(RUN)


def test_an_unknown_table_is_refused_with_the_known_ones(store):
    with pytest.raises(UsageError, match="no table 'cell'; tables are runs, cells"):
        store.read("cell")
