"""All that can be known wrong before a card is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from farm import campaign, config, plan
from farm.bench import Card
from farm.errors import FarmError, SeriesError
from farm.isolation import Sandbox
from farm.pins import Pin, PinStore
from farm.places import usable_cache
from farm.records import Outcome, Reason, Verdict
from farm.scheduler import unmet
from farm.series import Series, load_series, require_gnu_patch, series_directory
from farm.trees import TreeStore


@dataclass(frozen=True)
class Planned:
    """The cells of a run, and the outcomes of those that are decided before any card is asked."""

    cells: list[plan.Cell]
    decided: Mapping[str, Outcome]


def preflight(loaded: config.Loaded, say: Callable[[str], None], here: Sequence[Card] | None = None,
              planned: Callable[[Sequence[plan.Cell]], None] = lambda cells: None) -> Planned:
    """All that can be known wrong before a card is touched; what comes back are the cells to run.

    `planned` is given them before anything is fetched, and may refuse them.

    `here` are the cards of this machine, where it alone runs the cells; None: other machines may have others.  A pin of
    which no card here can run any cell is not asked for: it may be of another machine, and the scheduler skips its cells.
    The pristine package of each pin is fetched (its environment is not), and the tree of every arm is built here once.
    A tree that cannot be built refuses the run, or with `on_series_error: fail` makes its cells FAIL.
    Raises UsageError (series, patch, pin, GNU patch, bubblewrap), EnvironmentBuildError (network).
    """
    require_gnu_patch()
    cache = usable_cache()
    pins, trees = PinStore(cache), TreeStore(cache)
    wanted = {pin for cell in loaded.cells for pin in (cell.config.pins or loaded.matrix.pins)}
    series: dict[str, Series] = {
        name: load_series(series_directory(loaded.series_root, loaded.pins[name].version)) for name in sorted(wanted)
    }
    cells = plan.cells(loaded, series, read_tests(loaded.series_root))
    _refuse_unsafe(loaded, cells, here or ())
    planned(cells)
    decided: dict[str, Outcome] = {}
    for name in sorted(wanted):
        pin = Pin.from_config(name, loaded.pins[name], file=loaded.pin_files[name])
        mine = [cell for cell in cells if cell.pin.name == name]
        if here is not None and all(unmet(cell.needs, card) for cell in mine for card in here):
            continue
        pristine = pins.pristine(pin, say)
        for version in _test_versions(cells, name):
            pins.sdist(version, pin, say)
        for patches in {arm.patches for cell in mine for arm in cell.arms}:
            try:
                trees.build(pristine, patches)
            except SeriesError as error:
                if loaded.matrix.on_series_error == "refuse":
                    raise
                say(f"{name}: {error}")
                broken = Outcome(Verdict.FAIL, Reason.SERIES_BROKEN, f"its tree cannot be built: {error}")
                decided |= {cell.id: campaign.controlled(broken, cell.control) if cell.control else broken
                            for cell in mine if any(arm.patches == patches for arm in cell.arms)}
    return Planned(cells, decided)


def _refuse_unsafe(loaded: config.Loaded, cells: Sequence[plan.Cell], here: Sequence[Card]) -> None:
    """Raise UsageError where this machine would run a cell that needs a sandbox, and can make none."""
    if not any(cell.needs.sandbox and unmet(cell.needs, card) is None for cell in cells for card in here):
        return
    try:
        Sandbox.find()
    except FarmError as error:
        others = sorted({cell.job.name for cell in cells if not cell.needs.sandbox})
        hint = f"; jobs that run no patched code need none: --only {','.join(others)}" if others else ""
        raise loaded.source.error(f"{error}{hint}", ("isolation",)) from error


def _test_versions(cells: Sequence[plan.Cell], pin: str) -> set[str]:
    """Releases whose own tests the cells of a pin want: from their sdists, which a registry may not have."""
    suites = [(cell, suite) for cell in cells if cell.pin.name == pin for suite in getattr(cell.job, "suites", ())]
    wanted = {cell.pin.config.version for cell, suite in suites if suite.source != "series"}
    return wanted | {suite.version for _, suite in suites if suite.source == "newer" and suite.version}


def read_tests(series_root: Path) -> dict[str, bytes]:
    """The regression tests beside a series (`tests/`), by path relative to that folder."""
    root = series_root / "tests"
    return {str(f.relative_to(root)): f.read_bytes() for f in sorted(root.rglob("*")) if f.is_file()
            and "__pycache__" not in f.parts}
