"""Whether two runs of one matrix say the same: every cell's verdict, and every peak of the KV pool.

For a run on one card beside the same on several: what is measured must not depend on how many cards there are, or on what
their neighbours do.  Cells are paired by their ids, so both are of the same tree, job, options and seed; of each the final
attempt counts.  Peaks are compared as they stand in the rows, digit for digit: `kv_peak` (the gauge, sampled), and what
was counted exactly, `kv_peak_exact`, `kv_peak_blocks` and replay's `peak_blocks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from farm.errors import UsageError
from farm.stats import change_words
from farm.store import Store
from farm.tables import print_table

Row = Mapping[str, Any]
PEAKS = ("kv_peak", "kv_peak_exact", "kv_peak_blocks", "peak_blocks")
COLUMNS = ("cell", "first verdict", "second verdict", "peaks equal", "same")
_WHERE = ("metric", "arm", "pair", "order", "boot", "probe", "prompt_sha256", "prompt_tokens", "cached_tokens")
Peaks = dict[tuple[Any, ...], float | None]


@dataclass(frozen=True)
class Ran:
    """A run as it is compared: (verdict, reason) of each cell, None where it is not final, and its peaks by where they were
    measured."""

    run: str
    wall_s: float | None
    cards: int  # that cells ran on
    ends: Mapping[str, tuple[str, str] | None]
    peaks: Mapping[str, Peaks]


@dataclass(frozen=True)
class CellPair:
    """A cell in both runs.  `differences` are sentences; empty: both say the same."""

    cell: str
    first: str
    second: str
    peaks: int  # in either run
    equal: int  # of them
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Agreement:
    """Two runs side by side."""

    first: Ran
    second: Ran
    cells: tuple[CellPair, ...]

    @property
    def same(self) -> bool:
        """False also where there is nothing to compare."""
        return bool(self.cells) and not any(pair.differences for pair in self.cells)

    @property
    def summary(self) -> str:
        differ = sum(bool(pair.differences) for pair in self.cells)
        peaks, equal = sum(pair.peaks for pair in self.cells), sum(pair.equal for pair in self.cells)
        if not self.cells:
            return "no cell in either run"
        if differ:
            return f"{differ} of {len(self.cells)} cells differ; {equal} of {peaks} peaks are equal"
        return f"the same: all {len(self.cells)} verdicts, and all {peaks} peaks to the last digit"


def ran(store: Store, run: str) -> Ran:
    """Read a run.  Raises UsageError where a file of it cannot be read: what is missing would look like a difference."""
    tables = {}
    for table in ("runs", "cells", "measurements"):
        reading = store.reading(table, run)
        if reading.problems:
            raise UsageError(f"run {run} cannot be compared: {reading.problems[0]}")
        tables[table] = reading.table.to_pylist()
    head = tables["runs"][0] if tables["runs"] else {}
    return digest(run, head, tables["cells"], tables["measurements"])


def digest(run: str, head: Row, cells: Iterable[Row], measurements: Iterable[Row]) -> Ran:
    """From the rows of a run."""
    final: dict[str, Row] = {}
    ends: dict[str, tuple[str, str] | None] = {}
    for row in cells:
        ends.setdefault(row["cell"], None)
        if row["final"]:
            final[row["cell"]], ends[row["cell"]] = row, (row["verdict"], row["reason"])
    peaks: dict[str, Peaks] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in measurements:
        last = final.get(row["cell"])
        if row["metric"] in PEAKS and last is not None and last["attempt"] == row["attempt"]:
            where = tuple(row[name] for name in _WHERE)
            seen[row["cell"], where] += 1  # replay measures the same under several scenarios, always in one order
            peaks.setdefault(row["cell"], {})[(*where, seen[row["cell"], where])] = row["value"]
    return Ran(run, head.get("wall_s"), len({row["card"] for row in final.values() if row["card"]}), ends, peaks)


def compare(first: Ran, second: Ran) -> Agreement:
    """Cell by cell, in the order of their ids."""
    return Agreement(first, second, tuple(_pair(cell, first, second) for cell in sorted({*first.ends, *second.ends})))


def _pair(cell: str, first: Ran, second: Ran) -> CellPair:
    ends = [_end(ran, cell) for ran in (first, second)]
    one, other = first.peaks.get(cell, {}), second.peaks.get(cell, {})
    where = list(dict.fromkeys([*one, *other]))
    missing = object()
    unequal = [place for place in where if one.get(place, missing) != other.get(place, missing)]
    if absent := [ran.run for ran in (first, second) if cell not in ran.ends]:
        differences = [f"is not in {absent[0]}"]
    else:
        differences = [] if ends[0] == ends[1] else [f"ended {ends[0]} in the first run, {ends[1]} in the second"]
        differences += [_difference(place, one, other) for place in unequal]
    return CellPair(cell, *ends, len(where), len(where) - len(unequal), tuple(differences))


def _end(ran: Ran, cell: str) -> str:
    if cell not in ran.ends:
        return "not there"
    end = ran.ends[cell]
    return "not final" if end is None else " ".join(end)


def _difference(place: tuple[Any, ...], one: Peaks, other: Peaks) -> str:
    where = dict(zip(_WHERE, place, strict=False))
    words = [f"arm {where['arm']}" if where["arm"] else "", f"boot {where['boot']}" if where["boot"] is not None else "",
             "with the probe" if where["probe"] else "",
             f"{where['prompt_tokens']:,} tokens" if where["prompt_tokens"] is not None else "",
             f"{where['cached_tokens']:,} of them cached" if where["cached_tokens"] else ""]
    values = ["nothing" if place not in peaks else "no value" if peaks[place] is None else repr(peaks[place])
              for peaks in (one, other)]
    measured = isinstance(one.get(place), float) and isinstance(other.get(place), float)
    change = f" ({change_words(one[place], other[place])})" if measured else ""
    return f"{where['metric']} of {', '.join(filter(None, words)) or 'the cell'}: {' and '.join(values)}{change}"


def print_agreement(console: Console, agreement: Agreement) -> None:
    """The table, each difference in a line, how long both took, and what it comes to."""
    print_table(console, COLUMNS, [
        (pair.cell, pair.first, pair.second, f"{pair.equal} of {pair.peaks}", "no" if pair.differences else "yes")
        for pair in agreement.cells])
    for line in _lines(agreement):
        console.print(Text(line), soft_wrap=True)


def _lines(agreement: Agreement) -> Iterator[str]:
    for pair in agreement.cells:
        yield from (f"{pair.cell}: {difference}" for difference in pair.differences)
    one, other = agreement.first, agreement.second
    walls = [f", wall {ran.wall_s:,.1f} s" if ran.wall_s else "" for ran in (one, other)]
    took = [f"{ran.run}: {ran.cards} card{'' if ran.cards == 1 else 's'}{wall}"
            for ran, wall in zip((one, other), walls, strict=True)]
    quick = one.wall_s / other.wall_s if one.wall_s and other.wall_s and set(one.ends) == set(other.ends) else None
    yield f"{'; '.join(took)}{'' if quick is None else f'; the second was {quick:.2f} times as fast'}"
    yield agreement.summary
