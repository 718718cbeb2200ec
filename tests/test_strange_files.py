"""What others may have laid where the farm reads: whatever it holds, nobody is taken for gone, nothing hangs, nothing falls."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farm import (
    drivers,
    endings,
    folders,
    health,
    isolation,
    jsontext,
    kernels,
    places,
    probing,
    promised,
    resumption,
    runs,
    sweep,
)
from farm.bench import Card
from farm.cardlock import CardLock, Held
from farm.cards import Reading
from farm.dataset import Dataset
from farm.drivers import Driver
from farm.errors import FarmError, InvalidMeasurement, UsageError
from farm.evidence import Policy
from farm.keeper import Keeper
from farm.lifeline import Supervised
from farm.probe import farm_probe
from farm.processid import ProcessId
from farm.quarantine import CardError, Journal, Start
from farm.records import Reason, utc_now
from farm.store import Store
from farm.supervisor import world

DEEP = "[" * 100_000
CARD = Card(uuid="GPU-1", name="played", kind="cuda", host="here", index=0)


class Still:
    """A card on which nothing moves."""

    card = CARD

    def reading(self) -> Reading:
        return Reading(0, 250.0, "535")


def ended(do, within_s: float = 5.0):
    """What `do` returns; a test that hangs would hang them all."""
    done: list = []
    thread = threading.Thread(target=lambda: done.append(do()), daemon=True)
    thread.start()
    thread.join(within_s)
    assert done, "it hangs, or has raised"
    return done[0]


@pytest.mark.parametrize("text", [DEEP, "{", b"\xff", "1" * 5000], ids=["deep", "half", "binary", "digits"])
def test_the_only_error_of_json_is_a_value_error(text):
    with pytest.raises(ValueError):
        jsontext.loads(text)


@pytest.mark.parametrize(("reader", "said"), [
    (jsontext.word, "\x1b[2J"), (jsontext.word, "two\nlines"), (jsontext.text, 5), (jsontext.whole, True),
    (jsontext.whole, 10**400), (jsontext.whole, 1.0), (jsontext.number, float("nan")), (jsontext.number, float("inf")),
    (jsontext.moment, "2026-12-02T10:00:00"), (jsontext.moment, None)])
def test_a_value_is_what_its_writer_would_have_written(reader, said):
    with pytest.raises(ValueError):
        reader(said)


# --- the host's own state ---------------------------------------------------------------------------


def record(**other) -> str:
    me = ProcessId.here()
    process = {"world": me.world, "pid": me.pid, "started": me.started}
    return json.dumps({"user": "u", "process": process, "run": "r", "cell": "c",
                       "since": "2026-12-02T10:00:00+00:00", **other})


@pytest.mark.parametrize("text", [
    DEEP, record(process={"world": 5, "pid": 1, "started": 2}), record(process={"world": world(), "pid": "a\0b", "started": 2}),
    record(process={"world": world(), "pid": "../../etc", "started": None}), record(since="2026-12-02T10:00:00"),
    record(user="\x1b[2Jevil\n")], ids=["deep", "world", "pid-nul", "pid-path", "no-zone", "escapes"])
def test_a_lock_whose_record_is_none_is_held_all_the_same(tmp_path, text):
    lock = CardLock(tmp_path, "GPU-1")
    lock.path.write_text(text)
    with lock.path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock.holder() is None
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(Held), lock.held("r", "c", wait_s=0, waiting=print):
            pytest.fail("both have it")
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_of_any_size_is_no_hindrance(tmp_path):
    lock, journal = CardLock(tmp_path, "GPU-1"), Journal(tmp_path, "GPU-1")
    for path in (lock.path, journal.path):
        path.touch()
        os.truncate(path, 2**40)  # a hole: it takes no room
    assert not journal.history().errors
    journal.probed("passed", "")
    assert journal.history().probed.outcome == "passed" and journal.path.stat().st_size < 2**20
    with lock.path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock.holder() is None


def test_a_pipe_in_the_place_of_a_lock_is_told(tmp_path):
    os.mkfifo(CardLock(tmp_path, "GPU-1").path)
    with pytest.raises(FarmError, match="GPU-1.lock"):
        CardLock(tmp_path, "GPU-1").holder()


ERROR = {"event": "error", "at_utc": utc_now().isoformat(), "reason": "card-lost", "detail": "d", "run": "r", "cell": "c"}
START = {"event": "start", "run": "r", "power_limit_w": 250.0, "driver": "535"}
OUT = {**ERROR, "event": "quarantined", "until_utc": (utc_now() + timedelta(hours=1)).isoformat(), "errors": [ERROR]}


@pytest.mark.parametrize("line", [
    DEEP, *map(json.dumps, [
        {**ERROR, "at_utc": "2026-12-02T10:00:00"}, {**ERROR, "detail": 5}, {**OUT, "until_utc": "2026-12-02T10:00:00"},
        {**OUT, "errors": [{**ERROR, "detail": [7]}]}, {**START, "power_limit_w": "x"}, {**START, "power_limit_w": 10**400},
        {**START, "driver": 5}])], ids=["deep", "no-zone", "detail", "until", "errors", "limit-text", "limit-huge", "driver"])
def test_a_line_of_the_journal_that_is_none_of_ours_stops_nobody(tmp_path, line):
    journal = Journal(tmp_path, CARD.uuid)
    journal.path.write_text(line + "\n")
    keeper = Keeper(Still(), tmp_path, Policy(), "r")
    assert keeper.standing() is None
    assert keeper.gate(print).power_limit_w == 250.0
    assert journal.erred(CardError(utc_now(), Reason.CARD_LOST, "d", "r", "c"), after=2, for_s=60) is None


def test_a_clock_that_was_wrong_puts_no_card_out_for_years(tmp_path):
    journal, later = Journal(tmp_path, "GPU-1"), utc_now() + timedelta(days=4000)
    lines = [{**OUT, "at_utc": later.isoformat(), "until_utc": (later + timedelta(hours=1)).isoformat()},
             {**ERROR, "at_utc": later.isoformat()}]
    journal.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert journal.history().quarantine.over  # on trial: the probe decides
    assert journal.history().errors == ()


def test_an_event_that_the_disk_takes_half_is_told_and_leaves_nothing(tmp_path):
    journal = Journal(tmp_path, "GPU-1")
    journal.opened("r", Start())
    size, (_, hard) = journal.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))  # a write that crosses it takes what fits
    try:
        with pytest.raises(FarmError, match="make room"):
            journal.probed("failed", "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert journal.path.stat().st_size == size


def test_no_boot_begins_on_a_card_whose_lock_was_taken_away(tmp_path):
    keeper = Keeper(Still(), tmp_path, Policy(), "r")
    with keeper.held("c", print):
        keeper.gate(print)
        CardLock(tmp_path, CARD.uuid).path.unlink()
        with pytest.raises(FarmError, match="removed or replaced") as caught:
            keeper.gate(print)
        assert caught.value.reason is Reason.CARD_BUSY
    keeper.gate(print)


@pytest.mark.parametrize("note", [
    DEEP, '{"world": 5, "pid": 1, "started": 2}', json.dumps({"world": world(), "pid": "a\0", "started": 1})],
    ids=["deep", "world", "nul"])
def test_a_note_that_a_patch_wrote_does_not_stop_the_sweep(tmp_path, note):
    left, state = tmp_path / "t" / "farm-x", tmp_path / "s"
    left.mkdir(parents=True)
    state.mkdir()
    (left / folders.NOTE).write_text(note)
    assert "without a note" in str(sweep.sweep(state, [left.parent]))
    assert left.is_dir()


LIFE = {"mark": "m", "run": "r", "world": "0 x", "owners": [[1, 1]], "supervisor": [999_999, 1]}


@pytest.mark.parametrize("text", [DEEP, json.dumps({**LIFE, "supervisor": [float("inf"), 1]}),
                                  json.dumps({**LIFE, "mark": "\ud800", "world": world()})], ids=["deep", "inf", "surrogate"])
def test_a_record_of_a_life_that_is_none_is_passed_over(tmp_path, text):
    (sweep.records(tmp_path) / "x.json").write_text(text)
    assert not sweep.sweep(tmp_path, [tmp_path / "none"]).ended


def test_a_pipe_among_the_records_does_not_hold_up_the_sweep(tmp_path):
    os.mkfifo(sweep.records(tmp_path) / "x.json")
    assert not ended(lambda: sweep.sweep(tmp_path, [tmp_path / "none"])).ended


def test_relative_folders_mean_the_same_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "state").mkdir()
    monkeypatch.setenv("FARM_HOST_STATE", "state")
    monkeypatch.setenv("FARM_CACHE", "cache")
    assert (places.host_state(), places.default_cache()) == (tmp_path / "state", tmp_path / "cache")


# --- processes -------------------------------------------------------------------------------------


def python(code: str, *args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *args], text=True, timeout=60, **options)


def test_a_process_that_cannot_be_looked_at_has_not_ended():
    done = python("""
