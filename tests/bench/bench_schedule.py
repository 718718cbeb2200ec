#!/usr/bin/env python3
"""What an order of cells is worth: recorded cell times, played through the scheduler on 1, 2, 4 and 8 cards.

    python tests/bench/bench_schedule.py [RESULTS_ROOT [RUN]]        default: tests/data/runs/h200-gpu-tiny

Times as they were, and warm: each boot at the median of its cell's boots.  Said of gpu-tiny on an H200 (6 cells, the longest
535 s as it was, 239 s warm), in seconds, with the speed-up against one card for the order that the farm takes:

    cells     cards  matrix's order  shortest first  longest first  taken  speed-up
    recorded      1           1,136           1,136          1,136  1,136      1.00
    recorded      2             571             763            571    571      1.99
    recorded      4             535             595            535    535      2.12
    recorded      8             535             535            535    535      2.12
    warm          1             838             838            838    838      1.00
    warm          2             441             465            431    431      1.94
    warm          4             239             299            239    239      3.51
    warm          8             239             239            239    239      3.51

So a matrix is as fast as its longest cell from some number of cards on, whatever the order; which order it is written in
costs up to a third (763 against 571), and longest first, never worse here, takes that risk away.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(PROJECT))

from farm.bench import Card, Needs  # noqa: E402
from farm.estimate import forecast, warm_s  # noqa: E402
from farm.scheduler import Scheduler, Task  # noqa: E402
from farm.store import Store  # noqa: E402

ROOT = PROJECT / "tests" / "data" / "runs" / "h200-gpu-tiny"
CARDS = (1, 2, 4, 8)
COLUMNS = ("cells", "cards", "matrix's order", "shortest first", "longest first", "taken", "speed-up")


def scheduler(order: Sequence[str], cards: int) -> Scheduler:
    made = Scheduler([Task(cell, Needs()) for cell in order], 1)
    for number in range(cards):
        made.add_card(Card(f"card-{number}", "card", "cuda", "host"))
    return made


def rows(name: str, order: Sequence[str], seconds: Mapping[str, float]) -> list[tuple[str, ...]]:
    """A line for each number of cards."""
    shortest = sorted(order, key=lambda cell: seconds[cell])
    found = []
    for cards in CARDS:
        taken = forecast(scheduler(order, cards), seconds)
        played = [one.wall_s + one.saved_s for one in (  # in the order that is given, whatever would be taken
            taken, forecast(scheduler(shortest, cards), seconds), forecast(scheduler(shortest[::-1], cards), seconds))]
        found.append((name, str(cards), *(f"{wall_s:,.0f}" for wall_s in (*played, taken.wall_s)),
                      f"{taken.together_s / taken.wall_s:.2f}"))
    return found


def main(root: str = str(ROOT), run: str | None = None) -> None:
    store = Store.at(root)
    cells = [row for row in store.read("cells", run or store.runs()[-1]).to_pylist() if row["final"] and row["wall_s"]]
    cells.sort(key=lambda row: row["started_utc"])  # of a run on one card: the matrix's order
    order = [row["cell"] for row in cells]
    table = [COLUMNS, *rows("recorded", order, {row["cell"]: row["wall_s"] for row in cells}),
             *rows("warm", order, {row["cell"]: warm_s(row) for row in cells})]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    for row in table:
        print("  ".join(value.rjust(width) if i else value.ljust(width)
                        for i, (value, width) in enumerate(zip(row, widths, strict=True))))


if __name__ == "__main__":
    main(*sys.argv[1:])
