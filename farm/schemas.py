"""The Arrow schemas of the tables, and how a record becomes a row of one.

`stamp` joins a record with the conditions that make it evidence (DOMAIN.md 5).
Every column is nullable except the identity; a condition that a card cannot
have (a power limit on a CPU slot) is null, never a made-up value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import pyarrow as pa

from farm.records import BootRow, Measurement, Outcome, PatchRow, Record, Sample, TestRow

SCHEMA_VERSION = 2

_TS = pa.timestamp("us", tz="UTC")
_PATCH = pa.struct(
    [("name", pa.string()), ("sha256", pa.string()), ("hunks", pa.int32()), ("offset_hunks", pa.int32()),
     ("max_offset", pa.int32())]
)

IDENTITY: list[pa.Field] = [
    pa.field("schema_version", pa.int32(), nullable=False),
    pa.field("run", pa.string(), nullable=False),
    pa.field("cell", pa.string(), nullable=False),
    pa.field("attempt", pa.int32(), nullable=False),
    pa.field("job", pa.string()),
    pa.field("arm", pa.string()),
    pa.field("pair", pa.int32()),
    pa.field("order", pa.int32()),
    pa.field("boot", pa.int32()),
    pa.field("started_utc", _TS),
    pa.field("ended_utc", _TS),
]

TREE: list[pa.Field] = [
    pa.field("pin", pa.string()),
    pa.field("flavour", pa.string()),
    pa.field("tree", pa.string()),
    pa.field("series", pa.string()),  # directory that the patches were read from
    pa.field("series_sha256", pa.string()),
    pa.field("patches", pa.list_(_PATCH)),
    pa.field("project_commit", pa.string()),
    pa.field("project_dirty", pa.bool_()),
    pa.field("vllm", pa.string()),
    pa.field("torch", pa.string()),
    pa.field("triton", pa.string()),
    pa.field("transformers", pa.string()),
    pa.field("python", pa.string()),
]

CARD: list[pa.Field] = [
    pa.field("card", pa.string()),  # UUID
    pa.field("card_name", pa.string()),
    pa.field("compute_capability", pa.string()),
    pa.field("card_memory_bytes", pa.int64()),
    pa.field("driver", pa.string()),
    pa.field("power_limit_before_w", pa.float64()),
    pa.field("power_limit_after_w", pa.float64()),
    pa.field("clock_sm_mhz", pa.int32()),
    pa.field("clock_memory_mhz", pa.int32()),
    pa.field("temperature_c", pa.int32()),
    pa.field("throttle_reasons", pa.list_(pa.string())),
    pa.field("other_clients", pa.int32()),
    pa.field("host", pa.string()),
    pa.field("platform", pa.string()),  # native, WSL2
    pa.field("cpu", pa.string()),
    pa.field("cpu_cores", pa.int32()),
]

SERVING: list[pa.Field] = [
    pa.field("profile", pa.string()),
    pa.field("argv", pa.list_(pa.string())),
    pa.field("env", pa.map_(pa.string(), pa.string())),
    pa.field("model_sha256", pa.string()),
    pa.field("drafter_sha256", pa.string()),
    pa.field("launcher_sha256", pa.string()),  # of the start script's own bytes
]

BOOT: list[pa.Field] = [
    pa.field("pool_tokens", pa.int64()),
    pa.field("pool_pinned", pa.bool_()),
    pa.field("block_size", pa.int32()),
    pa.field("mamba_padding_percent", pa.float64()),
    pa.field("backend", pa.string()),
    pa.field("kv_layout", pa.string()),
    pa.field("connector", pa.string()),
    pa.field("boot_s", pa.float64()),
    pa.field("caches", pa.string()),  # warm; cold; seeded with the unpatched tree's kernels
    pa.field("probe", pa.bool_()),  # whether the engine was watched from inside (farm/probe)
    pa.field("cards_seen", pa.list_(pa.string())),  # UUIDs that the engine sees from inside
    pa.field("card_processes", pa.int32()),  # of the server's, those that NVML lists on its card
    pa.field("jit_lines", pa.int32()),
    pa.field("unknown_knobs", pa.list_(pa.string())),
]

WORKLOAD: list[pa.Field] = [
    pa.field("prompt_sha256", pa.string()),
    pa.field("prompt_tokens", pa.int64()),
    pa.field("cached_tokens", pa.int64()),
    pa.field("completion_tokens", pa.int64()),
    pa.field("seed", pa.int64()),
    pa.field("temperature", pa.float64()),
]

CONDITIONS: list[pa.Field] = TREE + CARD + SERVING + BOOT + WORKLOAD

_ARM = pa.struct([("arm", pa.string()), ("tree", pa.string()), ("patches", pa.list_(_PATCH)),
                  ("env", pa.map_(pa.string(), pa.string())), ("args", pa.list_(pa.string()))])
_SPAN = pa.struct([("kind", pa.string()), ("arm", pa.string()), ("started_utc", _TS), ("ended_utc", _TS)])

_OWN: dict[str, list[pa.Field]] = {
    "runs": [
        pa.field("name", pa.string()), pa.field("status", pa.string()), pa.field("exit_code", pa.int32()),
        pa.field("command", pa.list_(pa.string())), pa.field("config", pa.string()),
        pa.field("wall_s", pa.float64()), pa.field("vllm_s", pa.float64()), pa.field("cells", pa.int32()),
        pa.field("campaign", pa.string()),  # valid, or why its verdicts are no evidence; null: no controls were asked for
        pa.field("process", pa.string()),  # that writes this run, see farm.drivers
        pa.field("estimate_s", pa.float64()),  # from the first cell's start to the last one's end, see farm.estimate
        pa.field("plan", pa.string()),  # JSON: what was promised, cell by cell, see farm.promised
    ],
    "cells": [
        pa.field("verdict", pa.string()), pa.field("reason", pa.string()), pa.field("detail", pa.string()),
        pa.field("unproven", pa.list_(pa.string())), pa.field("arms", pa.list_(_ARM)),
        pa.field("options", pa.string()), pa.field("expect", pa.string()),
        pa.field("wall_s", pa.float64()), pa.field("vllm_s", pa.float64()), pa.field("spans", pa.list_(_SPAN)),
        pa.field("waited_s", pa.float64()),  # for its card's lock, before it started
        pa.field("final", pa.bool_()), pa.field("control", pa.string()),  # the reason that a control must end with
    ],
    "boots": [pa.field("ok", pa.bool_()), pa.field("log_tail", pa.string()), pa.field("gaps", pa.list_(pa.string())),
              pa.field("teardown_s", pa.float64())],
    "measurements": [
        pa.field("metric", pa.string()), pa.field("value", pa.float64()), pa.field("unit", pa.string()),
        pa.field("n", pa.int64()), pa.field("interval_s", pa.float64()), pa.field("note", pa.string()),
    ],
    "samples": [pa.field("metric", pa.string()), pa.field("t_s", pa.float64()), pa.field("value", pa.float64())],
    "tests": [
        pa.field("suite", pa.string()), pa.field("nodeid", pa.string()), pa.field("outcome", pa.string()),
        pa.field("duration_s", pa.float64()), pa.field("message", pa.string()), pa.field("round", pa.int32()),
    ],
    "patches": [
        pa.field("patch", pa.string()), pa.field("sha256", pa.string()), pa.field("position", pa.int32()),
        pa.field("hunks", pa.int32()), pa.field("offset_hunks", pa.int32()), pa.field("max_offset", pa.int32()),
        pa.field("files", pa.list_(pa.string())), pa.field("status", pa.string()), pa.field("detail", pa.string()),
    ],
    "cards": [  # what became of a card while the run went on; rows of the run, of no cell
        pa.field("at_utc", _TS), pa.field("event", pa.string()),  # ready, joined, left-out, quarantined, lost
        pa.field("reason", pa.string()), pa.field("detail", pa.string()), pa.field("until_utc", _TS),
    ],
}

SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema(IDENTITY + CONDITIONS + own, metadata={"farm_schema_version": str(SCHEMA_VERSION)})
    for table, own in _OWN.items()
}
TABLES = tuple(SCHEMAS)
RUN_TABLES = ("runs", "cards")  # of a run as a whole: one file each, written anew; the others have one for each attempt

_TABLE_OF: dict[type, str] = {
    BootRow: "boots", Measurement: "measurements", Sample: "samples", TestRow: "tests", PatchRow: "patches",
    Outcome: "cells",
}


def stamp(record: Record, identity: Mapping[str, Any], conditions: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Join a record with its identity and conditions: (table name, one row of that table's schema).

    Raises KeyError for a key that the table has no column for: a misspelt
    condition would otherwise be evidence silently lost.
    """
    table = _TABLE_OF[type(record)]
    row: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **conditions, **identity}
    for name, value in dataclasses.asdict(record).items():
        row[name] = value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value
    known = SCHEMAS[table].names
    if unknown := sorted(set(row) - set(known)):
        raise KeyError(f"table {table} has no column {', '.join(unknown)} (farm/schemas.py)")
    return table, row
