"""Where the farm keeps things unless told otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def default_cache() -> Path:
    """FARM_CACHE, or the user's cache directory: pins, trees, models, logs."""
    return Path(os.environ.get("FARM_CACHE") or platformdirs.user_cache_dir("patch-farm"))


def default_results() -> str:
    """FARM_RESULTS, or the user's data directory."""
    return os.environ.get("FARM_RESULTS") or str(Path(platformdirs.user_data_dir("patch-farm")) / "results")
