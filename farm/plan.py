"""From configuration and series to cells.  Pure: reads no file, imports neither Ray nor vLLM.

A cell carries everything that its card needs by value (pin, patch bytes,
profile, options): a tree is rebuilt on each node from small values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packaging.version import Version

from farm import models
from farm.bench import Job, Needs
from farm.config import ArmConfig, Loaded, ProfileConfig
from farm.dep3 import carried
from farm.pinfile import PinConfig
from farm.records import Reason
from farm.series import PatchFile, Series


@dataclass(frozen=True)
class ArmSpec:
    """An arm before its tree is built."""

    name: str
    patches: tuple[PatchFile, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()


@dataclass(frozen=True)
class PinSpec:
    """A pin as a cell carries it."""

    name: str
    config: PinConfig


@dataclass(frozen=True)
class Release:
    """A pin with the whole series that is meant for it."""

    pin: PinSpec
    series: Series


@dataclass(frozen=True)
class Cell:
    """One job × profile × pin × its arms: the unit of scheduling, retry and resume."""

    id: str
    job: Job
    name: str | None
    pin: PinSpec
    profile: str | None
    profile_config: ProfileConfig | None
    arms: tuple[ArmSpec, ...]
    options: Mapping[str, Any]
    needs: Needs
    seed: int
    series_sha256: str
    tests: Mapping[str, bytes] = field(default_factory=dict)  # patches/tests, by relative path
    control: Reason | None = None  # the reason that this cell must end with
    releases: tuple[Release, ...] = ()  # of a triage: its own pin last, the older ones of the matrix before it
    identity: Mapping[str, Any] = field(default_factory=dict)  # what its id is a digest of


def combine(job: Needs, profile: Needs | None) -> Needs:
    """The needs of a cell: what its job and its profile need together."""
    if profile is None:
        return job
    capabilities = [c for c in (job.min_capability, profile.min_capability) if c is not None]
    memories = [m for m in (job.min_memory_bytes, profile.min_memory_bytes) if m is not None]
    return Needs(
        cuda=job.cuda or profile.cuda,
        min_capability=max(capabilities, default=None),
        min_memory_bytes=max(memories, default=None),
        own_card=job.own_card or profile.own_card,
    )


def cells(loaded: Loaded, series: Mapping[str, Series], tests: Mapping[str, bytes]) -> list[Cell]:
    """The cells of a matrix in its order; `series` maps a pin's name to its series.

    Raises UsageError where an arm names a patch that the pin's series does
    not have, and where two cells would be the same.
    """
    made: dict[str, Cell] = {}
    for planned in loaded.cells:
        config = planned.config
        for pin_name in config.pins or loaded.matrix.pins:
            pin = PinSpec(pin_name, loaded.pins[pin_name])
            treeless = getattr(planned.job, "treeless", False)
            names = () if treeless else config.arms or tuple(loaded.matrix.arms)
            arms = tuple(_arm(loaded, name, pin, series[pin_name]) for name in names)
            releases = _releases(loaded, pin, series) if treeless else ()
            profile_needs = planned.profile.needs.needs() if planned.profile else None
            job_needs = planned.job.needs
            if pin.config.flavour == "cuda" and not treeless:  # even vLLM's tests of the scheduler touch the device
                job_needs = combine(job_needs, Needs(cuda=True))
            parts = _identity(planned.options, planned.profile, pin, arms, config.job, loaded.matrix.seed,
                              tests if config.job == "unit" else {}, config.control, releases)
            identity = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
            words = [config.job, config.name, (config.profile or "").replace("/", "-"), pin_name]
            cell_id = "-".join([w for w in words if w] + [identity[:8]])
            if len(cell_id) > 140:  # with its attempt it names files
                raise loaded.source.error(f"cell {cell_id}: its name has {len(cell_id)} characters of at most 140; shorten "
                                          "the names of the cell, its profile or its pin", ("cells",))
            if cell_id in made:
                raise loaded.source.error(f"cell {cell_id} stands twice in the matrix; give the options or leave one out",
                                          ("cells",))
            made[cell_id] = Cell(
                id=cell_id, job=planned.job, name=config.name, pin=pin, profile=config.profile,
                profile_config=planned.profile, arms=arms, options=planned.options,
                needs=replace(combine(job_needs, profile_needs), sandbox=bool(arms) and loaded.matrix.isolation != "none"),
                seed=int(identity[:12], 16),
                series_sha256=series[pin_name].sha256, tests=tests if config.job == "unit" else {},
                control=config.control, releases=releases, identity=parts,
            )
    return list(made.values())


def _releases(loaded: Loaded, pin: PinSpec, series: Mapping[str, Series]) -> tuple[Release, ...]:
    """This pin and the older ones that the matrix lists, oldest first."""
    upto = Version(pin.config.version)
    older = [PinSpec(name, loaded.pins[name]) for name in series
             if name != pin.name and Version(loaded.pins[name].version) < upto]
    return tuple(Release(p, series[p.name]) for p in [*sorted(older, key=lambda p: Version(p.config.version)), pin])


def _arm(loaded: Loaded, name: str, pin: PinSpec, series: Series) -> ArmSpec:
    config: ArmConfig = loaded.matrix.arms[name]
    at = ("arms", name, "patches")
    if config.patches == "none":
        chosen: tuple[PatchFile, ...] = ()
    elif config.patches == "all":
        chosen = series.patches
    else:
        chosen = tuple(p for p in series.patches if p.name in config.patches)
        _refuse_unknown(loaded, config.patches, series, at)
    _refuse_unknown(loaded, config.without, series, ("arms", name, "without"))
    kept = tuple(p for p in chosen if p.name not in config.without)
    if config.upstream == "drop":
        kept = tuple(p for p in kept if not carried(p, pin.config.version))
    return ArmSpec(name, kept, dict(config.env), config.args)


def _refuse_unknown(loaded: Loaded, names: tuple[str, ...], series: Series, at: tuple) -> None:
    known = [p.name for p in series.patches]
    for patch in names:
        if patch not in known:
            raise loaded.source.error(
                f"patch {patch!r} is not in the series of {series.directory}; it lists: {', '.join(known) or 'nothing'}", at)


def _identity(options: Any, profile: ProfileConfig | None, pin: PinSpec, arms: tuple[ArmSpec, ...], job: str, seed: int,
              tests: Mapping[str, bytes], control: Reason | None, releases: tuple[Release, ...]) -> dict[str, Any]:
    """What makes a cell the same cell when a run is resumed: everything that could change its result."""
    return {
        "job": job, "seed": seed, "options": options, "pin": [pin.name, pin.config.model_dump(mode="json")],
        "profile": profile.model_dump(mode="json") if profile else None,
        "arms": [[a.name, [p.sha256 for p in a.patches], dict(a.env), list(a.args)] for a in arms],
        "tests": {k: hashlib.sha256(v).hexdigest() for k, v in sorted(tests.items())},
        "models": _models(profile), "control": control and control.value,
        "releases": [[r.pin.name, r.series.sha256] for r in releases],
    }


def _models(profile: ProfileConfig | None) -> dict[str, str]:
    """Hashes of the stand-ins that a profile serves, by kind; what lies at a path only the card's machine knows."""
    named = [] if profile is None else [profile.model, profile.drafter]
    return {config.tiny: models.sha256_of(config.tiny) for config in named if config is not None and config.tiny is not None}
