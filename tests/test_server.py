"""A server from boot to teardown: a made-up vLLM for what can happen, and the real one once."""

import _ctypes
import dataclasses
import os
import shutil
import signal
import time
from pathlib import Path

import played
import pytest
from played import boot_fails, quiet

from farm import endings, launch, lifeline, models, server
from farm.bench import Card, Prompt
from farm.bootcheck import ExpectedFacts
from farm.errors import BootFailure, InvalidMeasurement, RefusedConfig, RequestFailed, ServerLost
from farm.records import Reason
from farm.serverspec import ServerSpec

PROMPT = Prompt(tuple(range(40, 70)), "sha")
GAUGE = "vllm:kv_cache_usage_perc"


@pytest.fixture
def tree(tmp_path) -> Path:
    return played.write_tree(tmp_path / "tree")


@pytest.fixture
def spec(tree, tmp_path, monkeypatch):
    """What to boot, in a mode of the made-up vLLM; nothing of it may be left after the test."""
    run = f"run-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setattr(endings, "LOST_WITHIN_S", 0.5)

    def make(mode: str = "healthy", env=None, **changes) -> ServerSpec:
        made = played.spec_of(tree, tmp_path, run, mode)
        return dataclasses.replace(made, env={**made.env, **(env or {})}, **changes)

    yield make
    assert lifeline.processes_of_run(run) == []


# --- a healthy server -----------------------------------------------------------------------


def test_facts_requests_counters(spec):
    with server.boot(spec(), quiet) as running:
        facts = running.facts
        reply = running.complete(PROMPT, max_tokens=8, seed=1, deadline_s=10.0)
        counters = running.counters()
    assert (facts.pool_tokens, facts.pool_pinned, facts.block_size) == (72_247, True, 640)
    assert facts.unknown_knobs == ("VLLM_MADE_UP",)
    assert 0 < facts.boot_s < 30
    assert facts.gaps == ()
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens, reply.text) == (30, 8, 0, "ab")
    assert counters == {GAUGE: 0.5, "vllm:prompt_tokens_total": 3.0}


def test_the_record_holds_arguments_and_a_redacted_environment(spec, tree):
    with server.boot(spec(args=("--api-key", "k", "--max-model-len=9")), quiet) as running:
        facts = running.facts
    assert facts.argv[1:4] == ("-m", "vllm.entrypoints.cli.main", "serve")
    assert facts.argv[5:8] == ("--api-key", "set", "--max-model-len=9")
    assert "--uds" in facts.argv
    assert (facts.env["HF_TOKEN"], facts.env["PYTHONPATH"]) == ("set", str(tree))


def test_a_gauge_is_sampled_during_a_request(spec):
    with server.boot(spec(), quiet) as running:
        with running.sampled(GAUGE, 0.01) as sampling:
            running.complete(PROMPT, max_tokens=8, deadline_s=10.0)
            time.sleep(0.1)
        trace = sampling.trace()
    assert trace.peak == 0.5
    assert len(trace.points) >= 3
    assert trace.missed == 0


def test_caches_are_cold_once(spec):
    with server.boot(spec(), quiet) as running:
        assert running.facts.caches == "cold"
        (running.spec.caches / "vllm" / "modelinfo.json").write_text("{}")
    with server.boot(spec(), quiet) as running:
        assert running.facts.caches == "warm"


def test_a_patched_trees_first_boot_has_the_unpatched_trees_kernels(spec, tmp_path):
    kernel = tmp_path / "unpatched" / "triton" / "AAA" / "k.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"compiled")
    for state in ("seeded", "warm"):
        with server.boot(dataclasses.replace(spec(), compiled=tmp_path / "unpatched"), quiet) as running:
            assert running.facts.caches == state
            assert (running.spec.caches / "triton" / "AAA" / "k.cubin").read_bytes() == b"compiled"


def test_each_boot_reads_its_own_part_of_the_log(spec):
    log = spec().log
    log.write_text("GPU KV cache size: 5 tokens\nKV cache layout: what\n")
    with server.boot(spec(), quiet) as running:
        assert (running.facts.pool_tokens, running.facts.gaps) == (72_247, ())
        assert "5 tokens" not in running.log_tail()


