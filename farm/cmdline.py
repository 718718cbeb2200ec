"""Command lines of vLLM servers: which is one, and whether it says what was asked for.  Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_ENTRY = re.compile(r"(^|/)vllm[./]entrypoints[./]")  # a module or a file: vllm.entrypoints.cli.main, …/openai/api_server.py
_CLI = re.compile(r"(^|/)vllm$|(^|/)vllm[./]entrypoints[./]cli[./]main(\.py)?$")
_NUMBER = re.compile(r"-\d")


def is_server(argv: Sequence[str]) -> bool:
    """Whether a command line is that of a vLLM server: `vllm serve`, or a module of vllm.entrypoints by name or path."""
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        if _CLI.search(word):
            return after == "serve"
        if _ENTRY.search(word):
            return True
    return False


def values(argv: Sequence[str], flag: str) -> tuple[str, ...] | None:
    """The words that follow the last use of a flag; None where it is not used, or as `--no-…`."""
    use = {use.flag: use for use in _uses(argv)}.get(flag)
    return None if use is None or use.spelling != flag else use.values


def ignored(wanted: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Those of the wanted arguments that a command line does not say.  On both sides the last use of a flag counts."""
    said = {use.flag: use for use in _uses(argv)}
    asked = {use.flag: use for use in _uses(wanted)}
    return [str(use) for use in asked.values() if not use.met_by(said.get(use.flag))]


@dataclass(frozen=True)
class _Use:
    """A flag with the words that follow it; `--no-x` is a use of `--x`."""

    flag: str
    spelling: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.spelling, *self.values))

    def met_by(self, other: _Use | None) -> bool:
        """Words after a flag that takes none may be positional, so further ones of `other` do not count."""
        if other is None or self._negates != other._negates:
            return False
        return len(other.values) >= len(self.values) and all(map(_same, self.values, other.values))

    @property
    def _negates(self) -> bool:
        return self.spelling.startswith("--no-")


def _uses(words: Sequence[str]) -> Iterator[_Use]:
    flag = spelling = ""
    values: list[str] = []
    for word in [*words, "-"]:
        if not word.startswith("-") or _NUMBER.match(word):
            values.append(word)
            continue
        if flag:
            yield _Use(flag, spelling, tuple(values))
        name, equals, value = word.partition("=")
        head, dot, tail = name.partition(".")  # --compilation-config.key: vLLM reads `_` as `-` before the dot only
        spelling = head.replace("_", "-") + dot + tail
        flag = f"--{spelling[5:]}" if spelling.startswith("--no-") else spelling
        values = [value] if equals else []


def _same(one: str, other: str) -> bool:
    return one == other or (one[:1] in "{[" and _parsed(one) is not None and _parsed(one) == _parsed(other))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
