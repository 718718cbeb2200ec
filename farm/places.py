"""Where the farm keeps things unless told otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from farm.errors import UsageError


def default_cache() -> Path:
    """FARM_CACHE, or the user's cache directory: pins, trees, models, logs."""
    return Path(os.environ.get("FARM_CACHE") or platformdirs.user_cache_dir("patch-farm"))


def usable_cache() -> Path:
    """The default cache, made where it is not there.  Raises UsageError where it cannot be."""
    cache = default_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the cache folder {cache} cannot be made ({error.strerror}); set FARM_CACHE to another") from error
    return cache


def default_results() -> str:
    """FARM_RESULTS, or the user's data directory."""
    return os.environ.get("FARM_RESULTS") or str(Path(platformdirs.user_data_dir("patch-farm")) / "results")