import os, resource
from farm.processid import ProcessId
me = ProcessId.here()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
kept = [None]
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
import farm.supervisor
try:
    print("ended" if farm.supervisor.started(me.pid) is None else "there")
except OSError as error:
    print("nobody can say")
""", capture_output=True)
    assert done.stdout == "nobody can say\n", done.stderr


def test_a_caller_with_a_thousand_open_files_starts_children_too(tmp_path):
    done = python("""
import os, resource, sys
from farm.lifeline import Supervised
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
with Supervised.start(["/bin/true"], env={}, cwd="/", stdout_path=sys.argv[1]) as child:
    print(child.wait(10))
""", str(tmp_path / "out"), capture_output=True)
    assert done.stdout == "0\n", done.stderr


def test_standard_streams_that_are_closed_cost_no_child(tmp_path):
    done = python("""
import os, sys
for number in (0, 1, 2):
    os.close(number)
from farm.console import open_standard_streams
from farm.lifeline import Supervised
open_standard_streams()
with Supervised.start(["/bin/true"], env={}, cwd="/", stdout_path=sys.argv[1] + "/out") as child:
    status = child.wait(10)
open(sys.argv[1] + "/said", "w").write(str(status))
""", str(tmp_path))
    assert done.returncode == 0 and (tmp_path / "said").read_text() == "0"


def test_a_signal_without_a_name_is_named(tmp_path):
    assert endings._status(-35) == "signal SIGRTMIN+1"
    script = tmp_path / "p.py"
    script.write_text("import os; os.kill(os.getpid(), 35)")
    slot = Card(uuid="CPU-1", name="slot", kind="cpu", host="here", index=0)
    found = health.examine(slot, health.own_interpreter({}), script=script)
    assert found.outcome == "failed" and "SIGRTMIN+1" in found.detail


# --- what a tree under test may write -----------------------------------------------------------------


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tree" / "vllm").mkdir(parents=True)
    (tmp_path / "tree" / "vllm" / "__init__.py").touch()
    return tmp_path / "tree"


def lines(path: Path, *said: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in said))
    return path


@pytest.mark.parametrize("package", ["a\0b", "/\ud800"], ids=["nul", "surrogate"])
def test_a_package_that_is_no_path_is_the_wrong_tree(tree, tmp_path, package):
    files, digest = farm_probe.files_sha256(str(tree / "vllm"))
    file = lines(tmp_path / "a", {"event": "attest", "pid": 1, "process": "p", "package": package, "version": "0",
                                  "files": files, "files_sha256": digest})
    with pytest.raises(InvalidMeasurement) as caught:
        probing.check_attested(probing.attested(file), tree)
    assert caught.value.reason is Reason.WRONG_TREE


@pytest.mark.parametrize("card", [5, None, ["GPU-1"], "\x1b[2J"], ids=["number", "null", "list", "escape"])
def test_a_card_that_is_no_uuid_is_the_wrong_card(tmp_path, card):
    seen = probing.cards_seen(lines(tmp_path / "a", {"event": "cards", "cards": [card]}))
    with pytest.raises(InvalidMeasurement) as caught:
        probing.check_cards(seen, CARD)
    assert caught.value.reason is Reason.WRONG_CARD and str(caught.value).isprintable()


@pytest.mark.parametrize("what", ["pipe", "folder", "link", "long"])
def test_what_is_no_file_of_the_probes_is_told_at_once(tmp_path, what):
    path = tmp_path / "a"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "link":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 2**40)

    def told(read):
        with pytest.raises(InvalidMeasurement) as caught:
            read()
        return caught.value.reason

    assert ended(lambda: told(lambda: probing.attested(path))) is Reason.WRONG_TREE
    assert ended(lambda: told(probing.Reader(path).check)) is Reason.NO_SAMPLES


ENGINE = {"event": "engine", "engine": "e", "pool_blocks": 10}
STEP = {"engine": "e", "n": 0, "t": 1.0, "used": 1, "running": 0, "waiting": 0, "steps": [], "retired": []}


@pytest.mark.parametrize("other", [
    {"t": "x"}, {"t": float("nan")}, {"used": "x"}, {"used": None}, {"used": 10**400}, {"retired": [["r", "x", 5]]},
    {"retired": [[["r"], 2, 5]]}, {"steps": [["x", 1, 1, []]]}, {"steps": [[1.0, 1, "x", []]]}], ids=str)
def test_a_step_of_another_form_is_none_of_the_probes(tmp_path, other):
    reader = probing.Reader(lines(tmp_path / "p", ENGINE, {**STEP, **other}), patience_s=0.1)
    assert reader.since(0.0).steps == 0


def test_an_engine_of_infinite_size_is_none(tmp_path):
    with pytest.raises(InvalidMeasurement, match="watches no engine"):
        probing.Reader(lines(tmp_path / "p", {**ENGINE, "pool_blocks": float("inf")})).check()


@pytest.fixture
def compiled(tmp_path):
    kernel = tmp_path / "pristine" / "triton" / "AAA"
    kernel.mkdir(parents=True)
    (kernel / "k.cubin").touch()
    (kernel / "__grp__k.json").write_text(json.dumps({"child_paths": {}}))
    return kernel.parent.parent


def test_nothing_is_copied_that_lies_elsewhere_and_a_pipe_is_passed_over(compiled, tmp_path):
    (tmp_path / "secret").write_text("of the host")
    kernel = compiled / "triton" / "AAA"
    (kernel / "file").symlink_to(tmp_path / "secret")
    (kernel / "ring").symlink_to(kernel)
    os.mkfifo(kernel / "pipe")
    (kernel / "__grp__deep.json").write_text(DEEP)
    assert kernels.seed(tmp_path / "ours", compiled)
    assert sorted(os.listdir(tmp_path / "ours" / "triton" / "AAA")) == ["__grp__k.json", "k.cubin"]


def test_half_a_copy_is_no_cache_and_the_next_boot_clears_what_a_kill_left(compiled, tmp_path, monkeypatch):
    ours, seen = tmp_path / "all" / "ours", []
    monkeypatch.setattr(kernels, "_move", lambda *_: seen.append([p for p in ours.rglob("*") if p.is_file()]))
    killed = tmp_path / "all" / "farm-killed"
    killed.mkdir(parents=True)
    (killed / folders.NOTE).write_text(json.dumps({"world": world(), "pid": 2**22 + 1, "started": 1}))
    assert kernels.seed(ours, compiled)
    assert seen == [[]]
    assert os.listdir(tmp_path / "all") == ["ours"]


def test_paths_with_spaces_are_shown_and_what_no_path_can_be_is_not(tmp_path):
    model = tmp_path / "my models" / "x"
    model.mkdir(parents=True)
    for word in (str(model), f"--model={model}", json.dumps({"model": str(model)})):
        assert model in isolation.named([word])
    assert isolation.named(["/9j/" + "A" * 5000, "/tmp/" + "y" * 300]) == []


def test_a_file_of_etc_that_vanishes_does_not_bare_those_after_it(tmp_path, monkeypatch):
    class Gone:
        name, path = "a", str(tmp_path / "a")

        def is_symlink(self):
            return False

        def stat(self, follow_symlinks):
            raise FileNotFoundError

    (tmp_path / "shadow").touch(mode=0o600)
    scan = os.scandir

    class Entries:
        def __init__(self, folder):
            self._all = [Gone(), *scan(folder)]

        def __enter__(self):
            return iter(self._all)

        def __exit__(self, *exc):
            return None

    monkeypatch.setattr(isolation.os, "scandir", Entries)
    assert list(isolation._not_for_everybody(str(tmp_path), 1)) == [str(tmp_path / "shadow")]


# --- results ---------------------------------------------------------------------------------------


PLAN = json.dumps({"only": [], "rules": {}, "cells": {"c1": {}, "c2": {}}})


@pytest.fixture
def store(tmp_path):
    store = Store.open(tmp_path / "root")
    for cell in ("c1", "c2"):
        store.commit("r", cell, 1, {"cells": [{"schema_version": 2, "run": "r", "cell": cell, "attempt": 1, "verdict": "PASS",
                                               "reason": "ok", "final": True}]})
    store.commit_run("r", {"status": "interrupted", "plan": PLAN, "cells": 2, "started_utc": utc_now()})
    return store


def place(store: Store, table: str = "cells") -> Path:
    return Path(store.root) / f"table={table}" / "run=r"


def edit(path: Path, column: str, value: pa.Array) -> None:
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(column), column, value), path)


@pytest.mark.parametrize("claims", ["{", "[1]", "[[1]]", "5", "null", DEEP], ids=["half", "int", "nested", "5", "null", "deep"])
def test_a_compacted_file_whose_claims_are_damaged_is_named_and_the_rest_is_read(store, claims):
    table = pq.read_table(place(store) / "c1-1.parquet")
    with pq.ParquetWriter(place(store) / "compacted.7.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"farm_members": claims})
    reading = store.reading("cells", "r")
    assert reading.table["cell"].to_pylist() == ["c1", "c2"]
    assert "compacted.7.parquet" in reading.problems[0]
    assert store.sql("select count(*) from cells").rows == ((2,),)
    assert "compacted.7.parquet" in store.compact("r")[0]


def test_a_compacted_file_that_claims_itself_is_read(store):
    table = pq.read_table(place(store) / "c1-1.parquet")
    with pq.ParquetWriter(place(store) / "compacted.7.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({"farm_members": '["compacted.7.parquet", "c1-1.parquet"]'})
    store.compact("r")
    assert sorted(store.read("cells", "r")["cell"].to_pylist()) == ["c1", "c2"]


def test_a_name_that_is_not_utf_8_is_passed_over(store):
    (Path(os.fsdecode(os.fsencode(place(store)) + b"/\xff-1.parquet"))).touch()
    (Path(os.fsdecode(os.fsencode(place(store).parent) + b"/run=\xff"))).mkdir()
    assert store.read("cells").num_rows == 2
    assert store.runs() == ["r"]


OFFSETS = pa.array([0, 2], pa.int32()).buffers()[1]
NOT_UTF_8 = pa.Array.from_buffers(pa.string(), 1, [None, OFFSETS, pa.py_buffer(b"\xff\xfe")])


@pytest.mark.parametrize(("column", "value"), [
    ("cell", NOT_UTF_8), ("detail", NOT_UTF_8), ("cell", pa.array([None], pa.string())),
    ("started_utc", pa.array([2**62]).cast(pa.timestamp("us", tz="UTC")))], ids=["cell", "detail", "no-cell", "year-148000"])
def test_a_row_that_nobody_could_read_is_a_damaged_file(store, column, value):
    edit(place(store) / "c1-1.parquet", column, value)
    reading = store.reading("cells", "r")
    assert [row["cell"] for row in reading.table.to_pylist()] == ["c2"]
    assert "c1-1.parquet" in reading.problems[0] and column in reading.problems[0]
    assert "c1-1.parquet" in store.compact("r")[0]


def test_a_folder_that_is_not_ours_to_read_is_named_and_the_rest_is_read(store, monkeypatch):
    store.commit_run("another", {"status": "finished"})
    listing = Dataset.listing

    def refused(self, table, run, committed=None):
        if run == "r":
            raise PermissionError("not yours")
        return listing(self, table, run, committed)

    monkeypatch.setattr(Dataset, "listing", refused)
    reading = store.reading("runs")
    assert reading.table["run"].to_pylist() == ["another"] and "run=r" in reading.problems[0]


@pytest.mark.parametrize(("column", "value"), [
    ("status", pa.array([None], pa.string())), ("command", pa.array([[None]], pa.list_(pa.string()))),
    ("process", pa.array([DEEP]))], ids=["status", "command", "process"])
def test_a_run_whose_row_was_edited_is_listed(store, column, value):
    edit(place(store, "runs") / "run.parquet", column, value)
    assert [line.run for line in runs.lines(store)] == ["r"]


@pytest.mark.parametrize("other", [{"pid": "a\0b"}, {"pid": [1]}, {"host": "\x1b[2J"}, {"started": None}], ids=str)
def test_a_driver_of_another_form_is_none(other):
    assert Driver.parse(str(Driver.here())) == Driver.here()
    assert Driver.parse(json.dumps({**json.loads(str(Driver.here())), **other})) is None


def test_a_pipe_in_the_place_of_a_drivers_lock_holds_nobody_up(store):
    os.mkfifo(place(store, "runs") / drivers.LOCK)
    assert ended(lambda: drivers.standing(store, "r", {})) is drivers.Standing.DEAD


@pytest.mark.parametrize("plan", ["{", "[]", DEEP, '{"only": 5, "rules": [], "cells": []}',
                                  '{"only": [], "rules": {}, "cells": {"c9": 5}}'],
                         ids=["half", "list", "deep", "parts", "facts"])
def test_a_promise_that_cannot_be_read_refuses_the_resume(store, plan):
    (sentence,) = promised.differences(plan, PLAN)
    assert "cannot be read any more (column plan" in sentence
    edit(place(store, "runs") / "run.parquet", "plan", pa.array([plan]))
    with pytest.raises(UsageError, match="column plan"):
        resumption.resumed(store, "r", PLAN, None)


@pytest.mark.parametrize("verdict", ["MAYBE", None])
def test_a_verdict_of_another_version_refuses_the_resume(store, verdict):
    edit(place(store) / "c1-1.parquet", "verdict", pa.array([verdict], pa.string()))
    with pytest.raises(UsageError, match="cell c1 has the verdict"):
        resumption.resumed(store, "r", PLAN, None)


def test_a_supervisor_that_dies_before_its_order_is_an_os_error(tmp_path, monkeypatch):
    monkeypatch.setattr("farm.lifeline.supervisor.__file__", "/nonexistent")
    begun = time.monotonic()
    with pytest.raises(OSError, match="cannot start"):
        Supervised.start(["/bin/true"], env={}, cwd="/", stdout_path=tmp_path / "out")
    assert time.monotonic() - begun < 20
