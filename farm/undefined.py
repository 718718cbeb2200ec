"""Undefined names of Python sources, by ruff; its answers are kept by content hash, since starting it takes 20 ms."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tempfile
import tokenize
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.errors import UsageError
from farm.modules import Answers, sha256_of

FORMAT = 2  # of the kept answers
DEADLINE_S = 20.0  # 1 MB of source takes it less than 1 s
# undefined name, in __all__, local before its assignment; and a name that only a star import can give
EXPORTED, TOO_EARLY, STARRED = "F822", "F823", "F405"
RULES = ("F821", EXPORTED, TOO_EARLY, STARRED)
_EXCUSED = re.compile(r"#\s*noqa\b[^#]*\bF82[123]\b", re.IGNORECASE)  # a line that says so itself; a bare one excuses nothing
_ADVICE = "install it beside the farm: pip install ruff"


@dataclass(frozen=True)
class Undefined:
    """A name that a line uses and nothing defines, and the rule that says so: STARRED: unless a star import does."""

    line: int
    name: str
    rule: str


def undefined_names(sources: Iterable[bytes], cache: Path) -> Mapping[bytes, tuple[Undefined, ...] | None]:
    """Undefined names per source; None: ruff could not read that one, nested too deeply for it.

    One process for all that the cache lacks.  Sources that do not compile have no answer worth asking for.
    Raises UsageError without a ruff that works.
    """
    wanted = dict.fromkeys(sources)
    if not wanted:
        return {}
    program = find_ruff()
    stat = program.stat()
    answers = Answers(cache / "check" / f"ruff-{stat.st_size:x}-{stat.st_mtime_ns:x}-{FORMAT}")  # another ruff, another answer
    found: dict[bytes, tuple[Undefined, ...] | None] = {}
    missing: list[bytes] = []
    for source in wanted:
        kept = _kept(answers.get(sha256_of(source)))
        if kept is None:
            missing.append(source)
        else:
            found[source] = kept
    for source, names in _ask(program, missing).items():
        found[source] = names
        if names is not None:
            answers.put(sha256_of(source), [[n.line, n.name, n.rule] for n in names])
    return found


def find_ruff() -> Path:
    """The ruff of the farm's own environment, else the one on PATH.  Raises UsageError where there is none."""
    try:
        from ruff import find_ruff_bin  # here: what only the cache answers needs no ruff package

        return Path(find_ruff_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("ruff")
    if found is None:
        raise UsageError(f"ruff is not installed, and it finds the undefined names: {_ADVICE}")
    return Path(found)


def _kept(answer: Any) -> tuple[Undefined, ...] | None:
    try:
        return None if answer is None else tuple(Undefined(int(line), str(name), str(rule)) for line, name, rule in answer)
    except (TypeError, ValueError):
        return None


def _ask(program: Path, sources: Collection[bytes]) -> dict[bytes, tuple[Undefined, ...] | None]:
    """All in one process; where that dies, each alone, so that one source costs no other its answer."""
    if not sources:
        return {}
    said = _run(program, [*sources])
    if isinstance(said, list):
        return dict(zip(sources, said, strict=True))
    empty = _run(program, [b""])
    if not isinstance(empty, list):
        raise UsageError(f"{program} does not work: {empty}; {_ADVICE}")
    alone = {source: _run(program, [source]) for source in sources}
    return {source: answer[0] if isinstance(answer, list) else None for source, answer in alone.items()}


def _run(program: Path, sources: list[bytes]) -> list[tuple[Undefined, ...]] | str:
    """Names per source, or why there are none."""
    with tempfile.TemporaryDirectory(prefix="farm-names-") as folder:
        names = [f"{number}.py" for number in range(len(sources))]
        for name, source in zip(names, sources, strict=True):
            Path(folder, name).write_bytes(_utf8(source))
        # Builtins are those of the newest Python that vLLM runs on; named files escape ruff's default excludes.
        command = [str(program), "check", "--isolated", "--no-cache", "--ignore-noqa", "--target-version", "py313",
                   "--select", ",".join(RULES), "--output-format", "json", *names]
        try:
            done = subprocess.run(command, cwd=folder, env={}, stdin=subprocess.DEVNULL, capture_output=True,
                                  timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            return f"it did not finish within {DEADLINE_S:.0f} s"
        except OSError as error:
            return str(error)
    said = (done.stderr.decode("utf-8", errors="replace").strip().splitlines() or ["nothing"])[0]
    if done.returncode not in (0, 1):
        return f"it ended with {done.returncode} and said: {said}"
    try:
        return _read(json.loads(done.stdout), names, sources)
    except (ValueError, KeyError, TypeError) as error:
        return f"its report cannot be read: {error!r}"


def _utf8(source: bytes) -> bytes:
    """The same text in the one encoding that ruff reads."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        return source.decode(encoding).encode()
    except (SyntaxError, UnicodeError, LookupError):
        return source


def _read(report: list[dict[str, Any]], names: list[str], sources: list[bytes]) -> list[tuple[Undefined, ...]]:
    found: dict[str, list[Undefined]] = {name: [] for name in names}
    for each in report:
        quoted = re.search("`([^`]+)`", each["message"])
        if each["code"] in RULES and quoted:
            found[Path(each["filename"]).name].append(Undefined(int(each["location"]["row"]), quoted[1], each["code"]))
    return [_unexcused(found[name], source) for name, source in zip(names, sources, strict=True)]


def _unexcused(names: list[Undefined], source: bytes) -> tuple[Undefined, ...]:
    lines = re.split(r"\r\n|\r|\n", source.decode("utf-8", errors="replace")) if names else []
    return tuple(n for n in names if n.line > len(lines) or not _EXCUSED.search(lines[n.line - 1]))
