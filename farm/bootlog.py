"""What vLLM printed while it booted: facts, refusals and root causes, as text only.

Pure.  Wordings of 0.27 to 0.30 (DOMAIN.md 2), with process prefixes and
colour.  A fact whose line is there in words that are not known ends in
`gaps`; nothing here raises because of what a log says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farm.bench import BootFacts

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\((?P<process>[A-Za-z][^()]* pid=\d+)\) ?")
_RECORD = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:.]+ \[[^\]]+\] ?")


@dataclass(frozen=True)
class Line:
    """One log line without colour: `process` and `level` are empty where it names none."""

    process: str
    level: str
    text: str


def split(lines: Iterable[str]) -> Iterator[Line]:
    for raw in lines:
        text = _COLOUR.sub("", raw).rstrip("\r\n")
        process = level = ""
        if match := _PROCESS.match(text):
            process, text = match["process"], text[match.end():]
        if match := _RECORD.match(text):
            level, text = match["level"], text[match.end():]
        yield Line(process, level, text)


# --- facts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fact:
    """`exact` captures the value; a line that only `mention` finds makes the fact a gap."""

    name: str
    exact: re.Pattern
    mention: re.Pattern


_FACTS = (
    _Fact("pool_tokens", re.compile(r"\b[A-Z]+ KV cache size: (\d[\d,]{0,17}) tokens"), re.compile(r"KV cache size", re.I)),
    _Fact("block_size", re.compile(r"[Ss]etting attention block size to (\d[\d,]{0,11}) tokens"),
          re.compile(r"attention block size", re.I)),
    _Fact("mamba_padding_percent", re.compile(r"[Pp]adding mamba page size by (\d+(?:\.\d+)?)%"),
          re.compile(r"padding .*mamba", re.I)),
    _Fact("backend", re.compile(r"Using ([A-Z][A-Z0-9_]+) attention backend out of|"
                                r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) backend(?:\.| \(selected)|"
                                r"KV cache layout for ([A-Z][A-Z0-9_]+) backend"),
          re.compile(r"Using .*attention backend|AttentionBackendEnum", re.I)),
    _Fact("kv_layout", re.compile(r"Using ([A-Z][A-Z0-9]+) KV cache layout"), re.compile(r"KV cache layout", re.I)),
    _Fact("connector", re.compile(r"Creating v1 connector with name: (\w+)"),
          re.compile(r"creating .*connector", re.I)),
    _Fact("unknown_knobs", re.compile(r"Unknown vLLM environment variable detected: (\w+)"),
          re.compile(r"unknown .*environment variable", re.I)),
)
_PINNED = re.compile(r"skipped memory profiling|Explicitly set \(.*for KV cache")  # GPU worker, CPU worker
_PROFILED = re.compile(r"Available KV cache memory: -?[\d.]+|Auto set \(.*for KV cache")
_POOL_ORIGIN = re.compile(r"memory profiling|Available KV cache memory|GiB for KV cache", re.I)
_JIT = re.compile(r"JIT compilation during inference: ")
_JIT_MENTION = re.compile(r"JIT compil\w* during (inference|serving)", re.I)
_WORTH_READING = re.compile(r"KV cache|attention block|mamba|backend|connector|environment variable|JIT compil|"
                            r"memory profiling|Starting vLLM|startup complete", re.I)
_SERVING = re.compile(r"Starting vLLM (API )?server|Application startup complete")


def parse(lines: Iterable[str]) -> BootFacts:
    """Facts from a boot's log.  Numbers: the last that was said; names: all distinct ones, joined by ", ";
    unknown knobs: one entry a warning.

    `boot_s`, `caches`, `argv` and `env` stay at their defaults: the log does not know them.
    """
    found: dict[str, list[str]] = {fact.name: [] for fact in _FACTS}
    mentioned: set[str] = set()
    pinned: bool | None = None
    jit = 0
    # Access lines outnumber the others by far, once a gauge is being sampled.
    for line in split(raw for raw in lines if _WORTH_READING.search(raw)):
        for fact in _FACTS:
            if match := fact.exact.search(line.text):
                found[fact.name].append(next(group for group in match.groups() if group))
            elif fact.mention.search(line.text):
                mentioned.add(fact.name)
        if _PINNED.search(line.text):
            pinned = True
        elif _PROFILED.search(line.text):
            pinned = False
        elif _POOL_ORIGIN.search(line.text):
            mentioned.add("pool_pinned")
        if _JIT.search(line.text):
            jit += 1
        elif _JIT_MENTION.search(line.text):
            mentioned.add("jit_lines")
        if _SERVING.search(line.text):
            mentioned |= {"pool_tokens", "pool_pinned"}  # every server that serves has said these
    known = {name for name, values in found.items() if values}
    known |= {"pool_pinned"} if pinned is not None else set()
    known |= {"jit_lines"} if jit else set()
    return BootFacts(
        pool_tokens=_integer(found["pool_tokens"]),
        pool_pinned=pinned,
        block_size=_integer(found["block_size"]),
        mamba_padding_percent=float(found["mamba_padding_percent"][-1]) if found["mamba_padding_percent"] else None,
        backend=_names(found["backend"]),
        kv_layout=_names(found["kv_layout"]),
        connector=_names(found["connector"]),
        jit_lines=jit,
        unknown_knobs=tuple(found["unknown_knobs"]),  # one entry a warning: a made-up knob must give exactly one
        gaps=tuple(sorted(mentioned - known)),
    )


def _integer(values: list[str]) -> int | None:
    return int(values[-1].replace(",", "")) if values else None


def _names(values: list[str]) -> str | None:
    return ", ".join(dict.fromkeys(values)) or None


# --- how a boot failed ----------------------------------------------------------------------

_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above exception", "The above exception was the direct cause")
_FATAL = "Fatal Python error: "  # faulthandler's, of a crash in compiled code
_GENERIC = re.compile(r"Engine core initialization failed|EngineDeadError|WorkerProc initialization failed|"
                      r"Worker failed with error|see stack trace|^SystemExit", re.I)
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_CONFIG_FRAME = re.compile(r'File ".*/vllm/(config/\w+|engine/arg_utils)\.py", line \d+')
_CONFIG_KINDS = ("ValueError", "NotImplementedError", "ValidationError")
_SENTENCES = re.compile(r"To serve at least one request with the model's max seq len|"
                        r"No available memory for the cache blocks|"
                        r"KV connector \S+ is incompatible with")
_PYDANTIC_DETAIL = re.compile(r" \[type=.*$")
_USAGE = re.compile(r"^\S.*: error: (?P<sentence>.+)$")


@dataclass(frozen=True)
class _Failure:
    """One exception as printed, with what followed its last frame."""

    kind: str
    message: str
    in_config: bool  # some frame lies in vllm/config or vllm/engine/arg_utils
    details: tuple[str, ...]  # indented lines below the message (pydantic puts its sentences there)

    def sentence(self) -> str:
        """The message; of pydantic, which prints `N validation errors for X` and a field first, what follows them."""
        if not self.kind.endswith("ValidationError"):
            return self.message
        said = [_PYDANTIC_DETAIL.sub("", d.strip()).removeprefix("Value error, ") for d in self.details]
        return "; ".join(d for d in said if d and not d.startswith("For further information")) or self.message

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence()}" if self.message else self.kind


def refusal(lines: Iterable[str]) -> str | None:
    """vLLM's own sentence where it refused the configuration, else None.

    A refusal is a bad argument, a configuration that its validation turns down, or a pool
    that cannot hold one request; anything else that kills a boot is `failure`'s.
    """
    kept = list(lines)
    for line in split(kept):
        if not line.process and not line.level and (match := _USAGE.match(line.text)):
            return match["sentence"]
    for error in _failures(kept):
        if _SENTENCES.match(error.message):
            return error.message
        if error.in_config and error.kind.rpartition(".")[2] in _CONFIG_KINDS:
            return error.sentence()
    return None


def failure(lines: Iterable[str]) -> str | None:
    """The root cause of a boot that died: the first exception that is not an echo of another process's."""
    kept = list(lines)
    errors = [str(error) for error in _failures(kept)]
    fatal = [line.text for line in split(kept) if line.text.startswith(_FATAL)]
    return next((e for e in errors if not _GENERIC.search(e)), None) or next(iter(fatal + errors), None)


