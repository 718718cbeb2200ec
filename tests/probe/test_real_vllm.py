"""The probe in a real vLLM: beside the replay driver's own counts, and in a server beside its gauge."""

from __future__ import annotations

import json
import os
import subprocess
import time
from importlib import resources
from pathlib import Path

import psutil
import pytest
import yaml

from farm import models, probing, server
from farm.bench import Card, Prompt
from farm.config import PROJECT
from farm.serverspec import ServerSpec

PIN = "0.29.0-cpu"
GAUGE = "vllm:kv_cache_usage_perc"

# The driver's schedulers, of the classes that an engine core asks for after it has loaded vLLM's plugins.
DRIVE = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("replay_driver", sys.argv[1])
driver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(driver)
rows = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
from vllm.plugins import load_general_plugins
load_general_plugins()
api = driver.Api()
for lag in (1, 0):
    api.SchedulerConfig(max_model_len=4096, is_encoder_decoder=False, async_scheduling=lag > 0).get_scheduler_cls()
    case = dict(name="x", block_size=832, speculative_blocks=3, method="mtp", chunk_budget=2048, lag=lag, mamba_groups=3)
    for prompt in (20_000, 14_000, 12_000, 3_000):
        print(json.dumps({**driver.replay(api, case, prompt), "lag": lag}), file=rows)
"""


@pytest.fixture(scope="module")
def driven(real_pin, tmp_path_factory):
    """driven(arm) -> (the driver's rows, the probe's own lines), with vLLM's plugin machinery in between."""
    done: dict[str, tuple[list[dict], Path]] = {}
    pin, home = real_pin(PIN), tmp_path_factory.mktemp("probe")
    script = resources.files("jobs").joinpath("inside/replay_driver.py")

    def run(arm: str) -> tuple[list[dict], Path]:
        if arm not in done:
            out = home / arm
            out.mkdir()
            env = pin.env(getattr(pin, arm), home / "caches")
            env["PYTHONPATH"] = os.pathsep.join((env["PYTHONPATH"], str(probing.install(home))))
            env |= probing.variables(attest=out / "attest", probe=out / "probe")
            child = subprocess.run([pin.python, "-c", DRIVE, script], env=env, capture_output=True, text=True, timeout=240)
            assert child.returncode == 0, child.stderr[-2000:]
            probing.check_attested(probing.attested(out / "attest"), getattr(pin, arm).root)
            done[arm] = [json.loads(line) for line in child.stdout.splitlines()], out / "probe"
        return done[arm]

    return run


def watched(probe: Path) -> list[list[dict]]:
    """The probe's lines of each scheduler, in order."""
    lines = [json.loads(line) for line in probe.read_text().splitlines()]
    engines = [line["engine"] for line in lines if line.get("event") == "engine"]
    return [[line for line in lines if line["engine"] == engine] for engine in engines]


@pytest.mark.vllm
@pytest.mark.parametrize("arm", ["baseline", "patched"])
def test_the_probe_counts_what_the_driver_counts(driven, arm):
    rows, probe = driven(arm)
    engines = watched(probe)
    assert len(engines) == len(rows) == 8
    for row, (engine, *lines) in zip(rows, engines, strict=True):
        retired = [entry for line in lines for step in line["steps"] for entry in step[3]]
        assert [before for _, before, _ in retired] == row["before"]
        assert [after for _, _, after in retired] == row["after"]
        assert max(used for line in lines for _, used, _, _ in line["steps"]) == row["peak_blocks"]
        assert engine["pool_blocks"] == row["pool_blocks"] - 1
        assert (lines[-1]["used"], lines[-1]["running"], lines[-1]["waiting"]) == (0, 0, 0)


@pytest.mark.vllm
def test_null_gaps_are_seen_as_published(driven):
    retained = {(arm, lag): [max(row["before"]) for row in driven(arm)[0] if row["lag"] == lag]
                for arm in ("baseline", "patched") for lag in (1, 0)}
    assert retained["baseline", 1] == [16, 12, 11, 5]
    assert max(retained["patched", 1]) <= 3 + 2 + 1  # k + 2 and the chunk in flight
    assert retained["baseline", 0] == retained["patched", 0]


@pytest.mark.vllm
def test_a_server_attests_and_its_probe_sees_what_its_gauge_shows(tmp_path, real_pin):
    pin = real_pin(PIN)
    profile = yaml.safe_load((PROJECT / "configs/profiles/tiny-cpu.yaml").read_text())
    attest, reader = tmp_path / "attest.jsonl", probing.Reader(tmp_path / "probe.jsonl")
    spec = ServerSpec(
        python=pin.python, tree=pin.baseline.root, model=models.write_model("qwen3next-cpu", tmp_path / "m").path,
        args=tuple(profile["args"]), caches=tmp_path / "caches", log=tmp_path / "boot.log",
        env={**{k: str(v) for k, v in profile["env"].items()}, **probing.variables(attest=attest, probe=reader.path)},
        card=Card("cpu-0", "CPU slot 0", "cpu", "h", cores=(min(os.sched_getaffinity(0)),)), carried=probing.install(tmp_path))
    windows = []
    with server.boot(spec, lambda text: None) as running:
        loaded = [pid for pid in running._child.processes()
                  if any(mapped.path.startswith(str(spec.tree)) for mapped in psutil.Process(pid).memory_maps())]
        said = probing.attested(attest)
        probing.check_attested(said, spec.tree, loaded)
        told = [json.loads(line) for line in attest.read_text().splitlines()]
        (engine,) = [line["pid"] for line in told if line["event"] == "cards" and line["cards"] is None]  # a CPU is no card
        assert engine in loaded and {line["event"] for line in told} == {"attest", "cards"}
        reader.check()
        for first in range(4):  # the peak stands for one step, which a sampler may miss: that is what the probe is for
            prompt = Prompt((32 + first, *(32 + i % 90 for i in range(3839))), "sha")
            with probing.probed(reader) as seen, running.sampled(GAUGE, 0.01) as sampling:
                running.complete(prompt, max_tokens=8, seed=1, deadline_s=120.0)
            windows.append((seen.trace(), sampling.trace()))
        with probing.probed(reader) as idle:
            time.sleep(0.1)
    names = {one.process for one in said}
    assert loaded and "MainProcess" in names and any(name.startswith("EngineCore") for name in names)
    (trace,) = {trace for trace, _ in windows}
    (lines,) = watched(reader.path)
    told = {round(line["used"] / trace.pool_blocks, 9) for line in lines[1:]}
    assert {round(value, 9) for _, gauge in windows for _, value in gauge.points} <= told | {0.0}
    assert trace.peak == pytest.approx(max(gauge.peak for _, gauge in windows), abs=1e-9)
    assert (trace.steps, trace.requests) == (2 + 7, 1)  # two chunks, the second of which brings the first token
    assert trace.retained_before >= trace.retained_after >= 1
    assert (idle.trace().steps, idle.trace().peak_blocks, idle.trace().retained_before) == (0, 0, None)
