"""A run over several pins as one table: pin × job, with the geometry that its servers told beside it.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from farm.records import Verdict

if TYPE_CHECKING:
    from farm.report.view import CellView

Row = Mapping[str, Any]
NOTHING = "-"


@dataclass(frozen=True)
class PinTable:
    """`columns` are jobs (or cells' names), controls among them; each row is (pin, an end for each column, geometry)."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...], str], ...]


def digest(cells: Sequence[CellView], boots: Iterable[Row]) -> PinTable | None:
    """The table of a run's cells; None where it has one pin alone."""
    pins = sorted({c.pin for c in cells if c.pin}, key=_order)
    if len(pins) < 2:
        return None
    columns = tuple(dict.fromkeys(c.column for c in sorted(cells, key=lambda c: (c.job != "triage", c.column))))
    told = list(boots)
    return PinTable(columns, tuple(
        (pin, tuple(_ends(c for c in cells if c.pin == pin and c.column == column) for column in columns),
         _geometry(b for b in told if b["pin"] == pin and b["ok"])) for pin in pins))


def _order(pin: str) -> tuple[Version, str]:
    try:
        return Version(pin.partition("-")[0]), pin
    except InvalidVersion:
        return Version("0"), pin


def _ends(cells: Iterable[CellView]) -> str:
    told = [c.verdict if c.verdict == Verdict.PASS.value and c.reason == "as-expected" else f"{c.verdict} {c.reason}"
            for c in cells]
    return ", ".join(told) or NOTHING


def _geometry(boots: Iterable[Row]) -> str:
    """Pool, block and padding that the boots told, distinct ones joined: the same on every boot reads as one."""
    rows = list(boots)
    pools = _distinct(f"pool {r['pool_tokens']:,} tokens" for r in rows if r["pool_tokens"] is not None)
    blocks = _distinct(f"block {r['block_size']}" for r in rows if r["block_size"] is not None)
    paddings = _distinct(f"padding {r['mamba_padding_percent']:g} %" for r in rows if r["mamba_padding_percent"] is not None)
    return ", ".join(filter(None, (pools, blocks, paddings))) or NOTHING


def _distinct(words: Iterable[str]) -> str:
    return " or ".join(sorted(set(words)))
