"""The plugin on a made-up vLLM of its few parts: what it writes, and that it never stands in the server's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from farm import probing
from farm.probe import farm_probe

POOL = 21  # blocks, the null block among them


class MambaSpec:
    pass


@dataclass
class Block:
    block_id: int
    is_null: bool = False


NULL = Block(0, is_null=True)


class Coordinator:
    """One attention group and two Mamba groups; a retirement keeps a request's last state alone."""

    def __init__(self):
        self.single_type_managers = tuple(SimpleNamespace(req_to_blocks={}) for _ in range(3))

    def remove_skipped_blocks(self, request_id, processed, num_prompt_tokens=None):
        for manager in self.single_type_managers[1:]:
            table = manager.req_to_blocks.get(request_id, [])
            table[:-1] = [NULL] * len(table[:-1])
        return processed


class Pool:
    num_gpu_blocks = POOL

    def __init__(self):
        self.used = 0

    def get_num_free_blocks(self):
        return POOL - 1 - self.used


class Scheduler:
    """Takes three blocks a step for its one request, and frees them all when `finish` comes."""

    def __init__(self, groups=(object, MambaSpec, MambaSpec)):
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind()) for kind in groups])
        self.kv_cache_manager = SimpleNamespace(coordinator=Coordinator(), block_pool=Pool())
        self.running, self.blocks = ["r"], iter(range(1, 100))

    def schedule(self, tokens=4):
        manager = self.kv_cache_manager
        if tokens:
            manager.coordinator.remove_skipped_blocks("r", 8, num_prompt_tokens=9)
            for group in manager.coordinator.single_type_managers:
                group.req_to_blocks.setdefault("r", []).append(Block(next(self.blocks)))
            manager.block_pool.used += 3
        return SimpleNamespace(total_num_scheduled_tokens=tokens)

    def update_from_output(self, output, model_output):
        if model_output == "explode":
            raise ZeroDivisionError("vLLM's own")
        if model_output == "finish":
            self.running, self.kv_cache_manager.block_pool.used = [], 0
        return {0: model_output}

    def get_request_counts(self):
        return len(self.running), 0


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """The made-up package in sys.modules; its classes are one test's own."""
    names = ("vllm", "vllm.config", "vllm.v1", "vllm.v1.kv_cache_interface")
    modules = {name: ModuleType(name) for name in names}
    modules["vllm"].__file__, modules["vllm"].__version__ = str(tmp_path / "tree" / "vllm" / "__init__.py"), "0.99.0"
    modules["vllm.config"].SchedulerConfig = config = type("SchedulerConfig", (), {"get_scheduler_cls": lambda self: self.kind})
    config.kind = type("Scheduler", (Scheduler,), {"__init__": Scheduler.__init__})
    modules["vllm.v1.kv_cache_interface"].MambaSpec = MambaSpec
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


@pytest.fixture
def probe(tmp_path) -> Path:
    return tmp_path / "probe.jsonl"


def chosen(vllm) -> type[Scheduler]:
    """The class that an engine core gets."""
    return vllm["vllm.config"].SchedulerConfig().get_scheduler_cls()


@pytest.fixture
def make(vllm, probe):
    """make(…): a watched scheduler."""
    farm_probe.when_chosen(str(probe), farm_probe.watch)
    return chosen(vllm)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- off --------------------------------------------------------------------------------------


def test_unasked_it_does_nothing(vllm, monkeypatch, tmp_path):
    monkeypatch.delenv(farm_probe.ATTEST_OUT, raising=False)
    monkeypatch.delenv(farm_probe.PROBE_OUT, raising=False)
    before = dict(vars(vllm["vllm.config"].SchedulerConfig)), dict(vars(chosen(vllm)))
    farm_probe.load()
    assert (dict(vars(vllm["vllm.config"].SchedulerConfig)), dict(vars(chosen(vllm)))) == before
    assert list(tmp_path.iterdir()) == []


# --- attestation --------------------------------------------------------------------------------


def write_tree(tree: Path, files: dict[str, str], touched: tuple[str, ...] = ()) -> Path:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    info = tree / "vllm-0.99.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "tree.json").write_text(json.dumps({"touched": dict.fromkeys(touched)}))
    return tree / "vllm"


TREE = {"vllm/__init__.py": "", "vllm/v1/core/pool.py": "a = 1\n", "vllm/v1/worker/w.py": "b = 1\n"}


