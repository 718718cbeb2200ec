"""The conditions that a cell's verdict holds under (DOMAIN.md 5), in words.  Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from farm.report import expected
from farm.report.contrasts import same_tree_twice
from farm.stats import number

Row = Mapping[str, Any]
_PER_BOOT_FLAGS = ("--uds", "--port")  # name the boot, not what is served


def conditions(cell: Row, rows: Mapping[str, Sequence[Row]]) -> Iterable[tuple[str, str]]:
    """What the verdict holds under, in words; what nobody recorded is left out."""
    versions = [f"{n} {cell[n]}" for n in ("vllm", "torch", "triton", "transformers", "python") if cell[n]]
    yield from _told("pin", cell["pin"], ", ".join(versions))
    memory = f"{cell['card_memory_bytes'] / 2**30:.1f} GiB" if cell["card_memory_bytes"] else None
    capability = f"compute capability {cell['compute_capability']}" if cell["compute_capability"] else None
    yield from _told("card", cell["card_name"], ", ".join(filter(None, (cell["card"], capability, memory))))
    yield from _told("driver", cell["driver"])
    for label, column in (("model hash", "model_sha256"), ("drafter hash", "drafter_sha256"),
                          ("start script hash", "launcher_sha256")):
        yield from _told(label, cell[column] and cell[column][:12])
    if cell["power_limit_before_w"] is not None:
        after = cell["power_limit_after_w"]
        changed = "" if after in (None, cell["power_limit_before_w"]) else f", {number(after)} W afterwards"
        yield "power limit", f"{number(cell['power_limit_before_w'])} W{changed}"
    yield from _told("host", cell["host"], ", ".join(filter(None, (cell["platform"], cell["cpu"]))))
    for arm in cell["arms"] or ():
        names = ", ".join(p["name"] for p in arm["patches"] or ()) or "no patches"
        yield f"arm {arm['arm']}", f"tree {(arm['tree'] or 'not built')[:16]}: {names}"
    if same_tree_twice(cell):
        yield "A/A", "one tree on both arms: what differs is noise, no effect"
    served = rows["boots"] or [r for r in rows["measurements"] if r["boot"] is not None]
    for label, probe in (("boots", False), ("boots with the probe", True)):
        yield from _by_arm(label, [r for r in served if bool(r["probe"]) is probe], lambda rs: len({r["boot"] for r in rs}))
    yield from _by_arm("pool", served, lambda rs: _distinct(_pool(r) for r in rs))
    yield from _by_arm("argv hash", served, lambda rs: _distinct(_argv_hash(r["argv"]) for r in rs))
    for label, column in (("block size", "block_size"), ("backend", "backend"), ("KV layout", "kv_layout"),
                          ("connector", "connector"), ("compile caches", "caches"), ("unknown knobs", "unknown_knobs")):
        yield from _by_arm(label, served, lambda rs, column=column: _distinct(_plain(r[column]) for r in rs))
    prompts = {(r["prompt_tokens"], r["prompt_sha256"]) for r in rows["measurements"]
               if r["prompt_sha256"] and r["prompt_tokens"] is not None}
    if prompts:
        yield "prompts", "; ".join(f"{n:,} tokens ({sha[:12]})" for n, sha in sorted(prompts))
    yield from _told("expected", expected.words(cell["expect"]))
    yield from _told("logs", _distinct(_logs(r) for r in rows["boots"]))


def _told(label: str, value: str | None, more: str = "") -> Iterable[tuple[str, str]]:
    if value or more:
        yield label, f"{value} ({more})" if value and more else value or more


def _by_arm(label: str, rows: Sequence[Row], say: Callable[[Sequence[Row]], object]) -> Iterable[tuple[str, str]]:
    arms = list(dict.fromkeys(r["arm"] for r in rows))
    said = {arm: str(say([r for r in rows if r["arm"] == arm])) for arm in arms}
    told = set(said.values())
    if told - {""}:
        yield label, f"{told.pop()}{' on each arm' if len(arms) > 1 else ''}" if len(told) == 1 else "; ".join(
            f"{arm} {text or 'not said'}" for arm, text in said.items())


def _distinct(values: Iterable[str | None]) -> str:
    return " or ".join(dict.fromkeys(v for v in values if v))


def _plain(value: Any) -> str | None:
    return ", ".join(value) if isinstance(value, list) else None if value is None else str(value)


def _pool(row: Row) -> str | None:
    if row["pool_tokens"] is None:
        return None
    how = {True: ", pinned", False: ", profiled", None: ""}[row["pool_pinned"]]
    return f"{row['pool_tokens']:,} tokens{how}"


def _logs(boot: Row) -> str | None:
    """The folder of a boot's logs, read off its environment: logs lie beside the caches of the trees."""
    for _, value in boot["env"] or ():
        root, found, _ = value.partition(f"/caches/{boot['tree']}/")
        if found:
            return f"{root}/logs/{boot['run']}/{boot['cell']}-{boot['attempt']}"
    return None


def _argv_hash(argv: Sequence[str] | None) -> str | None:
    """First 12 digits of the hash of the arguments, without those that name the boot."""
    if not argv:
        return None
    kept = [word for before, word in zip(["", *argv], argv, strict=False)
            if before not in _PER_BOOT_FLAGS and word.split("=")[0] not in _PER_BOOT_FLAGS]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:12]
