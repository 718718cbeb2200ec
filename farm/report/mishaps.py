"""What went wrong on the way: attempts that were made again, and cards that left.  Lines, from rows.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farm.report.suites import plain

Row = Mapping[str, Any]
_UNREMARKABLE = "ready"  # of a card: every one says so


def attempts(rows: Iterable[Row]) -> tuple[str, ...]:
    """One line for each attempt that another one came after, in the order of cells and attempts."""
    rows = sorted(rows, key=lambda r: (r["cell"], r["attempt"]))
    last = {r["cell"]: r["attempt"] for r in rows}
    again = [r for r in rows if r["attempt"] < last[r["cell"]]]
    return tuple(
        f"{r['cell']}: attempt {r['attempt']} {r['verdict']} {r['reason']} on {_card(r)}: {_first(r['detail'])}" for r in again)


def cards(rows: Iterable[Row]) -> tuple[str, ...]:
    """One line for each card that was left out, put in quarantine, lost or joined, in the order of time."""
    told = sorted((r for r in rows if r["event"] != _UNREMARKABLE), key=lambda r: r["at_utc"])
    return tuple(f"{r['at_utc']:%H:%M:%S} UTC {r['event']}: {_card(r)}{_why(r)}" for r in told)


def card_name(row: Row) -> str:
    """As the lines of a running run call it: two cards of one name must be told apart."""
    words: Sequence[str | None] = (row["card_name"], row["card"] and row["card"][-5:])
    return " ".join(filter(None, words)) or "no card"


def _card(row: Row) -> str:
    return card_name(row) + (f" of {row['host']}" if row["host"] else "")


def _why(row: Row) -> str:
    detail = _first(row["detail"])
    return f": {detail}" if detail else ""


def _first(text: str | None) -> str:
    return next((line.strip() for line in plain(text or "").splitlines() if line.strip()), "")
