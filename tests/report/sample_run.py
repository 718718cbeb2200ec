"""Rows as the worker commits them, for a run to be rendered; among them texts that try to be markup."""

from datetime import datetime, timedelta, timezone

from farm.records import BootRow, Measurement, PatchRow, TestRow
from farm.schemas import stamp

RUN = "smoke-20260101T120000-abcd"
BEGAN = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
PATCHES = (
    PatchRow("mamba-align.patch", "aa" * 32, 0, 4, 0, 0, ("v1/core/single_type_kv_cache_manager.py",)),
    PatchRow("offload-mtp.patch", "bb" * 32, 1, 6, 2, 13, ("v1/kv_offload/a.py", "v1/kv_offload/b.py")),
)
ARMS = {"baseline": ("b" * 64, ()), "patched": ("c" * 64, PATCHES)}
EVIL = "<script>alert('x')</script> [red]a|b[/red] `tick` *star*"
CPU = {
    "pin": "0.29.0-cpu", "flavour": "cpu", "vllm": "0.29.0", "torch": "2.13.0", "python": "3.11.7",
    "card": "cpu-box-0", "card_name": "CPU slot 0", "host": "box", "platform": "native", "cpu": "EPYC", "cpu_cores": 2,
    "card_memory_bytes": 24 * 2**30, "project_commit": "f" * 40, "project_dirty": True,
}


def structs(patches):
    return [{"name": p.patch, "sha256": p.sha256, "hunks": p.hunks, "offset_hunks": p.offset_hunks,
             "max_offset": p.max_offset} for p in patches]


class Author:
    """Writes a run's rows as the worker does."""

    def __init__(self, store):
        self.store = store

    def cell(self, cell, job, outcome, records=(), *, attempt=1, final=True, conditions=None, wall_s=20.0, vllm_s=18.0,
             expect=None):
        identity = {"run": RUN, "cell": cell, "attempt": attempt, "job": job, "started_utc": BEGAN,
                    "ended_utc": BEGAN + timedelta(seconds=wall_s)}
        common = CPU | (conditions or {})
        rows = {}
        for record, own in records:
            own = dict(own)
            place = {k: own.pop(k) for k in ("arm", "pair", "order", "boot") if k in own}
            table, row = stamp(record, identity | place, common | own)
            rows.setdefault(table, []).append(row)
        _, row = stamp(outcome, identity, common)
        arms = [{"arm": name, "tree": tree, "patches": structs(patches)} for name, (tree, patches) in ARMS.items()]
        rows["cells"] = [row | {"arms": arms, "wall_s": wall_s, "vllm_s": vllm_s, "final": final,
                                "expect": expect}]
        self.store.commit(RUN, cell, attempt, rows)

    def run(self, **row):
        self.store.commit_run(RUN, {
            "name": "smoke-cpu", "status": "finished", "exit_code": 2, "command": ["farm", "matrix", "smoke-cpu.yaml"],
            "started_utc": BEGAN, "ended_utc": BEGAN + timedelta(seconds=100), "wall_s": 100.0, "vllm_s": 88.0,
            "cells": 7, "project_commit": "f" * 40, "project_dirty": True} | row)


def unit_records():
    def rows(arm, outcomes, number=0):
        return [(TestRow("v1-core", f"tests/v1/core/test_x.py::{name}", outcome, 0.1, message, number), {"arm": arm})
                for name, outcome, message in outcomes]

    same = [("test_ok[1]", "passed", None), ("test_hub", "failed", "OSError: no network\nmore")]
    return [
        *rows("baseline", [*same, ("test_gap", "failed", f"assert 71 == 7 + 1 {EVIL}"), ("test_new", "passed", None),
                           ("test_wobbly", "passed", None), ("test_skip", "skipped", None)]),
        *rows("patched", [*same, ("test_gap", "passed", None), ("test_new", "failed", "assert 1 == 2"),
                          ("test_wobbly", "timeout", None), ("test_skip", "missing", None)]),
        *rows("patched", [("test_new", "failed", "assert 1 == 2"), ("test_wobbly", "passed", None)], 1),
        *[(patch, {"arm": "patched"}) for patch in PATCHES],
    ]


def prefill_records(pools=(4096, 4096), peaks=((0.7705, 0.5342), (0.7704, 0.5342))):
    records = []
    for pair, both in enumerate(peaks):
        for arm, peak, pool in zip(ARMS, both, pools, strict=True):
            where = {"arm": arm, "boot": pair, "pair": pair, "order": 2 * pair + (arm == "patched"),
                     "pool_tokens": pool, "pool_pinned": True, "block_size": 416, "backend": "CPU_ATTN",
                     "argv": ["vllm", "serve", "--uds", f"/tmp/{arm}{pair}.sock", "--max-model-len", "8192"],
                     "caches": "warm"}
            asked = where | {"prompt_tokens": 2048, "prompt_sha256": "12" * 32, "cached_tokens": 0}
            peak_row = Measurement("kv_peak", peak, "ratio", 40, 0.05, f"{pair} scrapes missed")
            ttft_row = Measurement("ttft", 2.5 + pair / 100, "s", 1)
            records += [(BootRow(ok=True), where), (peak_row, asked), (ttft_row, asked)]
    return records


def replay_records():
    values = {20000: {"baseline": 16, "patched": 6}, 2000: {"baseline": 5, "patched": 5}}
    return [(Measurement("retained_states_before", float(value), "count", note=f"k=3 budget=2048 lag={lag}"),
             {"arm": arm, "prompt_tokens": tokens, "block_size": 832})
            for tokens, by_arm in values.items() for arm, value in by_arm.items() for lag in (0, 1)]
