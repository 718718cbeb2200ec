"""How well a run's cards were used: what was foreseen and what came of it, and card by card where the time went.  Pure.

The window is the time from the first cell's start (its wait for its card included) to the last cell's end; a card's share
is of that window.  A run of one card without an estimate has nothing to tell here, and one that was resumed has no window.
Nobody knows how long an attempt lasted whose actor died: it counts as idle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from farm.cardlog import CardEvent
from farm.estimate import warm_s
from farm.evidence import covered_s
from farm.report.mishaps import card_name
from farm.report.times import SERVED

Row = Mapping[str, Any]
FINISHED = "finished"  # status of a run's row
SHOWN = 16  # cards that have a line of their own
_SHARES = ("busy_s", "served_s", "other_s")
_REST = (("preparing (environments, trees, probes)", "preparing_s"), ("else in cells", "between_s"),
         ("waiting for locks", "waiting_s"), ("idle before and between cells", "idle_s"), ("idle at the end", "idle_end_s"))
_THERE = (CardEvent.READY.value, CardEvent.JOINED.value)


@dataclass(frozen=True)
class CardTime:
    """Seconds of one card within the window; together they are the window."""

    name: str
    attempts: int
    served_s: float  # a server booting, serving or ending
    other_s: float  # tests and scripts
    preparing_s: float  # of its attempts, before the first of these: environment, trees, probe
    between_s: float  # of its attempts, the rest
    waiting_s: float  # for its lock
    idle_end_s: float
    idle_s: float  # before and between its attempts

    @property
    def busy_s(self) -> float:
        """With a cell."""
        return self.served_s + self.other_s + self.preparing_s + self.between_s


@dataclass(frozen=True)
class Schedule:
    """In seconds.  `outside_s`: of the run's wall, before the first cell and after the last; None: not recorded."""

    window_s: float
    estimate_s: float | None
    whole: bool  # it has ended, with all its cells
    together_s: float  # of its cells as they are shown: what one card would take, one after another
    cells: int
    cold_s: float  # that the boots of its cells took beyond their cells' medians, while caches were filled
    outside_s: float | None
    cards: tuple[CardTime, ...]

    columns: ClassVar[tuple[str, ...]] = ("card", "attempts", "busy", "with a server", "tests, scripts", "waited, s",
                                          "idle at end, s")

    @property
    def lines(self) -> tuple[str, ...]:
        """What was foreseen, what came of it, and what the time went to that was not vLLM's."""
        return tuple(self._lines())

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """By card; of many cards the first, and one row for the others together."""
        rows = [self._row(card.name, [card]) for card in self.cards[:SHOWN]]
        more = self.cards[SHOWN:]
        return [*rows, self._row(f"{len(more)} more, each", more)] if more else rows

    def _row(self, name: str, cards: Sequence[CardTime]) -> tuple[str, ...]:
        def mean(field: str) -> float:
            return math.fsum(getattr(card, field) for card in cards) / len(cards)

        def share(field: str) -> str:
            return f"{100 * mean(field) / self.window_s:.1f} %" if self.window_s else ""

        return name, f"{mean('attempts'):.3g}", *map(share, _SHARES), f"{mean('waiting_s'):.1f}", f"{mean('idle_end_s'):.1f}"

    def _lines(self) -> Iterator[str]:
        took = f"took {self.window_s:,.1f} s from the first cell's start to the last one's end"
        if self.estimate_s and not self.whole:
            yield f"estimated {self.estimate_s:,.1f} s for all of it, which has not ended: {took} so far"
        elif self.estimate_s:
            off = 100 * (self.window_s / self.estimate_s - 1)
            yield f"estimated {self.estimate_s:,.1f} s, {took} ({abs(off):.1f} % {'longer' if off >= 0 else 'shorter'})"
        else:
            yield (f"{took}; without an estimate: no earlier run in this results root had measured all its cells, or their "
                   "like")
        of = len(self.cards)
        if of > 1 and self.window_s:
            times = self.together_s / self.window_s
            yield (f"{self.cells} cell{'' if self.cells == 1 else 's'} on {of} cards: {self.together_s:,.1f} s one after "
                   f"another, so {times:.2f} times as fast as one card ({100 * times / of:.0f} % of {of} times)")
        if self.cold_s >= 1.0:
            yield f"boots took {self.cold_s:,.1f} s more than at the median of their cells, most likely to fill caches"
        rest = [f"{name} {math.fsum(getattr(card, field) for card in self.cards):,.1f} s" for name, field in _REST]
        yield (f"of {of * self.window_s:,.1f} card-seconds, those in which nothing booted, served or was tested: "
               f"{', '.join(rest)}")
        if self.outside_s is not None:
            yield f"before the first cell and after the last (preflight, Ray, results): {self.outside_s:.1f} s"


def schedule(head: Row, shown: Iterable[Row], attempts: Sequence[Row], cards: Sequence[Row]) -> Schedule | None:
    """Of a run's own row, its cells as they are shown, the rows of all attempts, and those of the table `cards`.

    None where there is nothing to tell: see the module.
    """
    ready = Counter(row["card"] for row in cards if row["event"] == CardEvent.READY.value)
    there = {row["card"]: card_name(row) for row in cards if row["event"] in _THERE and row["card"]}
    there |= {row["card"]: card_name(row) for row in attempts if row["card"] and row["card"] not in there}
    ran = [row for row in attempts if row["card"] and row["started_utc"] and row["ended_utc"]]
    estimate_s = head.get("estimate_s")
    if not ran or max(ready.values(), default=0) > 1 or (len(there) < 2 and estimate_s is None):
        return None
    begin = min(row["started_utc"] - timedelta(seconds=row["waited_s"] or 0.0) for row in ran)
    window_s = (max(row["ended_utc"] for row in ran) - begin).total_seconds()
    wall_s = head.get("wall_s")
    if wall_s is not None and window_s > wall_s + 1.0:  # of a run that was resumed before its cards were recorded
        return None
    final = [row for row in shown if row["card"]]
    return Schedule(
        window_s, estimate_s, head.get("status") == FINISHED, math.fsum(row["wall_s"] or 0.0 for row in final), len(final),
        math.fsum(row["wall_s"] - warm_s(row) for row in final if row["wall_s"] is not None),
        None if wall_s is None else max(0.0, wall_s - window_s),
        tuple(_of_card(name, [row for row in ran if row["card"] == card], begin + timedelta(seconds=window_s), window_s)
              for card, name in sorted(there.items(), key=lambda pair: pair[1])))


def _of_card(name: str, rows: Sequence[Row], end: Any, window_s: float) -> CardTime:
    busy_s = covered_s([(row["started_utc"], row["ended_utc"]) for row in rows])
    spans = [span for row in rows for span in row["spans"] or ()]
    served_s = covered_s([(s["started_utc"], s["ended_utc"]) for s in spans if s["kind"] in SERVED])
    other_s = covered_s([(s["started_utc"], s["ended_utc"]) for s in spans]) - served_s
    preparing_s = math.fsum(
        (min(s["started_utc"] for s in row["spans"]) - row["started_utc"]).total_seconds() for row in rows if row["spans"])
    waiting_s = math.fsum(row["waited_s"] or 0.0 for row in rows)
    idle_end_s = (end - max(row["ended_utc"] for row in rows)).total_seconds() if rows else window_s
    return CardTime(name, len(rows), served_s, other_s, preparing_s, max(0.0, busy_s - served_s - other_s - preparing_s),
                    waiting_s, idle_end_s, max(0.0, window_s - busy_s - waiting_s - idle_end_s))
