"""Which state of this project measured: the commit, or a hash of its files where git is not there.

`ray job submit --working-dir .` leaves .git behind, so a job on a cluster is known by content.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from pathlib import Path

CODE = ("farm", "jobs", "patches", "configs")


def project_state(series: Path) -> tuple[str, bool | None]:
    """(commit, whether the work tree differs from it) of the repository that keeps this series directory.

    Where git is not there or does not keep it: (`content-<hash>` of the project around the series, None).
    """
    top = _git(series, "rev-parse", "--show-toplevel")
    if top is None or _git(series, "ls-files", "--error-unmatch", "series") is None:
        return f"content-{content_hash(series.parent)}", None
    return _git(series, "rev-parse", "HEAD") or "", bool(_git(Path(top), "status", "--porcelain"))


def content_hash(root: Path) -> str:
    """SHA-256 (16 digits) over names and bytes of all that could change a result; byte code is left out."""
    digest = hashlib.sha256()
    files = (f for folder in CODE for f in (root / folder).rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    for file in sorted(files):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _git(root: Path, *args: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None
