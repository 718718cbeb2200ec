"""Where the farm keeps things unless told otherwise."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

from farm.errors import UsageError


def default_cache() -> Path:
    """FARM_CACHE, or the user's cache directory: pins, trees, models, logs."""
    return Path(os.environ.get("FARM_CACHE") or platformdirs.user_cache_dir("patch-farm")).absolute()


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


# Of a host, whoever runs the farm there.  A reboot may empty both: it lets go of all locks, and resets the cards.
_SHARED = (Path("/var/lock/patch-farm"), Path("/tmp/patch-farm"))


def host_state() -> Path:
    """The folder of locks and quarantines that all users and clusters of this host share.

    FARM_HOST_STATE, else whichever of the two default folders is there, else the first that can be made: once it is
    there, everybody finds the same one.  Made with mode 1777; what is in it has 0666.  Raises UsageError.
    """
    named = os.environ.get("FARM_HOST_STATE")
    places = (Path(named).absolute(),) if named else _SHARED  # supervisors run in another folder
    found = next((p for p in places if p.is_dir()), None) or next((p for p in places if _made(p)), None)
    if found is None or found.is_symlink() or not os.access(found, os.W_OK | os.X_OK):
        raise UsageError(f"the host's state folder {found or places[-1]}, which holds the locks of cards, cannot be written "
                         "to; give it mode 1777, or set FARM_HOST_STATE to one that every user of this host can write to")
    return found


def _made(folder: Path) -> bool:
    """Whether `folder` is there now.  It appears with its mode: another user may look at any moment."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=".patch-farm-", dir=folder.parent)
    except OSError:
        return False
    os.chmod(made, 0o1777)
    try:
        os.rename(made, folder)
    except OSError:  # somebody was faster
        os.rmdir(made)
    return folder.is_dir()
