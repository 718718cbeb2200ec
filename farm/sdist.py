"""vLLM's sdist: the source of its tests, and of its Python code for releases that have no wheel here."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from farm.errors import EnvironmentBuildError

_BACKEND = Path(__file__).with_name("inside") / "sdist_backend.py"


def write_backend(folder: Path) -> Path:
    """A folder for pip's PYTHONPATH with a build backend that only reads an sdist's metadata; see inside/sdist_backend.py."""
    package = folder / "setuptools"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(_BACKEND, package / "build_meta.py")
    return folder


def unpack(archive: Path, folder: Path, kept: Sequence[str], needed: str) -> None:
    """Take these top-level entries out of an sdist, plain files only.

    Raises EnvironmentBuildError where the directory `needed` is not among them.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]
            if member.isfile() and parts and parts[0] in kept and ".." not in parts:
                target = folder.joinpath(*parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None  # a plain file
                with source, open(target, "wb") as out:
                    shutil.copyfileobj(source, out)
                target.chmod(member.mode & 0o777 | 0o600)
    if not (folder / needed).is_dir():
        raise EnvironmentBuildError(f"{archive.name} holds no {needed}/ directory")