@pytest.mark.parametrize(
    ("change", "touched", "differs"),
    [
        ({}, (), False),
        ({"vllm/v1/core/pool.py": "a = 2\n"}, (), True),
        ({"vllm/v1/core/sched/new.py": ""}, (), True),
        ({"vllm/v1/core/notes.txt": ""}, (), False),
        ({"vllm/v1/worker/w.py": "b = 2\n"}, (), False),
        ({"vllm/v1/worker/w.py": "b = 2\n"}, ("v1/worker/w.py",), True),
        ({"vllm/v1/worker/new.py": ""}, ("v1/worker/new.py",), True),  # absent before
    ],
    ids=["same", "core", "new-in-core", "no-python", "untouched", "touched", "touched-absent"],
)
def test_the_hash_covers_core_and_what_patches_touch(tmp_path, change, touched, differs):
    one = farm_probe.files_sha256(str(write_tree(tmp_path / "one", TREE, touched)))
    other = farm_probe.files_sha256(str(write_tree(tmp_path / "other", {**TREE, **change}, touched)))
    assert (one[1] != other[1]) is differs
    assert one[0] == 1 + len(touched)


def test_a_process_and_its_fork_attest_through_vllms_own_entry_point(tmp_path):
    package = write_tree(tmp_path / "tree", {**TREE, "vllm/__init__.py": "__version__ = '0.99.0'\n"})
    code = ("import os, vllm\nfrom importlib.metadata import entry_points\n"
            "[plugin.load()() for plugin in entry_points(group='vllm.general_plugins')]\n"
            "os.waitpid(os.fork() or os._exit(0), 0)")
    out = tmp_path / "attest.jsonl"
    path = os.pathsep.join(map(str, (package.parent, probing.install(tmp_path))))
    env = {"PYTHONPATH": path, **probing.variables(attest=out)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=30)
    first, second = [line for line in lines(out) if line["event"] == "attest"]
    assert second["ppid"] == first["pid"] != second["pid"]
    assert (first["event"], first["package"], first["version"], first["files"]) == ("attest", str(package), "0.99.0", 1)
    assert first["files_sha256"] == second["files_sha256"] == farm_probe.files_sha256(str(package))[1]


@pytest.fixture
def forks(monkeypatch) -> list:
    """What a child would do; it must not outlive the test."""
    wanted: list = []
    monkeypatch.setattr("os.register_at_fork", lambda after_in_child: wanted.append(after_in_child))
    return wanted


@pytest.mark.parametrize(
    ("cuda", "cards"),
    [(None, None), ((False, []), None), ((True, ["3e3a", "77aa"]), ["3e3a", "77aa"]), ((True, []), [])],
    ids=["no-torch", "unused", "two-cards", "none-left"],
)
def test_an_engine_says_which_cards_it_sees(vllm, monkeypatch, tmp_path, cuda, cards):
    torch = None if cuda is None else SimpleNamespace(cuda=SimpleNamespace(
        is_initialized=lambda: cuda[0], device_count=lambda: len(cuda[1]),
        get_device_properties=lambda i: SimpleNamespace(uuid=cuda[1][i])))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv(farm_probe.ATTEST_OUT, str(tmp_path / "out"))
    monkeypatch.setattr("os.register_at_fork", lambda after_in_child: None)
    write_tree(tmp_path / "tree", TREE)
    farm_probe.load()
    farm_probe.load()
    assert [line["event"] for line in lines(tmp_path / "out")] == ["attest", "attest"]  # not before the engine is there
    chosen(vllm)
    assert lines(tmp_path / "out")[2:] == [{"event": "cards", "pid": os.getpid(), "cards": cards}]


def test_what_cuda_refuses_to_say_is_told(vllm, monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("CUDA driver error")

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=broken)))
    farm_probe.when_chosen(str(tmp_path / "out"), farm_probe.tell_cards)
    assert chosen(vllm) is vllm["vllm.config"].SchedulerConfig.kind
    (event,) = lines(tmp_path / "out")
    assert "RuntimeError: CUDA driver error" in event["detail"]


def test_a_package_that_cannot_be_read_is_told(vllm, forks, tmp_path):
    vllm["vllm"].__file__ = None
    farm_probe.attest(str(tmp_path / "out"))
    (event,) = lines(tmp_path / "out")
    assert (event["event"], event["pid"], len(forks)) == ("failed", os.getpid(), 1) and "TypeError" in event["detail"]


def test_an_attestation_that_cannot_be_written_is_told_in_the_log(vllm, forks, tmp_path, capsys):
    farm_probe.attest(str(tmp_path))
    assert f"no attestation in {tmp_path}: IsADirectoryError" in capsys.readouterr().err


# --- what an engine tells ---------------------------------------------------------------------------


