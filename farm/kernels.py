"""Kernels that the unpatched tree has compiled, given to a patched one: its first boot then compiles only what is its own.

Triton names a compiled kernel by a hash over its source, whatever that calls, the compiler and the kind of card, so a
kernel that a patch changes has another name and is compiled.  The way back is closed: what a patched tree compiles stays
its own, since its code is not trusted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from farm import folders, jsontext

FOLDER = "triton"  # below a tree's caches, see farm.childenv.CACHES


def seed(caches: Path, source: Path) -> bool:
    """Copy the kernels below the caches `source` to `caches`, which has none yet; False where there is nothing to copy.

    Two boots of one tree may do it at once: the first whole copy stays.  Until then `caches` holds nothing of it, so that
    no boot takes half a copy for caches that are warm.
    """
    ours, theirs = caches / FOLDER, source / FOLDER
    try:
        if not theirs.is_dir() or not any(theirs.iterdir()) or (ours.is_dir() and any(ours.iterdir())):
            return False
        caches.mkdir(parents=True, exist_ok=True)
        _clear(caches.parent)
        with folders.private(caches.parent) as folder:
            beside = folder / FOLDER
            shutil.copytree(theirs, beside, ignore=_left_out)
            for group in beside.glob("*/__grp__*.json"):
                _move(group, theirs, ours)
            beside.chmod(0o755)
            if ours.is_dir():
                ours.rmdir()  # it was empty
            beside.rename(ours)
    except OSError:
        return any(ours.iterdir()) if ours.is_dir() else False  # another boot was first, or the disk is full: compile then
    return True


def _left_out(folder: str, names: Sequence[str]) -> set[str]:
    """Others may be compiling there: what is in the making is compiled anew here.  Triton makes files and folders; what
    else is there leads elsewhere, or blocks who reads it."""
    making = shutil.ignore_patterns("tmp.*", "*.lock")(folder, names)
    with os.scandir(folder) as entries:
        plain = {e.name for e in entries if e.is_file(follow_symlinks=False) or e.is_dir(follow_symlinks=False)}
    return making | (set(names) - plain)


def _clear(place: Path) -> None:
    """Copies that a killed boot has left."""
    for folder in place.glob(f"{folders.PREFIX}*"):
        if (owner := folders.owner(folder)) is not None and owner.gone:
            shutil.rmtree(folder, ignore_errors=True)


def _move(group: Path, old: Path, new: Path) -> None:
    """A group names the files of one kernel by their whole paths."""
    try:
        told = jsontext.loads(group.read_text(encoding="utf-8"))
        children = told["child_paths"]
        told["child_paths"] = {name: str(new / Path(path).relative_to(old)) for name, path in children.items()}
    except (ValueError, LookupError, TypeError, AttributeError):  # another release writes it otherwise: Triton compiles anew
        group.unlink()
        return
    group.write_text(json.dumps(told), encoding="utf-8")
