"""Where a run's time went: vLLM's share and ours, and how much of it the cards had a server.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from farm.evidence import covered_s

Row = Mapping[str, Any]
WALL = "wall"
SERVED = ("boot", "requests", "teardown")  # kinds of spans in which a server has its card


@dataclass(frozen=True)
class Times:
    """Seconds of the run and, of those, with vLLM at work (boots, requests, tests).

    Where cells ran side by side, or a run was resumed, vLLM's seconds exceed
    the run's: `of` then says that both are sums over the cells.
    """

    total_s: float
    vllm_s: float
    of: str
    served_s: float = 0.0  # with a server booting, serving or ending, on the cards together
    cards: int = 0  # that had one

    @property
    def words(self) -> str:
        """Vllm's share and ours, and how much of the wall the cards were busy with servers."""
        if not self.served_s or not self.total_s or self.of != WALL:
            return self._shares
        share = 100 * self.served_s / (self.total_s * self.cards)
        where = "" if self.cards == 1 else f" of {self.cards} cards"
        return f"{self._shares}; servers booting or serving {self.served_s:.1f} s{where} ({share:.1f} %)"

    @property
    def _shares(self) -> str:
        if not self.total_s:
            return "no time was recorded"
        if not self.vllm_s:
            return f"{self.of} {self.total_s:.1f} s, none with vLLM at work yet"
        ours = max(0.0, self.total_s - self.vllm_s)
        return (f"{self.of} {self.total_s:.1f} s: vLLM {self.vllm_s:.1f} s, ours {ours:.1f} s "
                f"({100 * ours / self.total_s:.1f} %)")


def times(head: Row, cells: Iterable[Row], attempts: Iterable[Row]) -> Times:
    """Of a run's own row, its cells as they are shown, and the rows of all attempts.

    The row of a run that goes on, or was killed, does not say how long it took: at least as long as what is committed.
    """
    tried = list(attempts)
    ran = covered_s([(r["started_utc"], r["ended_utc"]) for r in tried if r["started_utc"] and r["ended_utc"]])
    worked = covered_s([(s["started_utc"], s["ended_utc"]) for r in tried for s in r["spans"] or ()])
    wall, vllm = max(head.get("wall_s") or 0.0, ran), max(head.get("vllm_s") or 0.0, worked)
    if head.get("wall_s") and vllm <= wall:
        return Times(wall, vllm, WALL, *_served(tried))
    rows = list(cells)
    return Times(math.fsum(r["wall_s"] or 0.0 for r in rows), math.fsum(r["vllm_s"] or 0.0 for r in rows),
                 "all cells together")


def _served(attempts: Iterable[Row]) -> tuple[float, int]:
    """Seconds that the cards were busy with servers, and how many cards were."""
    by_card: dict[str, list[tuple[datetime, datetime]]] = {}
    for row in attempts:
        for span in row["spans"] or ():
            if span["kind"] in SERVED:
                by_card.setdefault(row["card"] or "", []).append((span["started_utc"], span["ended_utc"]))
    return math.fsum(covered_s(spans) for spans in by_card.values()), len(by_card)