def test_each_update_tells_its_steps_and_retirements(make, probe):
    scheduler = make()
    first, second = scheduler.schedule(), scheduler.schedule()  # async: the next is scheduled while one is in flight
    assert scheduler.update_from_output(first, "token") == {0: "token"}
    scheduler.update_from_output(second, "finish")
    engine, one, two = lines(probe)
    name = one["steps"][0][3][0][0]
    assert engine == {"event": "engine", "engine": one["engine"], "pid": os.getpid(), "version": "0.99.0",
                      "scheduler": f"{__name__}.Scheduler", "pool_blocks": POOL - 1, "mamba_groups": 2}
    assert [step[1:] for step in one["steps"]] == [[3, 4, [[name, 0, 0]]], [6, 4, [[name, 1, 1]]]]
    assert (one["n"], one["used"], one["running"], one["waiting"], one["retired"]) == (0, 6, 1, 0, [])
    assert (two["n"], two["steps"], two["used"], two["running"]) == (1, [], 0, 0)
    assert one["steps"][0][0] <= one["steps"][1][0] <= one["t"] <= two["t"]
    assert len(name) == 12 and name != "r"


def test_a_retirement_outside_of_a_step_is_told_with_the_update(make, probe):
    scheduler = make()
    output = scheduler.schedule()
    scheduler.schedule()
    assert scheduler.kv_cache_manager.coordinator.remove_skipped_blocks(request_id="r", processed=5) == 5
    scheduler.update_from_output(output, "token")
    assert [entry[1:] for entry in lines(probe)[-1]["retired"]] == [[2, 1]]


def test_a_table_changed_in_place_is_counted_anew(make, probe):
    scheduler = make()
    for _ in range(3):
        scheduler.update_from_output(scheduler.schedule(), "token")
    table = scheduler.kv_cache_manager.coordinator.single_type_managers[1].req_to_blocks["r"]
    table[0] = Block(77)
    scheduler.update_from_output(scheduler.schedule(), "token")
    assert [line["steps"][0][3][0][1:] for line in lines(probe)[1:]] == [[0, 0], [1, 1], [2, 1], [3, 1]]


def test_without_a_mamba_group_requests_still_show(make, probe):
    scheduler = make(groups=(object, object, object))
    scheduler.update_from_output(scheduler.schedule(), "token")
    engine, line = lines(probe)
    assert engine["mamba_groups"] == 0 and [entry[1:] for entry in line["steps"][0][3]] == [[None, None]]


def test_an_engine_that_only_waits_tells_nothing(make, probe):
    scheduler = make()
    scheduler.update_from_output(scheduler.schedule(), "token")
    told = len(lines(probe))
    for _ in range(5):
        scheduler.update_from_output(scheduler.schedule(tokens=0), "nothing")
    assert len(lines(probe)) == told
    scheduler.kv_cache_manager.block_pool.used = 1  # a transfer has ended
    scheduler.update_from_output(scheduler.schedule(tokens=0), "nothing")
    assert [step[1:] for step in lines(probe)[-1]["steps"]] == [[1, 0, []]]


def test_loaded_and_asked_twice_it_watches_once(vllm, make, probe):
    farm_probe.when_chosen(str(probe), farm_probe.watch)
    scheduler = chosen(vllm)()
    scheduler.update_from_output(scheduler.schedule(), "token")
    assert len(lines(probe)) == 2


def test_a_class_whose_base_is_watched_too_is_watched_once(vllm, make, probe):
    class AsyncScheduler(make):
        def __init__(self):
            super().__init__()
            self.more = True

    vllm["vllm.config"].SchedulerConfig.kind = AsyncScheduler
    scheduler = chosen(vllm)()
    scheduler.update_from_output(scheduler.schedule(), "token")
    assert scheduler.more and len(lines(probe)) == 2


def test_two_schedulers_are_two_engines(make, probe):
    for scheduler in (make(), make()):
        scheduler.update_from_output(scheduler.schedule(), "token")
    assert len({line["engine"] for line in lines(probe)}) == 2


# --- nothing of it may reach the server ------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "part"),
    [(Scheduler, "get_request_counts"), (Scheduler, "update_from_output"), (Pool, "num_gpu_blocks"),
     (Pool, "get_num_free_blocks"), (Coordinator, "remove_skipped_blocks")],
)
def test_a_method_it_does_not_know_is_named(make, probe, monkeypatch, owner, part):
    monkeypatch.delattr(owner, part)
    scheduler = make()
    (event,) = lines(probe)
    assert (event["event"], event["version"], event["pid"]) == ("unknown-api", "0.99.0", os.getpid())
    assert f"{owner.__name__} has no {part}" in event["detail"]
    assert "schedule" not in vars(scheduler)


