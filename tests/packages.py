"""A small vllm package and patches of it, for tests."""

from __future__ import annotations

import os
import stat
from pathlib import Path

ONE = "".join(f"line {n}\n" for n in range(1, 21))


def make_package(root: Path) -> Path:
    """`root/vllm` with v1/one.py and v1/two.py of twenty lines, an empty file, an executable, one with CRLF and one without
    a newline at its end."""
    package = root / "vllm"
    (package / "v1").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_version.py").write_text("__version__ = version = '0.29.0'\n")
    for name in ("one", "two"):
        (package / f"v1/{name}.py").write_text(ONE)
    (package / "v1/empty.py").write_bytes(b"")
    (package / "v1/run.sh").write_text(ONE)
    (package / "v1/run.sh").chmod(0o755)
    (package / "v1/crlf.py").write_bytes(ONE.replace("\n", "\r\n").encode())
    (package / "v1/bare.py").write_bytes(b"a\nb\nc")
    return package


def hunk(old: str = "line 10", new: str = "line ten", at: int = 8) -> bytes:
    """Five lines of a file like ONE from line `at`, the third of them changed."""
    n = at + 2
    return (f"@@ -{at},5 +{at},5 @@\n line {n - 2}\n line {n - 1}\n-{old}\n+{new}\n line {n + 1}\n line {n + 2}\n").encode()


def headers(path: str = "v1/one.py", prefix: tuple[str, str] = ("a/", "b/")) -> bytes:
    return f"--- {prefix[0]}{path}\n+++ {prefix[1]}{path}\n".encode()


def diff(path: str = "v1/one.py", old: str = "line 10", new: str = "line ten", at: int = 8,
         prefix: tuple[str, str] = ("a/", "b/")) -> bytes:
    """A patch of one hunk, without words."""
    return headers(path, prefix) + hunk(old, new, at)


def new_file(path: str, text: str = "x = 1\n") -> bytes:
    lines = text.splitlines(keepends=True)
    head = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    return (head + "".join(f"+{line}" for line in lines)).encode()


def gone_file(path: str, text: str = ONE) -> bytes:
    lines = text.splitlines(keepends=True)
    head = f"--- a/{path}\n+++ /dev/null\n@@ -1,{len(lines)} +0,0 @@\n"
    return (head + "".join(f"-{line}" for line in lines)).encode()


def indented(data: bytes, by: bytes = b"    ") -> bytes:
    return b"".join(by + line for line in data.splitlines(keepends=True))


def state(folder: Path) -> dict[str, object]:
    """Everything below a directory: kinds, modes, contents, targets of links."""
    found: dict[str, object] = {}
    for at, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = Path(at, name)
            mode = path.lstat().st_mode
            what = os.readlink(path) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
            found[str(path.relative_to(folder))] = (mode, what)
    return found
