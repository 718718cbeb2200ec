"""What the farm makes of the probe's files, and where it puts the probe."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from pathlib import Path

import pytest

from farm import probing
from farm.bench import Card, ProbeTrace
from farm.errors import InvalidMeasurement
from farm.probe import farm_probe
from farm.records import Reason

# --- where it is put --------------------------------------------------------------------------


def test_what_is_installed_is_found_as_a_plugin(tmp_path):
    folder = probing.install(tmp_path)
    (found,) = distributions(path=[str(folder)])
    (plugin,) = found.entry_points.select(group="vllm.general_plugins")
    assert (found.name, plugin.value) == ("farm-probe", "farm_probe:load")
    assert (folder / "farm_probe.py").read_text() == Path(farm_probe.__file__).read_text()
    assert folder.parent == tmp_path / "probe" and len(folder.name) == 16


def test_many_may_install_at_once(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(probing.install, [tmp_path] * 16))
    assert [*(tmp_path / "probe").iterdir()] == [*folders]
    stamp = (folders.pop() / "farm_probe.py").stat().st_mtime_ns
    assert (probing.install(tmp_path) / "farm_probe.py").stat().st_mtime_ns == stamp


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "probe").write_text("a file")
    with pytest.raises(OSError, match="probe"):
        probing.install(tmp_path)


def test_only_what_is_asked_for_is_told_to_the_server(tmp_path):
    assert probing.variables() == {}
    assert probing.variables(attest=tmp_path / "a") == {"FARM_ATTEST_OUT": f"{tmp_path}/a"}
    assert probing.variables(attest=tmp_path / "a", probe=tmp_path / "p")["FARM_PROBE_OUT"] == f"{tmp_path}/p"


# --- attestations -------------------------------------------------------------------------------

SAID = {"event": "attest", "pid": 7, "ppid": 1, "process": "EngineCore", "main": "m", "package": "/t/vllm", "version": "0.29.0",
        "files": 3, "files_sha256": "ab"}


@pytest.mark.parametrize(
    ("text", "pids"),
    [
        (None, []),
        ("", []),
        (json.dumps(SAID) + "\n" + json.dumps({**SAID, "pid": 8}) + "\n", [7, 8]),
        (json.dumps(SAID) + "\n" + json.dumps({**SAID, "pid": 8}), [7]),
        ("WARNING: not ours\n[1]\n\n\xff\n" + json.dumps(SAID) + "\n", [7]),
        (json.dumps({**SAID, "event": "other"}) + "\n", []),
        (json.dumps({**SAID, "pid": "7"}) + "\n", []),
        (json.dumps({k: v for k, v in SAID.items() if k != "package"}) + "\n", []),
        (json.dumps({k: v for k, v in SAID.items() if k != "main"}) + "\n", [7]),
    ],
    ids=["no-file", "empty", "two", "torn-last", "foreign", "other-event", "wrong-type", "part-missing", "main-unknown"],
)
def test_attestations_are_read(tmp_path, text, pids):
    file = tmp_path / "attest.jsonl"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    assert [said.pid for said in probing.attested(file)] == pids


def test_a_process_that_could_not_attest_is_wrong_tree(tmp_path):
    (tmp_path / "out").write_text(json.dumps(SAID) + '\n{"event": "failed", "pid": 9, "detail": "OSError: no"}\n')
    with pytest.raises(InvalidMeasurement, match="process 9 could not attest its vLLM: OSError: no") as caught:
        probing.attested(tmp_path / "out")
    assert caught.value.reason is Reason.WRONG_TREE


@pytest.fixture
def tree(tmp_path) -> Path:
    core = tmp_path / "tree" / "vllm" / "v1" / "core"
    core.mkdir(parents=True)
    (core / "pool.py").write_text("a = 1\n")
    return tmp_path / "tree"


@pytest.fixture
def said(tree):
    files, digest = farm_probe.files_sha256(str(tree / "vllm"))

    def make(pid: int = 7, package: Path = tree / "vllm", files_sha256: str = digest) -> probing.Attestation:
        return probing.Attestation(pid, "EngineCore", "m", package, "0.29.0", files, files_sha256)

    return make


def test_processes_of_the_tree_are_let_be(tree, said, tmp_path):
    (tmp_path / "link").symlink_to(tree)
    probing.check_attested([said(), said(8, tmp_path / "link" / "vllm")], tree, [7, 8])
    probing.check_attested([said()], tmp_path / "link")


@pytest.mark.parametrize(
    ("attestations", "pids", "says"),
    [
        ([], (), "no process has attested its vLLM.*VLLM_PLUGINS"),
        ([{}], (7, 9), "process 9 has not attested"),
        ([{}, {"pid": 8, "package": Path("/site/vllm")}], (), r"process 8 \(EngineCore\) has loaded /site/vllm"),
        ([{"files_sha256": "00"}], (), "other files in .* than there are now"),
    ],
    ids=["none", "one-silent", "other-package", "other-files"],
)
def test_a_process_of_another_tree_is_wrong_tree(tree, said, attestations, pids, says):
    with pytest.raises(InvalidMeasurement, match=says) as caught:
        probing.check_attested([said(**changes) for changes in attestations], tree, pids)
    assert caught.value.reason is Reason.WRONG_TREE and str(tree) in str(caught.value)


CARD = Card("GPU-3e3a", "RTX 3090", "cuda", "host-1")


@pytest.mark.parametrize(
    ("said", "seen"),
    [(None, None), ([], None), ([None], None), (["7"], None), ([["3e3a"]], ("GPU-3e3a",)),
     ([["GPU-3e3a"], ["3e3a"]], ("GPU-3e3a",)), ([["3e3a", "77aa"]], ("GPU-3e3a", "GPU-77aa")), ([[]], ())],
    ids=["no-file", "nothing", "uses-none", "wrong-type", "one", "two-engines", "two-cards", "none"],
)
def test_cards_that_engines_see_are_read(tmp_path, said, seen):
    file = tmp_path / "attest.jsonl"
    if said is not None:
        file.write_text("".join(json.dumps({"event": "cards", "pid": 7, "cards": cards}) + "\n" for cards in said))
    assert probing.cards_seen(file) == seen


@pytest.mark.parametrize("seen", [None, ("GPU-3e3a",)])
def test_a_server_on_its_own_card_is_let_be(seen):
    probing.check_cards(seen, CARD)


@pytest.mark.parametrize(("seen", "says"), [(("GPU-77aa",), "sees GPU-77aa"), ((), "sees no card"),
                                            (("GPU-3e3a", "GPU-77aa"), "sees GPU-3e3a, GPU-77aa")])
def test_a_server_that_sees_another_card_is_wrong_card(seen, says):
    with pytest.raises(InvalidMeasurement, match=says) as caught:
        probing.check_cards(seen, CARD)
    assert caught.value.reason is Reason.WRONG_CARD


def test_a_file_written_since_is_wrong_tree(tree, said):
    told = said()
    (tree / "vllm" / "v1" / "core" / "pool.py").write_text("a = 2\n")
    with pytest.raises(InvalidMeasurement, match="something wrote to the tree since"):
        probing.check_attested([told], tree)


# --- steps ------------------------------------------------------------------------------------------

AGO = time.monotonic() - 1000.0  # of what the files tell: t counts from there
A, B = "11.1", "22.1"


def engine(name: str = A, pool: int = 100, **more) -> dict:
    return {"event": "engine", "engine": name, "pid": 1, "pool_blocks": pool, **more}


def step(n: int, *steps: tuple[float, int, int, list], t: float, used: int, running: int = 0, waiting: int = 0,
         retired: list = (), name: str = A) -> dict:
    return {"engine": name, "n": n, "steps": [[AGO + at, *rest] for at, *rest in steps], "t": AGO + t, "used": used,
            "running": running, "waiting": waiting, "retired": list(retired)}


REQUEST = [
    step(0, (1, 4, 16, [["canary", 0, 0]]), t=1.5, used=0),
    step(1, (10, 30, 2048, [["x", 0, 0]]), (11, 40, 2048, [["x", 16, 15]]), t=11.5, used=40, running=1),
    step(2, (12, 35, 1, [["x", 17, 5], ["y", 2, 2]]), t=12.5, used=0),
]


@pytest.fixture
def write(tmp_path):
    """write(line, …): a Reader of a file with these lines, each a mapping or a text as it stands."""
    def write(*lines: dict | str, **options) -> probing.Reader:
        file = tmp_path / "probe.jsonl"
        with file.open("a") as out:
            out.writelines(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in lines)
        return probing.Reader(file, **options)

    return write


@pytest.mark.parametrize(
    ("lines", "mark", "trace"),
    [
        ([engine(), *REQUEST], 5, ProbeTrace(3, 100, 40, 17, 15, 2)),
        ([engine(), *REQUEST], 0, ProbeTrace(4, 100, 40, 17, 15, 3)),
        ([engine(), *REQUEST], 11.7, ProbeTrace(1, 100, 40, 17, 5, 2)),
        ([engine(), *REQUEST], 13, ProbeTrace(0, 100, 0, None, None, 0)),
        ([engine()], 0, ProbeTrace(0, 100, 0, None, None, 0)),
        ([engine(), step(0, (5, 9, 8, [["x", None, None]]), t=6, used=0)], 0, ProbeTrace(1, 100, 9, None, None, 1)),
        ([engine(), step(0, (5, 9, 0, []), t=6, used=9, retired=[["x", 6, 4]])], 0, ProbeTrace(0, 100, 9, 6, 4, 1)),
        ([engine(), *REQUEST, step(3, (5000, 99, 7, [["z", 50, 50]]), t=5001, used=99)], 5, ProbeTrace(3, 100, 40, 17, 15, 2)),
        (["WARNING: other words\n", engine(), "[]\n", {"engine": "33.1", "n": 0}, {"engine": {}}, *REQUEST, {"n": 1}], 5,
         ProbeTrace(3, 100, 40, 17, 15, 2)),
        ([engine(), *REQUEST, '{"engine":"11.1","n":3,"steps":[[1'], 5, ProbeTrace(3, 100, 40, 17, 15, 2)),
    ],
    ids=["a-request", "with-canary", "from-within", "idle", "no-step-yet", "no-mamba-group", "retired-at-finish",
         "after-the-window", "foreign-lines", "torn-last-line"],
)
def test_a_window_of_one_engine(write, lines, mark, trace):
    assert write(*lines).since(AGO + mark) == trace


def test_several_engines_count_as_one_pool_and_peak_together(write):
    reader = write(
        engine(), engine(B, 50),
        step(0, (10, 30, 9, [["x", 3, 2]]), t=20, used=5),
        step(0, (11, 20, 9, [["y", 7, 1]]), t=12, used=0, name=B),
        step(1, (21, 25, 9, [["x", 2, 2]]), t=22, used=0),
        step(1, (30, 40, 9, [["z", 1, 1]]), t=31, used=0, name=B))
    assert reader.since(AGO) == ProbeTrace(4, 150, 50, 7, 2, 3)
    assert reader.since(AGO + 21.5) == ProbeTrace(1, 150, 40, 1, 1, 1)
    assert reader.since(AGO + 10.5).peak_blocks == 50  # what the first engine held when the window began


def test_without_a_file_there_was_no_probe(tmp_path):
    reader = probing.Reader(tmp_path / "none")
    with probing.probed(reader) as seen:
        pass
    assert reader.since(reader.mark()) is None and seen.trace() is None
    with pytest.raises(InvalidMeasurement, match="is not there. The farm's plugin was not loaded") as caught:
        reader.check()
    assert caught.value.reason is Reason.NO_SAMPLES


def test_without_a_reader_there_is_no_trace():
    with probing.probed(None) as seen:
        pass
    assert seen.trace() is None


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([""], "the probe watches no engine: .* names none"),
        ([{"event": "unknown-api", "pid": 3, "version": "0.99.0", "detail": "Scheduler has no schedule"}],
         "unknown-api in process 3 of vLLM 0.99.0: Scheduler has no schedule.*teach farm/probe"),
        ([engine(), *REQUEST, {"event": "failed", "pid": 3, "version": "0.29.0", "detail": "boo"}], "failed in process 3.*boo"),
        ([engine(), REQUEST[0], REQUEST[2]], "wrote line 2 after line 0: lines are lost"),
        ([engine(), '{"engine":"11.1","n":0,"st\n', *REQUEST[1:]], "wrote line 1 after line -1"),
    ],
    ids=["nothing", "unknown-api", "failed", "lost-line", "broken-line"],
)
def test_a_file_that_cannot_hold_everything_is_no_evidence(write, lines, says):
    reader = write(*lines)
    for ask in (reader.check, lambda: reader.since(AGO), lambda: reader.since(AGO)):
        with pytest.raises(InvalidMeasurement, match=says) as caught:
            ask()
        assert caught.value.reason is Reason.NO_SAMPLES


def test_a_healthy_probe_passes_its_check(write):
    write(engine()).check()


def test_new_lines_are_read_as_they_come(write):
    reader = write(engine(), REQUEST[0])
    assert reader.since(AGO).requests == 1
    write(json.dumps(REQUEST[1])[:50])
    assert reader.since(AGO).requests == 1
    write(json.dumps(REQUEST[1])[50:] + "\n", REQUEST[2])
    assert reader.since(AGO) == ProbeTrace(4, 100, 40, 17, 15, 3)


def test_a_busy_engine_is_waited_for(write):
    reader = write(engine(), step(0, (10, 30, 9, [["x", 3, 2]]), t=20, used=30, running=1))
    late = threading.Timer(0.2, write, [step(1, (30, 60, 9, [["x", 9, 2]]), t=2000, used=0)])
    begun = time.monotonic()
    late.start()
    trace = reader.since(AGO)
    late.join()
    assert (trace.steps, trace.peak_blocks, trace.retained_before) == (2, 60, 9)
    assert time.monotonic() - begun >= 0.2


@pytest.mark.parametrize("state", [{"running": 1}, {"waiting": 1}], ids=["running", "waiting"])
def test_a_busy_engine_that_falls_silent_is_no_evidence(write, state):
    reader = write(engine(), step(0, (10, 30, 9, []), t=20, used=30, **state), patience_s=0.05)
    with pytest.raises(InvalidMeasurement, match="told of no step for 0.05 s") as caught:
        reader.since(AGO)
    assert caught.value.reason is Reason.NO_SAMPLES


def test_a_window_takes_what_its_block_saw(write):
    reader = write(engine(), REQUEST[0])
    with probing.probed(reader) as seen:
        now = time.monotonic() - AGO
        write(step(1, (now, 12, 8, [["x", 4, 3]]), t=now, used=0))
    write(step(2, (now + 5000, 50, 8, [["z", 9, 9]]), t=now + 5000, used=0))
    assert seen.trace() == ProbeTrace(1, 100, 12, 4, 3, 1)


def test_a_block_that_fails_fails_with_its_own_error(write):
    reader = write(engine(), step(0, (10, 30, 9, []), t=20, used=30, running=1), patience_s=60.0)
    with pytest.raises(ZeroDivisionError), probing.probed(reader):
        raise ZeroDivisionError
