"""What YAML may say: matrices, pins and profiles.  Loaded once, frozen after.

Looked up by name: `configs/pins/NAME.yaml` and `configs/profiles/NAME.yaml`,
first beside the matrix file (its `../pins`, `../profiles`), then under the
working directory, then in the project that holds this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator

import jobs
from farm import pinfile, profilefile, yamlfile
from farm.bench import Job
from farm.errors import UsageError
from farm.pinfile import PROJECT as PROJECT
from farm.pinfile import PinConfig, config_roots, find, names
from farm.profilefile import Environment, ProfileConfig, Words
from farm.profilefile import NeedsConfig as NeedsConfig
from farm.rearm import rearm
from farm.records import Reason
from farm.serverspec import untold
from farm.yamlfile import Frozen, YamlFile

CONTROLS = (Reason.AS_EXPECTED, Reason.FAILING_SET_DIFFERS, Reason.TESTS_BROKEN, Reason.EFFECT_ABSENT, Reason.UNKNOWN_KNOB,
            Reason.NOT_SERVED,
            # of an oracle itself: a measurement made so that it must be thrown away, by the very rule that is meant
            Reason.TIER_OVERFLOW, Reason.NOT_EVICTED, Reason.NO_STORE, Reason.COLD_JIT, Reason.REFUSED_CONFIG)

# What becomes a part of file names (a cell's id, its log) and of rows.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
Name = Annotated[str, Field(pattern=_NAME, max_length=60)]


class ArmConfig(Frozen):
    """One side: which patches of the series, and what is added to environment and arguments."""

    patches: Literal["all", "none"] | tuple[str, ...] = "all"
    without: tuple[str, ...] = ()
    upstream: Literal["keep", "drop"] = "keep"  # drop: without patches whose header says Applied-Upstream: PIN or older
    env: Environment = Field(default_factory=dict)
    args: Words = ()


class CellConfig(Frozen):
    """One line of a matrix; it makes one cell for each of its pins."""

    job: str
    name: Name | None = None
    profile: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*(/[A-Za-z0-9][A-Za-z0-9._+-]*)*$",
                                max_length=60)
    pins: tuple[Name, ...] | None = Field(default=None, min_length=1)
    arms: tuple[str, ...] | None = Field(default=None, min_length=1)
    options: Mapping[str, Any] = Field(default_factory=dict, alias="with")
    expect: Any = None
    control: Reason | None = None  # the reason that this cell must end with, or the whole run is INVALID

    @field_validator("control")
    @classmethod
    def _is_evidence(cls, control: Reason | None) -> Reason | None:
        if control is not None and control not in CONTROLS:
            raise ValueError("a control ends with evidence, or by a rule that it was made to break; choose one of: "
                             f"{', '.join(r.value for r in CONTROLS)}")
        return control


class CardsConfig(Frozen):
    """CPU slots per machine without a GPU (how many cells run there side by side), and what becomes of a card that is
    busy or faulty; times in seconds."""

    cpu_slots: int = Field(default=1, ge=1, le=64)
    busy_wait_s: float = Field(default=600.0, ge=0, le=86_400)  # then the cell goes elsewhere, or ends card-busy
    quarantine_after: int = Field(default=2, ge=1, le=100)  # ERRORs of a card's own making
    quarantine_s: float = Field(default=3600.0, ge=1, le=30 * 86_400)


class MatrixConfig(Frozen):
    """A whole matrix: cells = cells × pins, each with its arms."""

    name: Name
    seed: int = 0
    series: str = Field(default="patches", min_length=1, max_length=250)
    pins: tuple[Name, ...] = Field(min_length=1)
    arms: Mapping[Name, ArmConfig] = Field(
        default_factory=lambda: {"baseline": ArmConfig(patches="none"), "patched": ArmConfig()}, min_length=1
    )
    cards: CardsConfig = CardsConfig()
    campaign: bool = False  # verdicts stand only beside controls that held: at least one cell must be one
    on_series_error: Literal["refuse", "fail"] = "refuse"  # fail: a pin whose series is broken ends FAIL, the others go on
    isolation: Literal["none", "bwrap"] = "none"  # of servers and tests: bubblewrap, without network, root read-only
    attempts: int = Field(default=2, ge=1, le=10)  # of a cell that ends ERROR, each on another card if there is one
    cells: tuple[CellConfig, ...] = Field(min_length=1)


@dataclass(frozen=True)
class CellPlanConfig:
    """A cell's configuration with its job built and its profile found."""

    config: CellConfig
    job: Job
    profile: ProfileConfig | None
    options: Mapping[str, Any]  # as the matrix says them: what a cell's identity is made of


@dataclass(frozen=True)
class Loaded:
    """A matrix and all that it names."""

    source: YamlFile
    matrix: MatrixConfig
    pins: Mapping[str, PinConfig]
    pin_files: Mapping[str, Path]
    cells: tuple[CellPlanConfig, ...]
    series_root: Path


