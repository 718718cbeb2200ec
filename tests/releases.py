"""Small releases of a vllm package and patches between them, for tests of triage."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from farm.patchfile import PatchFile
from farm.series import Series
from farm.triage import TriagePin, TriageTable, triage

FILE = "v1/core/manager.py"
_CLASS = '''"""A manager of blocks."""

from collections import deque

LIMIT = 16


class Base:
    """What managers have in common."""

    def __init__(self, pool):
        self.pool = pool
        self.freed = deque()

    def remove(self, first, last):
        for block in range(last - 1, first - 1, -1):
            if self.pool[block] is None:
                break
            self.freed.append(self.pool[block])
            self.pool[block] = None


class Manager(Base):
    """A manager that counts."""

    def __init__(self, pool, mode):
        super().__init__(pool)
        self.mode = mode
        self.requests = {}
        self.allocated = set()

    def allocate(self, request, size):
        use_tail = self.mode == "tail"
        if use_tail and size > LIMIT:
            size = LIMIT
        blocks = [object() for _ in range(size)]
        self.requests[request] = blocks
        self.allocated.add(request)
        return blocks

    def finish(self, request):
        blocks = self.requests.pop(request)
        self.allocated.discard(request)
        return len(blocks)
'''
_FILLER = "".join(f"\n\ndef helper_{n}(value):\n    total = value + {n}\n    return total * {n + 2}\n" for n in range(12))
BASE = _CLASS + _FILLER


def changed(text: str, *pairs: tuple[str, str]) -> str:
    """The text with each first string, which must occur once, put as the second."""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def diff(old: str | None, new: str | None, path: str = FILE, preamble: str = "Why.\n\n") -> bytes:
    """A patch from one text to another; None: the file is made, or taken away."""
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    lines = difflib.unified_diff((old or "").splitlines(True), (new or "").splitlines(True), *names)
    return (preamble + "".join(lines)).encode()


def series(*patches: bytes | tuple[str, bytes], directory: str = "patches") -> Series:
    """Patches called a.patch, b.patch, … unless they bring a name."""
    named = [p if isinstance(p, tuple) else (f"{chr(97 + at)}.patch", p) for at, p in enumerate(patches)]
    return Series(tuple(PatchFile(name, data, directory) for name, data in named), directory)


def release(root: Path, version: str, files: Mapping[str, str | bytes] | str) -> Path:
    """A package at root/VERSION/vllm; a text alone is that of FILE."""
    package = root / version / "vllm"
    for path, text in ({FILE: files} if isinstance(files, str) else files).items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(text if isinstance(text, bytes) else text.encode())
    package.mkdir(parents=True, exist_ok=True)
    return package


def table(root: Path, series_of_all: Series, **releases: Mapping[str, str | bytes] | str) -> TriageTable:
    """Triage of one series on releases given as v28=…, v29=…: versions 0.28.0, 0.29.0."""
    return triage([TriagePin(version, version, release(root, version, files), series_of_all)
                   for version, files in ((f"0.{name[1:]}.0", files) for name, files in releases.items())])
