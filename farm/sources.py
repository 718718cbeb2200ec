"""Which package a series is judged on: a pin by name, a release by version, or a directory.  For reading alone.

`0.29.0-cpu` (a file in configs/pins) is that pin's own pristine package; a plain version, `0.33.0`, the Python source
of that release's sdist, which is small and there for every release.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from farm import pinfile
from farm.errors import UsageError
from farm.pins import Pin, PinStore
from farm.pip import Progress


@dataclass(frozen=True)
class Source:
    """A `vllm` package to judge a series on: `label` as it was asked for, `version` of vLLM."""

    label: str
    version: str
    package: Path


def resolve(word: str, cache: Path, progress: Progress) -> Source:
    """The package behind a pin's name or a plain version, fetched where this node does not have it yet.

    Raises UsageError (neither), PinError (no such release), EnvironmentBuildError (network, disk).
    """
    roots, store = pinfile.config_roots(), PinStore(cache)
    if file := pinfile.find(roots, "pins", word):
        pin = Pin.from_config(word, pinfile.read(file), file)
        return Source(word, pin.version, store.pristine(pin, progress).package)
    try:
        version = _release(Version(word))
    except InvalidVersion:
        known = sorted(pinfile.names(roots, "pins"))
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UsageError(f"--pin {word}: neither a pin nor a version{hint} Pins: {', '.join(known) or 'none'}; or a release, "
                         "e.g. 0.33.0") from None
    asking = Pin(version, version, "cpu", python=sys.executable)
    return Source(word, version, store.source(version, asking, progress))


def _release(version: Version) -> str:
    """As vLLM writes its releases, with three numbers: `0.28` is 0.28.0, and the series of 0.28.0 serves it."""
    missing = max(0, 3 - len(version.release))
    if not missing or version.is_prerelease or version.is_postrelease or version.local:
        return str(version)
    return ".".join([*map(str, version.release), *["0"] * missing])