def test_progress_tells_of_health(spec):
    told = []
    with server.boot(spec(), told.append):
        pass
    assert any("healthy after" in text for text in told)


@pytest.mark.parametrize("deaf", [False, True], ids=["asked", "killed"])
def test_teardown_leaves_nothing(spec, deaf, monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    with server.boot(spec("deaf-engine" if deaf else "healthy"), quiet) as running:
        folder = Path(running.facts.argv[-1]).parent  # of its socket
        assert len(running._child.processes()) == (2 if deaf else 1)
    assert not folder.exists()  # processes: the fixture looks


def test_teardown_after_an_exception(spec):
    with pytest.raises(ZeroDivisionError), server.boot(spec(), quiet):
        raise ZeroDivisionError


# --- boots that fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "reason", "message"),
    [
        ("dies", Reason.BOOT_DIED, "exit status 1 while it booted: ImportError: cannot import name 'x'"),
        ("killed", Reason.BOOT_DIED, "signal SIGKILL while it booted: Unknown vLLM environment"),
        ("canary-fails", Reason.CANARY_FAILED, "answers /health.*HTTP 500: the kernel is not there"),
        ("canary-hangs", Reason.CANARY_FAILED, "ran past its deadline"),
        ("dies-in-canary", Reason.BOOT_DIED, "exit status 5 while it booted: RuntimeError: engine gone"),
        ("stalls", Reason.BOOT_STALLED, "wrote nothing to its log for 2 s; its last line: Loading model"),
        ("chatters", Reason.BOOT_STALLED, "was not healthy within 2 s; its last line: still loading"),
    ],
)
def test_a_boot_that_fails(spec, mode, reason, message):
    limits = {"stalls": {"stall_s": 2.0}, "chatters": {"deadline_s": 2.0}, "canary-hangs": {"canary_s": 1.0}}
    error = boot_fails(spec(mode, **limits.get(mode, {})))
    assert isinstance(error, BootFailure) and not isinstance(error, RefusedConfig)
    assert error.reason is reason
    assert error.log_tail
    with pytest.raises(BootFailure, match=message):
        raise error


def test_a_stalled_boot_leaves_its_stack_where_py_spy_is_not(spec, monkeypatch):
    monkeypatch.setattr("farm.stacks.spy", lambda python: None)
    error = boot_fails(spec("stalls", stall_s=2.0))
    assert "Fatal Python error: Aborted" in error.log_tail
    assert "main.py" in error.log_tail.split("Fatal Python error: Aborted")[1]


def test_a_refused_configuration_is_told_in_vllms_words(spec):
    error = boot_fails(spec("refuses"))
    assert isinstance(error, RefusedConfig)
    assert error.reason is Reason.REFUSED_CONFIG
    assert str(error).startswith("To serve at least one request with the model's max seq len (65536)")


def test_no_interpreter_is_a_boot_failure(spec):
    error = boot_fails(spec(python=Path("/no/such/python")))
    assert error.reason is Reason.BOOT_DIED
    assert "/no/such/python" in str(error)


def test_a_server_that_has_not_loaded_its_tree_is_no_evidence(spec, tree):
    error = boot_fails(spec("wrong-tree"))
    assert isinstance(error, InvalidMeasurement)
    assert error.reason is Reason.WRONG_TREE
    assert str(tree) in str(error)


def test_a_server_that_has_loaded_another_vllm_too_is_no_evidence(spec, tmp_path):
    other = tmp_path / "site-packages" / "vllm" / "_C.abi3.so"
    other.parent.mkdir(parents=True)
    shutil.copy(_ctypes.__file__, other)
    error = boot_fails(spec("foreign", env={"FAKE_FOREIGN": str(other)}))
    assert error.reason is Reason.WRONG_TREE
    assert str(other) in str(error)


