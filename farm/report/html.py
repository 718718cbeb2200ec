"""A run as one HTML file that needs nothing else: tables, and bars for every A/B figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from farm.report.contrasts import Contrast
from farm.report.view import view
from farm.stats import number
from farm.store import Store

# Geometry of a chart, in SVG units (CSS pixels at its natural size).
_WIDTH, _VALUE = 560, 90  # the value's text stands right of its bar
_BAR, _GAP, _HEAD, _GROUP = 14, 3, 20, 12  # a group is its length in a line of its own, then its bars


@dataclass(frozen=True)
class Bar:
    """One arm's mean as a bar of `width`; `ticks` are the x of each boot's value."""

    arm: int  # its place, for the colour
    name: str
    y: int
    width: float
    ticks: tuple[float, ...]
    end: float  # where its label begins, right of bar and ticks
    label: str


@dataclass(frozen=True)
class Group:
    """The bars of one prompt length."""

    label: str
    y: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Chart:
    """One metric of one cell, a group of bars for each prompt length."""

    cell: str
    metric: str
    unit: str
    arms: tuple[str, ...]
    groups: tuple[Group, ...]
    evidence: bool
    height: int
    width: int = _WIDTH
    bar: int = _BAR


def html(store: Store, run: str) -> str:
    """A complete document, everything escaped.  Raises UsageError where the store has no such run."""
    shown = view(store, run)
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"number": number, "zip": zip}
    return environment.get_template("report.html.j2").render(run=shown, charts=charts(shown.contrasts))


def charts(contrasts: Sequence[Contrast]) -> list[Chart]:
    """A chart for each cell and metric; bars start at 0 and share one scale."""
    return [_chart(cell, metric, list(found))
            for (cell, metric), found in groupby(contrasts, key=lambda c: (c.cell, c.metric))]


def _chart(cell: str, metric: str, contrasts: Sequence[Contrast]) -> Chart:
    top = max((v for c in contrasts for a in c.arms for v in a.values), default=0.0)
    scale = (_WIDTH - _VALUE) / top if top > 0 else 0.0
    arms = list(dict.fromkeys(a.arm for c in contrasts for a in c.arms))
    groups, y = [], 0
    for contrast in contrasts:
        bars = []
        for place, arm in enumerate(contrast.arms):
            ticks = tuple(_scaled(v, scale) for v in arm.values)
            bars.append(Bar(arms.index(arm.arm), arm.arm, y + _HEAD + place * (_BAR + _GAP), _scaled(arm.mean, scale),
                            ticks, max(ticks) + 8, number(arm.mean)))
        groups.append(Group(contrast.length or "all", y + _HEAD // 2, tuple(bars)))
        y += _HEAD + len(bars) * (_BAR + _GAP) + _GROUP
    return Chart(cell, metric, contrasts[0].unit, tuple(arms), tuple(groups), contrasts[0].evidence, y)


def _scaled(value: float, scale: float) -> float:
    return round(max(0.0, value) * scale, 1)
