"""What the files of a directory are, and whether one of them has changed since.

A cheap check looks at size, mtime (ns) and mode: a write through any hard link
of a file shows there.  A full one reads the contents again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTECODE_DIR = "__pycache__"


@dataclass(frozen=True)
class FileFact:
    """One file: size (B), mtime (ns), permission bits, SHA-256 of its content."""

    size: int
    mtime_ns: int
    mode: int
    sha256: str

    def matches(self, stat: os.stat_result) -> bool:
        return (self.size, self.mtime_ns, self.mode) == (stat.st_size, stat.st_mtime_ns, stat.st_mode & 0o7777)


@dataclass(frozen=True)
class Manifest:
    """The plain files below a root, by path relative to it."""

    files: Mapping[str, FileFact]

    @classmethod
    def of(cls, root: Path) -> Manifest:
        """Read every file below `root`; 470 MB take about a second."""
        found = dict(sorted(walk(root), key=lambda item: item[0]))
        hashes = hashes_of(root, found)
        return cls({path: FileFact(stat.st_size, stat.st_mtime_ns, stat.st_mode & 0o7777, hashes[path])
                    for path, stat in found.items()})

    @property
    def fingerprint(self) -> str:
        """Hash of paths and contents; byte code left out, so that every node and interpreter finds the same."""
        lines = (f"{fact.sha256}  {path}\n" for path, fact in sorted(self.files.items()) if not is_bytecode(path))
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def changed(self, root: Path) -> tuple[str, ...]:
        """Files that were written to, removed or added since, by stat alone (5,000 files: about 20 ms).

        Byte code that was added does not count: only what is listed here is ever taken over.
        """
        there = dict(walk(root))
        differing = [p for p, fact in self.files.items() if p not in there or not fact.matches(there[p])]
        added = [p for p in there if p not in self.files and not is_bytecode(p)]
        return tuple(sorted(differing + added))

    def rehashed(self, root: Path, paths: Iterable[str] | None = None) -> tuple[str, ...]:
        """Of the listed files (or of `paths`), those whose content is another now or that are gone."""
        asked = self.files if paths is None else paths
        return tuple(p for p in asked if not (root / p).is_file() or sha256_of(root / p) != self.files[p].sha256)

    def to_json(self) -> dict[str, list]:
        return {path: [f.size, f.mtime_ns, f.mode, f.sha256] for path, f in self.files.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        return cls({path: FileFact(*fields) for path, fields in data.items()})


def walk(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Every plain file below `root`: its relative path and its stat; symbolic links are not followed."""
    folders = [""]
    while folders:
        inside = folders.pop()
        with os.scandir(os.path.join(root, inside)) as entries:
            for entry in entries:
                path = f"{inside}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                else:
                    yield path, entry.stat(follow_symlinks=False)


def is_bytecode(path: str) -> bool:
    return f"/{BYTECODE_DIR}/" in f"/{path}"


def hashes_of(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of each of these files below `root`."""
    asked = list(paths)
    with ThreadPoolExecutor() as pool:  # hashlib lets go of the GIL
        return dict(zip(asked, pool.map(lambda path: sha256_of(root / path), asked), strict=True))


def sha256_of(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()