def test_a_boot_with_other_facts_than_its_profile_expects_is_no_evidence(spec):
    error = boot_fails(spec(expected=ExpectedFacts(block_size=832, pool_tokens=72_247, args=("--max-model-len=1",))))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.FACTS_DIFFER
    assert "block_size: expected 832, found 640" in str(error)
    assert "argument --max-model-len 1: expected" in str(error) and "pool_tokens" not in str(error)


def test_a_boot_with_the_facts_that_its_profile_expects_is_healthy(spec):
    expected = ExpectedFacts(block_size=640, pool_tokens=72_247, args=("--max-model-len", "49152"))
    with server.boot(spec(expected=expected), quiet) as running:
        assert running.facts.block_size == 640


def test_without_a_probe_nothing_is_seen_of_the_engine(spec):
    with server.boot(spec(), quiet) as running, running.probed() as probing:
        running.complete(PROMPT, max_tokens=8, deadline_s=10.0)
    assert (probing.trace(), running.facts.probe) == (None, False)


def test_a_folder_too_deep_for_a_socket_is_left_for_a_short_one(spec, tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with server.boot(spec(), quiet) as running:
        assert len(os.fsencode(running.facts.argv[-1])) <= launch.SOCKET_PATH_LIMIT


# --- requests that fail ---------------------------------------------------------------------


def test_a_server_that_dies_in_a_request_is_lost(spec):
    with server.boot(spec("dies-in-request"), quiet) as running:
        with pytest.raises(ServerLost, match="signal SIGKILL during a request") as caught:
            running.complete(PROMPT, max_tokens=8, deadline_s=10.0)
        assert caught.value.reason is Reason.SERVER_LOST
        assert "OutOfMemoryError" in caught.value.log_tail
        with pytest.raises(ServerLost):
            running.counters()


def test_a_request_past_its_deadline_is_no_lost_server(spec):
    with server.boot(spec("request-hangs"), quiet) as running, pytest.raises(RequestFailed, match="deadline of 0.5 s"):
        running.complete(PROMPT, max_tokens=8, deadline_s=0.5)


def test_a_server_that_stops_answering_is_lost(spec, monkeypatch):
    monkeypatch.setattr(endings, "HEALTH_S", 0.5)
    with server.boot(spec(), quiet) as running:
        os.kill(running.pid, signal.SIGSTOP)
        with pytest.raises(ServerLost, match="answers nothing any more") as caught:
            running.complete(PROMPT, max_tokens=8, deadline_s=0.5)
        assert caught.value.reason is Reason.SERVER_SILENT
        os.kill(running.pid, signal.SIGCONT)


# --- the real one ---------------------------------------------------------------------------


@pytest.mark.vllm
def test_a_real_boot(tmp_path, real_pin):
    pin = real_pin("0.29.0-cpu")
    import yaml

    profile = yaml.safe_load((Path(server.__file__).parent.parent / "configs/profiles/tiny-cpu.yaml").read_text())
    spec = ServerSpec(
        python=pin.python, tree=pin.baseline.root, model=models.write_model("qwen3next-cpu", tmp_path / "m").path,
        args=tuple(profile["args"]), env={**{k: str(v) for k, v in profile["env"].items()}, "VLLM_MADE_UP": "1"},
        caches=tmp_path / "caches", log=tmp_path / "boot.log",
        card=Card("cpu-0", "CPU slot 0", "cpu", "h", cores=(min(os.sched_getaffinity(0)),)))
    chunk = Prompt(tuple(32 + i % 90 for i in range(4 * 1920)), "sha")
    with server.boot(spec, quiet) as running:
        facts = running.facts
        with running.sampled(GAUGE, 0.05) as sampling:
            reply = running.complete(chunk, max_tokens=1, seed=1, deadline_s=120.0)
            time.sleep(0.5)
        counters = running.counters()
    assert (facts.pool_pinned, facts.block_size, facts.gaps) == (True, 640, ())
    assert facts.unknown_knobs == ("VLLM_MADE_UP",)
    assert facts.caches == "cold"
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (7680, 1, 0)
    assert sampling.trace().peak > 0
    assert sampling.trace().points[-1][1] == 0.0
    assert counters["vllm:prompt_tokens_total"] == 7680 + len(server.CANARY)