@pytest.mark.parametrize("part", ["kv_cache_manager", "kv_cache_config"])
def test_an_attribute_it_does_not_know_is_named(vllm, probe, part):
    def other_release(self):
        Scheduler.__init__(self)
        delattr(self, part)

    chosen(vllm).__init__ = other_release
    farm_probe.when_chosen(str(probe), farm_probe.watch)
    chosen(vllm)()
    (event,) = lines(probe)
    assert event["event"] == "unknown-api" and f"Scheduler has no {part}" in event["detail"]


def test_moved_interfaces_are_named(make, probe, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_interface", None)
    assert make().schedule().total_num_scheduled_tokens == 4
    (event,) = lines(probe)
    assert event["event"] == "unknown-api" and "vllm.v1.kv_cache_interface" in event["detail"]


@pytest.mark.parametrize(
    ("config", "says"),
    [(None, "vllm.config"), (SimpleNamespace(), "SchedulerConfig"),
     (SimpleNamespace(SchedulerConfig=type("SchedulerConfig", (), {})), "SchedulerConfig has no get_scheduler_cls")],
    ids=["module", "class", "method"],
)
def test_a_configuration_it_does_not_know_is_named(vllm, probe, monkeypatch, config, says):
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    farm_probe.when_chosen(str(probe), farm_probe.watch)
    (event,) = lines(probe)
    assert event["event"] == "unknown-api" and says in event["detail"]


def test_a_scheduler_that_is_no_class_of_ours_is_named(vllm, probe):
    vllm["vllm.config"].SchedulerConfig.kind = SimpleNamespace  # takes no other __init__
    farm_probe.when_chosen(str(probe), farm_probe.watch)
    assert chosen(vllm) is SimpleNamespace
    (event,) = lines(probe)
    assert event["event"] == "unknown-api" and "TypeError" in event["detail"]


def test_a_fault_of_its_own_ends_the_watch_alone(make, probe):
    scheduler = make()
    scheduler.update_from_output(scheduler.schedule(), "token")
    scheduler.kv_cache_manager.coordinator.single_type_managers[2].req_to_blocks["r"] = [object()]
    output = scheduler.schedule()
    assert output.total_num_scheduled_tokens == 4
    assert scheduler.update_from_output(output, "token") == {0: "token"}
    event = lines(probe)[-1]
    assert event["event"] == "failed" and "is_null" in event["detail"]
    assert not {"schedule", "update_from_output"} & set(vars(scheduler))
    assert "remove_skipped_blocks" not in vars(scheduler.kv_cache_manager.coordinator)


def test_a_wrap_around_its_own_is_left_in_place(make, probe):
    scheduler = make()
    coordinator, seen = scheduler.kv_cache_manager.coordinator, []
    ours = coordinator.remove_skipped_blocks
    coordinator.remove_skipped_blocks = lambda *args, **kwargs: (seen.append(args), ours(*args, **kwargs))
    scheduler.kv_cache_manager.block_pool.get_num_free_blocks = lambda: "many"
    for _ in range(2):
        scheduler.update_from_output(scheduler.schedule(), "token")
    assert len(seen) == 2 and [line["event"] for line in lines(probe)] == ["engine", "failed"]


def test_what_vllm_raises_passes(make, probe):
    scheduler = make()
    output = scheduler.schedule()
    with pytest.raises(ZeroDivisionError, match="vLLM's own"):
        scheduler.update_from_output(output, "explode")
    scheduler.update_from_output(output, "token")
    assert [step[1] for step in lines(probe)[-1]["steps"]] == [3]


def test_a_full_disk_ends_the_watch_alone(make, probe, monkeypatch, capsys):
    scheduler = make()
    monkeypatch.setattr("os.write", lambda file, data: 3)
    output = scheduler.schedule()
    assert scheduler.update_from_output(output, "token") == {0: "token"}
    assert "farm_probe: failed: OSError: the disk took a part of a line only" in capsys.readouterr().err
    assert "schedule" not in vars(scheduler)


def test_a_file_that_cannot_be_had_is_told_in_the_log(vllm, tmp_path, capsys):
    farm_probe.when_chosen(str(tmp_path), farm_probe.watch)
    scheduler = chosen(vllm)()
    assert scheduler.update_from_output(scheduler.schedule(), "token") == {0: "token"}
    assert "farm_probe: failed: IsADirectoryError" in capsys.readouterr().err
