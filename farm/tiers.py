"""What a cell's servers take of their host's memory for a CPU tier of offloaded blocks.  Pure.

vLLM keeps a tier in /dev/shm, a file for each engine, all of it taken at once when the engine starts; one of its connectors
takes pinned memory instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from farm import cmdline
from farm.plan import Cell

GIB = 2**30
_SIMPLE = "SimpleCPUOffloadConnector"  # its tier is pinned memory, no file in /dev/shm (vllm/v1/simple_kv_offload)
_SIMPLE_BYTES = 8 * GIB  # where nothing says how much (its DEFAULT_CPU_CAPACITY_BYTES)


@dataclass(frozen=True)
class Claim:
    """What a cell takes at any one time: bytes of memory, and how many of them lie in /dev/shm.

    A cell boots one server after another, so it is the largest tier among its arms, not their sum.
    """

    memory_bytes: int = 0
    shm_bytes: int = 0


NOTHING = Claim()


def claim(cell: Cell, *, sandboxed: bool) -> Claim:
    """Of a cell whose job serves; `sandboxed`: its servers have a /dev/shm of their own."""
    profile = cell.profile_config
    if profile is None or not getattr(cell.job, "serves", False):
        return NOTHING
    told = () if profile.launcher is None else _appended(profile.launcher.args_env, profile.launcher.env)
    tiers = [tier((*profile.served_args, *told, *arm.args), {**profile.served_env, **arm.env}) for arm in cell.arms]
    return Claim(max((t.memory_bytes for t in tiers), default=0),
                 0 if sandboxed else max((t.shm_bytes for t in tiers), default=0))


def tier(args: Sequence[str], env: Mapping[str, str]) -> Claim:
    """The CPU tier that a server with these arguments makes.

    `--kv-offloading-size` is in GiB for the whole server; it wins over `cpu_bytes_to_use` of a `--kv-transfer-config`
    (vllm/config/vllm.py, _post_init_kv_transfer_config).  LMCache keeps its tier in a server of its own.  What vLLM
    would not understand makes no tier: it refuses to boot.  Not read: `--kv-transfer-config.KEY=VALUE`.
    """
    transfer = _transfer_config(args)
    connector = transfer.get("kv_connector")
    extra = transfer.get("kv_connector_extra_config")
    wanted = extra.get("cpu_bytes_to_use") if isinstance(extra, dict) else None
    if (size := _number(_last(args, "--kv-offloading-size"))) is not None:
        if _last(args, "--kv-offloading-backend") == "lmcache":
            return NOTHING
        connector = _SIMPLE if env.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("", "0") else "OffloadingConnector"
        wanted = size * GIB
    if connector == _SIMPLE:
        return Claim(int(_number(wanted) or _SIMPLE_BYTES))
    found = int(_number(wanted) or 0) if connector == "OffloadingConnector" else 0
    return Claim(found, found)


def _appended(variable: str | None, env: Mapping[str, str]) -> Sequence[str]:
    return () if variable is None else env.get(variable, "").split()


def _last(args: Sequence[str], flag: str) -> str | None:
    return next(iter(cmdline.values(args, flag) or ()), None)


def _transfer_config(args: Sequence[str]) -> dict[str, object]:
    with suppress(ValueError):
        said = json.loads(_last(args, "--kv-transfer-config") or "{}")
        return said if isinstance(said, dict) else {}
    return {}


def _number(said: object) -> float | None:
    with suppress(TypeError, ValueError):
        found = float(said)  # type: ignore[arg-type]
        return found if 0 <= found < float("inf") else None
    return None
