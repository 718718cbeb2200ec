"""A pin's environment on this node: a venv with torch, the wheel's requirements and pytest, but without vllm.

vllm itself comes from a tree, by PYTHONPATH.  The build goes in steps that a
state file beside the venv names.  A step that was cut off may have left half a
package, so a venv that it may have touched is thrown away; what pip had
downloaded is in its cache, and does not travel twice.
"""

from __future__ import annotations

import email.parser
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from farm.errors import EnvironmentBuildError
from farm.pip import Pip, PipFailed, Progress

TEST_REQUIREMENTS = ("pytest", "pytest-xdist", "pytest-timeout", "pytest-asyncio", "tblib")
VENV_DEADLINE_S = 300.0
_FACTS = """
import importlib.metadata as m, json, platform
print(json.dumps({"python": platform.python_version(), "packages": {d.name: d.version for d in m.distributions()}}))
"""
# Profiles with a launcher script call `vllm`; no console script was installed, since vllm is not.
_VLLM_SCRIPT = '#!/bin/sh\nexec "$(dirname "$0")/python" -m vllm.entrypoints.cli.main "$@"\n'


@dataclass(frozen=True)
class Environment:
    """What a pin's processes run with.

    `python` is only ever run as a process.  `versions` holds vllm (the pin's), torch, triton, transformers and
    python; None: not installed.  `site` (installed pins) follows the tree on PYTHONPATH.
    """

    python: Path
    versions: Mapping[str, str | None]
    site: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """What goes into a venv.  `base` makes it; `requirements` reads the wheel's METADATA when it is needed."""

    name: str
    version: str
    base: Path
    torch: str | None
    exclude: tuple[str, ...]
    extra: tuple[str, ...]
    pip_args: tuple[str, ...]
    metadata: Callable[[], str]


def load(folder: Path, version: str) -> Environment | None:
    """The finished environment in `folder`, or None."""
    try:
        facts = json.loads(_facts_file(folder).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    python = folder / "bin" / "python"
    return Environment(python, _versions(facts, version)) if python.exists() else None


def build(folder: Path, recipe: Recipe, progress: Progress) -> Environment:
    """Build the venv in `folder`, or go on where an earlier build stopped cleanly.

    The caller holds the lock.  Raises PipFailed, EnvironmentBuildError.
    """
    state = _state(folder)
    if state["running"] is not None or not (folder / "bin" / "python").exists():
        if folder.exists():
            progress(f"{recipe.name}: an earlier build was cut off in step {state['running']}, starting over")
            shutil.rmtree(folder)
        state = {"done": [], "running": None}
    pip = Pip(folder / "bin" / "python", folder.with_suffix(".logs"), progress)
    steps: list[tuple[str, Callable[[], None]]] = [
        ("venv", lambda: _make_venv(folder, recipe, progress)),
        ("torch", lambda: _install_torch(folder, recipe, pip)),
        ("requirements", lambda: _install_requirements(folder, recipe, pip)),
    ]
    for name, step in steps:
        if name in state["done"]:
            continue
        _save(folder, {**state, "running": name})
        try:
            step()
        except PipFailed as failure:
            if not failure.touched:
                _save(folder, state)
            raise
        state = {"done": [*state["done"], name], "running": None}
        _save(folder, state)
    facts = ask_facts(folder / "bin" / "python", None, folder)
    _write(_facts_file(folder), json.dumps(facts))
    return Environment(folder / "bin" / "python", _versions(facts, recipe.version))


def ask_facts(python: Path, site: Path | None, cwd: Path) -> dict:
    """{"python": version, "packages": {name: version}} of an interpreter.  Raises EnvironmentBuildError."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    try:
        done = subprocess.run([str(python), "-c", _FACTS], capture_output=True, text=True, timeout=120, cwd=cwd,
                              env=environment, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EnvironmentBuildError(f"{python} does not run: {error}") from error


def installed(python: Path, site: Path | None, version: str, cwd: Path) -> Environment:
    """The environment of an interpreter that has vllm already."""
    return Environment(python, _versions(ask_facts(python, site, cwd), version), site)


def requirements(metadata: str, exclude: Sequence[str]) -> list[str]:
    """A wheel's own requirements, extras skipped and `exclude` (distribution names) left out.

    Environment markers stay on: pip evaluates them for the interpreter that it installs into.
    """
    left_out = {canonicalize_name(name) for name in exclude}
    headers = email.parser.HeaderParser().parsestr(metadata)
    kept = []
    for text in headers.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        marker = requirement.marker
        of_extra = marker is not None and "extra" in str(marker) and not marker.evaluate({"extra": ""})
        if not of_extra and canonicalize_name(requirement.name) not in left_out:
            kept.append(str(requirement))
    return kept


# --- steps ----------------------------------------------------------------------------------


def _make_venv(folder: Path, recipe: Recipe, progress: Progress) -> None:
    progress(f"{recipe.name}: making a virtual environment")
    try:
        subprocess.run([str(recipe.base), "-m", "venv", str(folder)], capture_output=True, text=True, check=True,
                       timeout=VENV_DEADLINE_S)
    except subprocess.CalledProcessError as error:
        raise EnvironmentBuildError(
            f"pin {recipe.name}: {recipe.base} -m venv failed: {(error.stderr or error.stdout).strip()[-300:]}. On Debian "
            "and Ubuntu: apt-get install python3-venv; or name another interpreter (python:) in the pin") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentBuildError(f"pin {recipe.name}: {recipe.base} -m venv failed: {error}") from error
    script = folder / "bin" / "vllm"
    script.write_text(_VLLM_SCRIPT, encoding="utf-8")
    script.chmod(0o755)


def _install_torch(folder: Path, recipe: Recipe, pip: Pip) -> None:
    """First and alone: whatever is in the requirements, the resolver may then choose no other torch."""
    if recipe.torch is None:
        return
    _install(pip, recipe, [recipe.torch], f"{recipe.name}: installing {recipe.torch}")


def _install_requirements(folder: Path, recipe: Recipe, pip: Pip) -> None:
    wanted = [*requirements(recipe.metadata(), recipe.exclude), *TEST_REQUIREMENTS, *recipe.extra]
    listed, constraints = folder / "requirements.txt", folder / "constraints.txt"
    _write(listed, "\n".join(wanted) + "\n")
    torch = _package(ask_facts(folder / "bin" / "python", None, folder), "torch")
    _write(constraints, f"torch=={torch}\n" if recipe.torch is not None else "")
    _install(pip, recipe, ["-r", str(listed), "-c", str(constraints)],
             f"{recipe.name}: installing {len(wanted)} requirements")


def _install(pip: Pip, recipe: Recipe, what: Sequence[str], words: str) -> None:
    # Byte code comes with the first import: of 20,000 modules one boot needs a quarter.
    pip.run(["install", "--no-compile", *recipe.pip_args, *what], words)


# --- files ----------------------------------------------------------------------------------


def _versions(facts: Mapping, version: str) -> dict[str, str | None]:
    return {"vllm": version, "python": facts["python"],
            **{name: _package(facts, name) for name in ("torch", "triton", "transformers")}}


def _package(facts: Mapping, name: str) -> str | None:
    return next((v for k, v in facts["packages"].items() if canonicalize_name(k) == name), None)


def _facts_file(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _state(folder: Path) -> dict:
    try:
        return json.loads(folder.with_suffix(".state").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {"done": [], "running": "unknown" if folder.exists() else None}


def _save(folder: Path, state: Mapping) -> None:
    _write(folder.with_suffix(".state"), json.dumps(state))


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
