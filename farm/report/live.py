"""A run while it lasts: one line a card on a terminal, plain timestamped lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from farm.records import Outcome
from farm.report.terminal import STYLES

NO_CARD = "no card"  # a cell that ended without one


@dataclass
class _Desk:
    cell: str
    since: float
    text: str


class Progress:
    """What the run tells its watcher.  `card` is what a line calls a card, so it must tell two cards apart.

    `clock` (seconds) and `now` (wall clock) are parameters for the tests.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic,
                 now: Callable[[], datetime] = datetime.now) -> None:
        self._console, self._clock, self._now = console, clock, now
        self._lock = threading.Lock()  # the live table is drawn by a thread of rich
        self._desks: dict[str, _Desk] = {}
        self._verdicts: Counter[str] = Counter()
        self._total = 0
        self._live = Live(get_renderable=self._screen, console=console, refresh_per_second=4, transient=True) \
            if console.is_terminal else None

    def start(self, cells: Sequence[str]) -> None:
        """The cells that will run."""
        self._total = len(cells)
        if self._live is None:
            self._line("all cards", f"{self._total} cells to run")
        else:
            self._live.start()

    def event(self, card: str, cell: str, text: str) -> None:
        """Something happens on a card; `cell` is "-" where it is no cell's."""
        with self._lock:
            desk = self._desks.get(card)
            since = desk.since if desk is not None and desk.cell == cell else self._clock()
            self._desks[card] = _Desk(cell, since, text)
        if self._live is None or cell == "-":  # what is no cell's comes seldom: on a terminal the next event would hide it
            self._line(card, f"{cell}: {text}")

    def finished(self, cell: str, outcome: Outcome) -> None:
        """A cell has its verdict."""
        with self._lock:
            card = next((c for c, desk in self._desks.items() if desk.cell == cell), NO_CARD)
            self._verdicts[outcome.verdict.value] += 1
            if card in self._desks:
                self._desks[card] = _Desk("-", self._clock(), "waiting")
        said = f"{outcome.verdict.value} {outcome.reason.value}: {next(iter(outcome.detail.splitlines()), '')}"
        self._line(card, f"{cell}: {said} ({self._done})", STYLES.get(outcome.verdict.value, ""))

    def close(self) -> None:
        """End the display; may be called twice, and without a start."""
        if self._live is not None:
            self._live.stop()

    @property
    def _done(self) -> str:
        return f"{sum(self._verdicts.values())} of {self._total}"

    def _line(self, card: str, text: str, style: str = "") -> None:
        self._console.print(Text(f"{self._now():%H:%M:%S} [{card}] {text}", style),
                            soft_wrap=not self._console.is_terminal)  # a terminal wraps at words, a log does not
        self._console.file.flush()  # a log that is a pipe would otherwise come in blocks

    def _screen(self) -> Group:
        with self._lock:
            desks, verdicts = dict(self._desks), dict(self._verdicts)
        table = Table(box=None, pad_edge=False, show_header=False, expand=True)
        for ratio in (2, 3, None, 5):
            table.add_column(no_wrap=True, overflow="ellipsis", ratio=ratio, min_width=7 if ratio is None else None)
        for card, desk in sorted(desks.items()):
            took = "" if desk.cell == "-" else _clock_words(self._clock() - desk.since)
            table.add_row(Text(card, "bold"), Text(desk.cell), Text(took), Text(desk.text, "dim"))
        counts = [Text(f"{n} {v}", STYLES.get(v, "")) for v, n in verdicts.items()]
        return Group(table, Text("  ").join([Text(f"{self._done} cells"), *counts]))


def _clock_words(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
