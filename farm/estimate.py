"""How long a run will take, by what earlier runs of the same results root took for the same cells.

A cell's seconds are those of its newest attempt that measured, each of its boots taken at the median of them: the first
boot of a tree fills its compile caches and takes minutes, and does so once.  A cell that never ran is taken for its
namesake of another series or pin release, else for the median of the cells with its job and profile.  The run's seconds
are those of the schedule itself: the real scheduler, played through with these cards.  They count from the first cell's
start to the last one's end; attempts that end ERROR and are made again are nobody's to foresee.

Pure, apart from `recalled`, which reads the store.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from farm.records import Verdict
from farm.scheduler import Scheduler
from farm.store import Store
from farm.tiers import NOTHING

Row = Mapping[str, Any]
NAMED = 3  # cells that a sentence lists
LOOKED = 50  # of the newest runs of a root
_COLUMNS = ["cell", "job", "profile", "verdict", "wall_s", "ended_utc", "spans"]
_MEASURED = frozenset({Verdict.PASS.value, Verdict.FAIL.value, Verdict.INVALID.value})


@dataclass(frozen=True)
class Took:
    """What one attempt took, in seconds, its boots at their median."""

    cell: str
    kind: tuple[str | None, str | None]  # job, profile
    seconds: float
    ended: datetime


class Experience:
    """What cells took, from rows of the table `cells`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        by_cell: dict[str, Took] = {}
        for row in rows:
            if row["verdict"] in _MEASURED and row["wall_s"] is not None and row["ended_utc"] is not None:
                took = Took(row["cell"], (row["job"], row["profile"]), warm_s(row), row["ended_utc"])
                by_cell[took.cell] = max(took, by_cell.get(took.cell, took), key=lambda t: t.ended)
        self._by_cell = by_cell
        self._by_words: dict[str, Took] = {}
        self._by_kind: dict[tuple[str | None, str | None], list[float]] = {}
        for took in sorted(by_cell.values(), key=lambda t: (t.ended, t.cell)):
            self._by_words[_words(took.cell)] = took
            self._by_kind.setdefault(took.kind, []).append(took.seconds)

    def seconds(self, cell: str, job: str, profile: str | None) -> float | None:
        """What a cell will take; None: nothing like it has ever run."""
        took = self._by_cell.get(cell) or self._by_words.get(_words(cell))
        if took is not None:
            return took.seconds
        alike = self._by_kind.get((job, profile))
        return None if alike is None else statistics.median(alike)


def recalled(store: Store, cells: Collection[str]) -> Experience:
    """What the newest runs of a results root have to tell, back to where all of these cells have been measured.

    Files that cannot be read tell nothing.
    """
    rows: list[Row] = []
    left = set(cells)
    # An id ends with its time, then a random word.
    for run in sorted(store.runs(), key=lambda run: run.split("-")[-2:], reverse=True)[:LOOKED]:
        found = store.reading("cells", run).table.select(_COLUMNS).to_pylist()
        left -= {row["cell"] for row in found if row["verdict"] in _MEASURED}
        rows += found
        if not left:
            break
    return Experience(rows)


def warm_s(row: Row) -> float:
    """Seconds of an attempt, each of its boots taken at their median."""
    boots = [(s["ended_utc"] - s["started_utc"]).total_seconds() for s in row["spans"] or () if s["kind"] == "boot"]
    return row["wall_s"] - math.fsum(boots) + len(boots) * (statistics.median(boots) if boots else 0.0)


@dataclass(frozen=True)
class Forecast:
    """A schedule played through, in seconds.  `unknown` are cells of which nothing is known: they count as nothing."""

    wall_s: float
    longest_s: float  # of its cells
    together_s: float  # one cell after another
    cells: int
    cards: int
    unknown: tuple[str, ...] = ()
    order: tuple[str, ...] | None = None  # to take cells in; None: the matrix's
    saved_s: float = 0.0  # by that

    @property
    def estimate_s(self) -> float | None:
        """None where it would be no more than a lower bound."""
        return None if self.unknown or not self.cells else self.wall_s

    @property
    def words(self) -> str:
        """A sentence or two."""
        if not self.cells:
            return "no estimate: no card here can run any cell"
        of = f"{_count(self.cells, 'cell')} on {_count(self.cards, 'card')}"
        if len(self.unknown) == self.cells:
            return f"no estimate for {of}: no run in this results root has measured any of them, or their like"
        quick = "" if self.cards == 1 or not self.wall_s else \
            f" ({self.together_s:,.0f} s one after another: {self.together_s / self.wall_s:.2f} times as fast)"
        more = ", …" if len(self.unknown) > NAMED else ""
        bound = f"at least {self.wall_s:,.0f} s" if self.unknown else f"{self.wall_s:,.0f} s"
        said = f"estimate: {bound} for {of}{quick}, by what earlier runs in this results root took"
        if self.cards > 1 and self.wall_s - self.longest_s < 1.0 and self.cells > 1:
            said += "; its longest cell alone takes as long"
        if self.unknown:
            said += f"; nothing is known of {_count(len(self.unknown), 'cell')}: {', '.join(self.unknown[:NAMED])}{more}"
        if self.order is not None:
            said += f"; long cells go first, which saves {self.saved_s:,.0f} s against the matrix's order"
        return said


def forecast(scheduler: Scheduler, seconds: Mapping[str, float]) -> Forecast:
    """Play a schedule through that has not begun, in the matrix's order and longest first.

    Longest first is taken only where it ends sooner by a second or more, so that the matrix's order stands where nothing is
    gained.  Cells of which nothing is known go before all others then: any of them may be the longest.  The scheduler
    itself is left as it is.
    """
    first, ran = _played(scheduler.anew(), seconds)
    cards = len(scheduler.cards)
    unknown = tuple(cell for cell in ran if cell not in seconds)
    known = [seconds[cell] for cell in ran if cell in seconds]
    found = Forecast(first, max(known, default=0.0), math.fsum(known), len(ran), cards, unknown)
    if cards < 2 or len(unknown) == len(ran):
        return found
    order = tuple(sorted(scheduler.waiting, key=lambda cell: -seconds.get(cell, math.inf)))  # equals stay as they were
    other = scheduler.anew()
    other.arrange(order)
    second, _ = _played(other, seconds)
    if first - second < 1.0:
        return found
    return replace(found, wall_s=second, order=order, saved_s=first - second)


def _played(scheduler: Scheduler, seconds: Mapping[str, float]) -> tuple[float, list[str]]:
    """(when the last cell ends, the cells that ran)."""
    now, ran = 0.0, []
    free, idle = list(scheduler.cards), []  # to be asked, and those that had nothing to do when they were
    busy: list[tuple[float, int, str, str]] = []  # until when, in what order it was given, card, cell
    while True:
        for card in free:
            if (given := scheduler.next(card)) is None:
                idle.append(card)
            else:
                heapq.heappush(busy, (now + seconds.get(given.cell, 0.0), len(ran), card, given.cell))
                ran.append(given.cell)
        if not busy:
            return now, ran
        now, _, card, cell = heapq.heappop(busy)
        scheduler.finished(cell, Verdict.PASS)
        free = [card]
        if scheduler.task(cell).claim != NOTHING:  # the end of no other cell is news for a card that is idle
            free, idle = [*idle, card], []


def _words(cell: str) -> str:
    """An id without its digest."""
    return cell.rpartition("-")[0] or cell


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
