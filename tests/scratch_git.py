"""Small git repositories for tests, free of the machine's git settings; and a fingerprint of all that one holds."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "GIT_CONFIG_GLOBAL": os.devnull,
               "GIT_CONFIG_NOSYSTEM": "1", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org",
               "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}


class ScratchGit:
    """A repository with a work tree at `root`, its first branch called main."""

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.git("init", "-q", "-b", "main", *options)

    def git(self, *arguments: str, said: bytes = b"") -> str:
        done = subprocess.run(["git", "-c", "protocol.file.allow=always", *arguments], cwd=self.root, env=ENVIRONMENT,
                              input=said, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, (arguments, done.stderr)
        return os.fsdecode(done.stdout).strip()

    def commit(self, files: Mapping[str, str | bytes | None]) -> str:
        """Commit files on the branch that is checked out (None deletes one).  Returns the commit's id."""
        for name, content in files.items():
            path = self.root / name
            if content is None:
                path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "words")
        return self.git("rev-parse", "HEAD")

    def branch(self, name: str, files: Mapping[str, str | bytes | None], at: str = "main") -> str:
        """A branch from another with one commit more; `main` is checked out after it."""
        self.git("checkout", "-q", "-b", name, at)
        made = self.commit(files)
        self.git("checkout", "-q", "main")
        return made


def fingerprint(root: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below a directory: path → (type and mode, content or a link's target).  Time stamps are left out."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            found[str(path.relative_to(root))] = path.lstat().st_mode, content
    return found