def load(path: Path, only: tuple[str, ...] = (), arms: tuple[str, ...] = ()) -> Loaded:
    """Read a matrix file and what it names.

    `arms`, where given, are run instead of those of the file (farm.rearm).
    `only` keeps cells by job name or cell name; a cell that is not kept is
    not checked, so that a matrix with one unknown job can still be run in parts.
    Raises UsageError with file, line and the nearest known name.
    """
    source = yamlfile.read(path)
    matrix = yamlfile.validate(source, MatrixConfig)
    if arms:
        matrix = rearm(matrix, arms)
    roots = config_roots(path.resolve().parent.parent)
    kept = [i for i, cell in enumerate(matrix.cells) if not only or cell.job in only or cell.name in only]
    if unmatched := [word for word in only if not any(word in (c.job, c.name) for c in matrix.cells)]:
        names = sorted({c.job for c in matrix.cells} | {c.name for c in matrix.cells if c.name})
        raise UsageError(f"--only {unmatched[0]}: no cell has this job or name; there are: {', '.join(names)}",
                         file=path)
    wanted = {pin for i in kept for pin in (matrix.cells[i].pins or matrix.pins)}
    pins, pin_files = {}, {}
    for name in [*matrix.pins, *sorted(wanted - set(matrix.pins))]:
        file = _find(roots, "pins", name, source, _loc_of_pin(matrix, name))
        pins[name] = pinfile.read(file)
        pin_files[name] = file
    cells = tuple(_cell(source, matrix, i, roots) for i in kept)
    return Loaded(source, matrix, pins, pin_files, cells, _series_root(source, matrix, roots))


def _cell(source: YamlFile, matrix: MatrixConfig, index: int, roots: list[Path]) -> CellPlanConfig:
    cell, at = matrix.cells[index], ("cells", index)
    if cell.job not in jobs.REGISTRY:
        if cell.job in jobs.PLANNED:
            raise source.error(
                f"job {cell.job!r} is not built yet; run the others with --only "
                f"{','.join(sorted({c.job for c in matrix.cells} & set(jobs.REGISTRY)))}", (*at, "job"))
        raise source.error(_unknown("job", cell.job, jobs.REGISTRY), (*at, "job"))
    if len(set(cell.arms or ())) < len(cell.arms or ()):
        raise source.error("an arm is listed twice", (*at, "arms"))
    for arm in cell.arms or ():
        if arm not in matrix.arms:
            raise source.error(_unknown("arm", arm, matrix.arms), (*at, "arms"))
    options = dict(cell.options)
    if cell.expect is not None:
        options["expect"] = cell.expect
    kind = jobs.REGISTRY[cell.job]

    def locate(loc: yamlfile.Loc) -> yamlfile.Loc:
        return (*at, *loc) if loc[:1] == ("expect",) else (*at, "with", *loc)

    job = yamlfile.validate(source, TypeAdapter(kind), options, locate)
    profile = None
    if cell.profile is not None:
        file = _find(roots, "profiles", cell.profile, source, (*at, "profile"))
        profile = profilefile.read(file, next(root.parent for root in roots if file.is_relative_to(root)))
    elif getattr(kind, "serves", False):
        raise source.error(f"job {cell.job!r} serves a model: give it a profile", at)
    if matrix.isolation == "bwrap" and profile is not None and profile.launcher is not None and getattr(kind, "serves", False):
        raise source.error(
            f"profile {cell.profile!r} has a launcher ({profile.launcher.script}), whose server listens on a port, and "
            "isolation: bwrap leaves it no network to be reached by: give the cell a profile with args, whose server listens "
            "on a Unix socket, or trust the patches: isolation: none", (*at, "profile"))
    arms = {name: matrix.arms[name] for name in cell.arms or matrix.arms}
    if strange := sorted(set(getattr(job, "arms_named", ())) - set(arms)):
        raise source.error(f"expect: {_unknown('arm', strange[0], arms)}", (*at, "expect"))
    if profile is not None and profile.launcher is not None:
        for name, arm in arms.items():
            if problem := untold(arm.args, profile.launcher.args_env):
                raise source.error(f"arm {name!r}, profile {cell.profile!r}: {problem}", ("arms", name, "args"))
    if profile is not None and hasattr(job, "longest"):
        for arm in arms.values():
            limit = _max_model_len((*profile.served_args, *arm.args))
            if limit is not None and job.longest > limit:
                raise source.error(f"a request of {job.longest} tokens (prompt and reply) does not fit --max-model-len={limit} "
                                   f"of profile {cell.profile!r}", (*at, "with"))
    return CellPlanConfig(cell, job, profile, options)


def _max_model_len(args: tuple[str, ...]) -> int | None:
    """What the last --max-model-len says; None where there is none that is a plain number."""
    limit = None
    for word, after in zip(args, [*args[1:], ""], strict=False):
        flag, _, value = word.partition("=")
        if flag == "--max-model-len" and (value or after).isdecimal():
            limit = int(value or after)
    return limit


def _find(roots: list[Path], kind: str, name: str, source: YamlFile, loc: yamlfile.Loc) -> Path:
    if file := find(roots, kind, name):
        return file
    raise source.error(_unknown(kind.rstrip("s"), name, names(roots, kind)), loc)


def _series_root(source: YamlFile, matrix: MatrixConfig, roots: list[Path]) -> Path:
    bases = list(dict.fromkeys([roots[0].parent, Path.cwd()]))  # as pins and profiles; never another project's
    for base in bases:
        if (base / matrix.series).is_dir():
            return (base / matrix.series).resolve()
    raise source.error(f"series directory {matrix.series!r} is not there (looked in {', '.join(map(str, bases))})",
                       ("series",))


def _loc_of_pin(matrix: MatrixConfig, name: str) -> yamlfile.Loc:
    if name in matrix.pins:
        return ("pins", matrix.pins.index(name))
    return next((("cells", i, "pins") for i, c in enumerate(matrix.cells) if name in (c.pins or ())), ())


def _unknown(kind: str, name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(sorted(known)) or 'none'}."
