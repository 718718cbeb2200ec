"""The main job end to end: a real vLLM, a real Ray, real Parquet, through the command that users type."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from farm import config
from farm.schemas import BOOT, CARD, SERVING, TREE
from farm.store import Store

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]

SMOKE = "configs/matrix/smoke-cpu.yaml"
# What a CPU slot cannot have, and what no boot of the demo says.
NOT_ON_A_CPU = {"compute_capability", "driver", "power_limit_before_w", "power_limit_after_w", "clock_sm_mhz",
                "clock_memory_mhz", "temperature_c", "throttle_reasons", "other_clients",
                "backend", "connector", "triton", "project_dirty"}


@dataclass(frozen=True)
class Ended:
    code: int
    printed: str
    store: Store

    def rows(self, table):
        return self.store.read(table).to_pylist()


def command(file, results, *more):
    return [sys.executable, str(config.PROJECT / "farm/matrix.py"), str(file), "--results", str(results), *more]


def run(file, results, *more):
    done = subprocess.run(command(file, results, *more), capture_output=True, text=True, cwd=config.PROJECT, timeout=880,
                          check=False)
    return Ended(done.returncode, done.stdout + done.stderr, Store.at(str(results)))


def variant(tmp_path, *changes):
    """The demo's matrix with some text exchanged."""
    text = (config.PROJECT / SMOKE).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "variant.yaml"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def smoke(real_pin, tmp_path_factory):
    real_pin("0.29.0-cpu")
    return run(SMOKE, tmp_path_factory.mktemp("results"))


def test_every_cell_passes(smoke):
    assert smoke.code == 0, smoke.printed
    verdicts = {r["job"]: (r["verdict"], r["reason"]) for r in smoke.rows("cells")}
    assert verdicts == dict.fromkeys(("prefill", "replay", "unit"), ("PASS", "as-expected"))
    assert re.search(r"ours \d+\.\d s \(\d+\.\d %\)", smoke.printed)


def test_pools_and_peaks_are_equal_in_all_four_boots(smoke):
    boots = smoke.rows("boots")
    assert sorted((b["arm"], b["boot"], b["order"]) for b in boots) == [
        ("baseline", 0, 0), ("baseline", 1, 3), ("patched", 0, 1), ("patched", 1, 2)]
    assert all(b["ok"] and b["pool_pinned"] for b in boots)
    assert len({b["pool_tokens"] for b in boots}) == 1
    peaks = [m for m in smoke.rows("measurements") if m["metric"] == "kv_peak"]
    by_length = {}
    for peak in peaks:
        by_length.setdefault(peak["prompt_tokens"], set()).add(peak["value"])
    assert {length: len(values) for length, values in by_length.items()} == {3840: 1, 15360: 1}
    assert len(peaks) == 8 and all(m["cached_tokens"] == 0 for m in peaks)
    assert {m["value"] for m in smoke.rows("measurements") if m["metric"] == "kv_settle"} == {0.0}


def test_the_unit_suites_tell_the_arms_apart(smoke):
    upstream = [t for t in smoke.rows("tests") if t["suite"] == "upstream"]
    failing = {t["nodeid"].rpartition("::")[2] for t in upstream if t["arm"] == "baseline" and t["outcome"] == "failed"}
    assert failing == {"test_mamba_retirement_crosses_null_gaps", "test_mamba_retirement_bounds_prefill_states[1-3584]",
                       "test_mamba_retirement_bounds_prefill_states[2-3584]"}
    assert [t["outcome"] for t in upstream if t["arm"] == "patched"] == ["passed"] * 7


def test_every_row_carries_its_conditions(smoke):
    conditions = [f.name for f in [*TREE, *CARD] if f.name not in NOT_ON_A_CPU | {"tree", "patches"}]
    for table in ("cells", "boots", "measurements", "samples", "tests", "patches"):
        rows = smoke.rows(table)
        assert rows, table
        for row in rows:
            assert [c for c in conditions if row[c] is None] == [], table
            assert row["arm"] is None or row["tree"]
    # Of profiles that have them, and of cards that CUDA and NVML see.
    not_here = NOT_ON_A_CPU | {"drafter_sha256", "launcher_sha256", "cards_seen", "card_processes"}
    served = [f.name for f in [*SERVING, *BOOT] if f.name not in not_here]
    for row in [*smoke.rows("boots"), *(m for m in smoke.rows("measurements") if m["job"] == "prefill")]:
        assert [c for c in served if row[c] is None] == []
    trees = {r["arm"]: r["tree"] for r in smoke.rows("boots")}
    assert trees["baseline"] != trees["patched"]


def test_pools_that_differ_are_no_evidence(tmp_path, real_pin):
    file = variant(tmp_path, ("patched: {patches: all}",
                              "patched: {patches: all, args: [--kv-cache-memory-bytes=50000000]}"))
    ended = run(file, tmp_path / "results", "--only", "prefill")
    (cell,) = ended.rows("cells")
    assert (ended.code, cell["verdict"], cell["reason"]) == (2, "INVALID", "pool-mismatch"), ended.printed
    assert "pool_tokens" in cell["detail"]
    assert len({b["pool_tokens"] for b in ended.rows("boots")}) == 2


def test_without_the_patch_that_the_expectation_needs(tmp_path, real_pin):
    file = variant(tmp_path, ("patched: {patches: all}", "patched: {without: [mamba-align-retire-null-gaps.patch]}"))
    ended = run(file, tmp_path / "results", "--only", "replay")
    (cell,) = ended.rows("cells")
    assert (ended.code, cell["verdict"], cell["reason"]) == (1, "FAIL", "effect-absent"), ended.printed


@pytest.mark.parametrize(
    ("only", "when"),
    [("prefill", r"booting for \d+ s"), ("replay,unit", r"suite regression on baseline")],
    ids=["boot", "unit-suite"],
)
def test_ctrl_c_leaves_nothing_running_and_loses_no_finished_cell(tmp_path, real_pin, only, when):
    results = tmp_path / "results"
    file = variant(tmp_path, ("cpu_slots: 2", "cpu_slots: 1"))
    child = subprocess.Popen(command(file, results, "--only", only), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, cwd=config.PROJECT, start_new_session=True)
    printed, run_id = [], None
    for line in child.stdout:
        printed.append(line)
        run_id = run_id or (match[1] if (match := re.match(r"run (\S+):", line)) else None)
        if re.search(when, line) and "interrupted_at" not in locals():
            until = time.monotonic() + 30  # the line comes before the processes do
            while not (ours := _ours(run_id)) and time.monotonic() < until:
                time.sleep(0.05)
            assert ours
            interrupted_at = time.monotonic()
            os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    code = child.wait(timeout=60)
    assert code == 130, "".join(printed)
    assert time.monotonic() - interrupted_at < 10
    assert _ours(run_id) == []
    assert [p for p in psutil.process_iter() if _group(p) == child.pid] == []
    finished = [c["job"] for c in Store.at(str(results)).read("cells").to_pylist()]
    assert finished == (["replay"] if only == "replay,unit" else [])


def _ours(run_id):
    """Processes that carry the run's mark: servers, tests, their supervisors' children."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if f"FARM_RUN={run_id}".encode() in environment.split(b"\0"):
            found.append(process.pid)
    return found


def _group(process):
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None
