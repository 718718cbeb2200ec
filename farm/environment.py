"""A pin's environment on this node: a venv with torch, the wheel's requirements and pytest, but without vllm.

vllm itself comes from a tree, by PYTHONPATH.  The build goes in steps, a few
requirements each, that a state file beside the venv names: a build that was cut
off goes on from there, whether pip may cache downloads or not.  A package that
was cut off half way is known by its RECORD, which pip writes last, and is
forgotten; the last step lets pip judge all requirements together.
"""

from __future__ import annotations

import csv
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
from farm.pip import Cause, Pip, PipFailed, Progress

TEST_REQUIREMENTS = ("pytest", "pytest-xdist", "pytest-timeout", "pytest-asyncio", "tblib")
BATCH = 10  # requirements a step: what an interrupted build has to repeat at most
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
    python = folder / "bin" / "python"
    if "venv" not in state["done"] or not python.exists():
        shutil.rmtree(folder, ignore_errors=True)
        state = {"done": [], "running": None}
    elif state["running"] is not None:
        forgotten = forget_unfinished(folder)
        progress(f"{recipe.name}: an earlier build was cut off in step {state['running']}, going on from there"
                 + (f" (again: {', '.join(forgotten)})" if forgotten else ""))
    pip = Pip(python, folder.with_suffix(".logs"), progress)
    _step(folder, state, "venv", lambda: _make_venv(folder, recipe, progress))
    _step(folder, state, "pip", lambda: _renew_pip(recipe, pip))
    if recipe.torch is not None:
        _step(folder, state, "torch", lambda: _install(pip, recipe, [recipe.torch], f"installing {recipe.torch}"))
    _install_requirements(folder, state, recipe, pip)
    facts = ask_facts(python, None, folder)
    _write(_facts_file(folder), json.dumps(facts))
    return Environment(python, _versions(facts, recipe.version))


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


def _renew_pip(recipe: Recipe, pip: Pip) -> None:
    """The venv's own pip is as old as its Python; 26.3 needs less than half the time of 23.2 for these requirements."""
    try:
        _install(pip, recipe, ["--upgrade", "pip"], "renewing pip")
    except PipFailed as failure:
        if failure.cause is not Cause.ABSENT:  # an index without pip: the old one does it, too
            raise


def _install_requirements(folder: Path, state: dict, recipe: Recipe, pip: Pip) -> None:
    """A few at a time, then all of them once more for pip's resolver to judge together.

    torch is in already, and the constraints keep any resolver from choosing another; they also hold
    every requirement's own bounds while others are installed.
    """
    wanted = [*requirements(recipe.metadata(), recipe.exclude), *TEST_REQUIREMENTS, *recipe.extra]
    torch = _package(ask_facts(pip.python, None, folder), "torch") if recipe.torch is not None else None
    pinned = [f"torch=={torch}"] if torch else []
    listed, constraints = folder / "requirements.txt", folder / "constraints.txt"
    _write(listed, "\n".join(wanted) + "\n")
    _write(constraints, "\n".join([*pinned, *map(_without_extras, wanted)]) + "\n")
    for first in range(0, len(wanted), BATCH):
        batch = wanted[first:first + BATCH]
        last = first + len(batch)
        _step(folder, state, f"requirements to {last}", lambda batch=batch, last=last: _install(
            pip, recipe, ["-c", str(constraints), *batch], f"installing requirements, {last} of {len(wanted)}"))
    _step(folder, state, "all requirements", lambda: _install(
        pip, recipe, ["-r", str(listed), "-c", str(constraints)], "checking all requirements together"))


def _install(pip: Pip, recipe: Recipe, what: Sequence[str], words: str) -> None:
    # Byte code comes with the first import, for a quarter of what is installed.
    pip.run(["install", "--no-compile", *recipe.pip_args, *what], f"{recipe.name}: {words}")


def _without_extras(requirement: str) -> str:
    """As a constraint, which may carry no extras."""
    parsed = Requirement(requirement)
    parsed.extras = set()
    return str(parsed)


def forget_unfinished(folder: Path) -> list[str]:
    """Remove the metadata of packages that are not all there, so that pip installs them again; their names.

    pip writes RECORD last; its sizes also show a file that a crash of the machine cut short.
    """
    forgotten = []
    for site in folder.glob("lib/python*/site-packages"):
        for info in sorted({*site.glob("*.dist-info"), *site.glob("~*/")}):  # ~name: what pip was about to remove
            if info.name.startswith("~") or not _recorded_whole(site, info / "RECORD"):
                shutil.rmtree(info)
                forgotten.append(info.name.removesuffix(".dist-info"))
    return forgotten


def _recorded_whole(site: Path, record: Path) -> bool:
    try:
        rows = list(csv.reader(record.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        return False
    for path, _, size in rows:
        try:
            if size and os.stat(site / path).st_size != int(size):
                return False
        except FileNotFoundError:
            return False
    return True


# --- files ----------------------------------------------------------------------------------


def _versions(facts: Mapping, version: str) -> dict[str, str | None]:
    return {"vllm": version, "python": facts["python"],
            **{name: _package(facts, name) for name in ("torch", "triton", "transformers")}}


def _package(facts: Mapping, name: str) -> str | None:
    return next((v for k, v in facts["packages"].items() if canonicalize_name(k) == name), None)


def _facts_file(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _step(folder: Path, state: dict, name: str, step: Callable[[], None]) -> None:
    """Run a step unless it is done, and keep in the state file where the build is."""
    if name in state["done"]:
        return
    state["running"] = name
    _write(folder.with_suffix(".state"), json.dumps(state))
    try:
        step()
    except PipFailed as failure:
        if not failure.touched:
            state["running"] = None
            _write(folder.with_suffix(".state"), json.dumps(state))
        raise
    state["done"].append(name)
    state["running"] = None
    _write(folder.with_suffix(".state"), json.dumps(state))


def _state(folder: Path) -> dict:
    try:
        return json.loads(folder.with_suffix(".state").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {"done": [], "running": None}


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