def _failures(lines: Iterable[str]) -> Iterator[_Failure]:
    """Exceptions in the order in which their tracebacks began; of a chain, only its last.

    Processes write between each other's lines, so each has its own reader.  Tracebacks that
    vLLM logs as warnings are news of optional parts, not of a failure.
    """
    readers: dict[str, _Reader] = {}
    begun: list[_Reader] = []
    for line in split(lines):
        if line.level in ("DEBUG", "INFO", "WARNING"):
            continue
        reader = readers.get(line.process)
        if reader is not None and reader.take(line.text):
            continue
        if line.text.strip() == _TRACEBACK:
            readers[line.process] = reader = _Reader()
            begun.append(reader)
    for reader in begun:
        if reader.error is not None:
            yield reader.error


class _Reader:
    """Reads one process's traceback, or chain of tracebacks, line by line."""

    def __init__(self) -> None:
        self.error: _Failure | None = None
        self._in_config = False
        self._in_frames = True
        self._chained = False

    def take(self, text: str) -> bool:
        """False: the line is no longer part of this traceback."""
        if self._in_frames:
            if text.startswith(" ") or not text.strip():
                self._in_config |= bool(_CONFIG_FRAME.search(text))
                return True
            if match := _EXCEPTION.match(text):
                self.error = _Failure(match["kind"], match["message"] or "", self._in_config, ())
                self._in_frames = self._chained = False
                return True
            return False
        if text.startswith(_CHAIN):
            self._chained = True
            return True
        if self._chained and text.strip() == _TRACEBACK:
            self._in_frames = True
            return True
        if not text.strip():
            return True
        if text.startswith(" ") and self.error is not None and not self._chained:
            details = (*self.error.details, text)
            self.error = _Failure(self.error.kind, self.error.message, self.error.in_config, details)
            return True
        return False
