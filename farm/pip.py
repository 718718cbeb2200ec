"""pip as a process: run it, show that it moves, and say why it failed.

pip ends with the same words when the index has no such version and when no
index could be reached.  Its debug log (`--log`) tells them apart: there each
index page that did not come is named, with its status.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from farm.lifeline import Supervised

Progress = Callable[[str], None]
DEADLINE_S = 7200.0
QUIET_S = 5.0  # at most one line of progress in so long
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX",
            "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV")
_TROUBLE = re.compile(
    r"Retrying \(Retry|[Cc]onnection (?:broken|interrupted|error|refused|reset)|Read timed out|IncompleteRead|"
    r"incomplete-download|not enough bytes were received|HTTPS?ConnectionPool|ProxyError|SSLError|ssl certificate|"
    r"not a trusted or secure host|DO NOT MATCH THE HASHES|is invalid\.$|Could not fetch URL \S+: (?!404 )|"
    r"HTTP error (?!404)\d+|NameResolutionError|Temporary failure in name resolution")
_ABSENT = re.compile(r"(No matching distribution found for \S+|Could not find a version that satisfies the requirement \S+)")
_NOISE = re.compile(r"^\d{4}-\d\d-\d\dT\S+ |^\s*(?:WARNING|ERROR): |Retrying \(Retry\(.*?\)\) after |<\S+ object at 0x\w+>: ")
_VERSIONS = re.compile(r"\(from versions: ([^)]*)\)")
_OTHER_PYTHON = re.compile(r"Ignored the following versions that require a different python version: (.*)")
_SHOWN = re.compile(r"\s*(Downloading [^-\s]+-[^-\s]+|Collecting \S+|Building wheel for \S+|Installing collected)")


class Cause(str, Enum):
    ABSENT = "absent"  # the indexes answered, and none has it
    NETWORK = "network"
    DISK = "disk"
    NO_PIP = "no-pip"
    DEADLINE = "deadline"
    OTHER = "other"


class PipFailed(Exception):
    """pip ended with an error.

    `sentence` is the cause in a line; `versions` are those that the index offered instead; `touched` is True
    where pip may have installed a part, so that the environment must not be used; `log` holds everything.
    """

    def __init__(self, cause: Cause, sentence: str, versions: Sequence[str] = (), touched: bool = True,
                 log: Path | None = None) -> None:
        super().__init__(sentence)
        self.cause, self.sentence, self.versions, self.touched, self.log = cause, sentence, tuple(versions), touched, log


@dataclass(frozen=True)
class Pip:
    """pip of one interpreter.  `logs` is a directory for output and debug logs."""

    python: Path
    logs: Path
    progress: Progress

    def run(self, arguments: Sequence[str], what: str, *, env: Mapping[str, str] | None = None,
            deadline_s: float = DEADLINE_S) -> None:
        """`python -m pip ARGUMENTS`; `what` names the work in lines of progress.  Raises PipFailed.

        The process and its children end with us, however we end.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="pip-", dir=self.logs))
        output, log = scratch / "output.txt", scratch / "debug.txt"
        command = [str(self.python), "-m", "pip", "--log", str(log), "--no-input", *arguments]
        self.progress(what)
        with Supervised.start(command, env=pip_environment(os.environ, env or {}), cwd=scratch, stdout_path=output) as child:
            code = self._follow(child, output, what, deadline_s)
        said = _read(output)
        if code is None:
            raise PipFailed(Cause.DEADLINE, f"pip did not finish within {deadline_s:.0f} s", log=log)
        if code != 0:
            raise diagnose(said, _read(log), log)
        for file in (output, log):
            file.unlink(missing_ok=True)
        scratch.rmdir()

    def _follow(self, child: Supervised, output: Path, what: str, deadline_s: float) -> int | None:
        """Wait for the end, passing on a line of pip's now and then; None: past the deadline."""
        deadline = time.monotonic() + deadline_s
        shown, spoke = "", time.monotonic()
        while (code := child.wait(timeout_s=0.5)) is None and time.monotonic() < deadline:
            if time.monotonic() - spoke < QUIET_S:
                continue
            lines = [match[1] for line in _read(output).splitlines() if (match := _SHOWN.match(line))]
            if lines and lines[-1] != shown:
                shown, spoke = lines[-1], time.monotonic()
                self.progress(f"{what}: {shown.lower()}")
        return code


def pip_environment(base: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment as pip may have it: the user's pip settings and proxies pass, what leads it astray does not."""
    kept = {k: v for k, v in base.items() if k not in _DROPPED and not k.startswith("RAY_")}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off", "PIP_RESUME_RETRIES": "5", **extra}


def diagnose(output: str, debug_log: str, log: Path | None = None) -> PipFailed:
    """Why pip ended with an error, from its output and its debug log."""
    touched = "Installing collected packages" in output
    both = f"{output}\n{debug_log}"

    def failed(cause: Cause, sentence: str, versions: Sequence[str] = ()) -> PipFailed:
        return PipFailed(cause, " ".join(sentence.split())[:300], versions, touched, log)

    if "No module named pip" in output:
        return failed(Cause.NO_PIP, "No module named pip")
    if "No space left on device" in both:
        return failed(Cause.DISK, "No space left on device")
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.lower().startswith("error:")]
    trouble = next((line for line in both.splitlines() if _TROUBLE.search(line)), None)
    if trouble is not None:  # even where pip found other versions: an index that did not answer may have this one
        return failed(Cause.NETWORK, _NOISE.sub("", trouble))
    if _ABSENT.search(output):
        listed = _VERSIONS.search(output)
        versions = [v.strip() for v in listed[1].split(",") if v.strip() not in ("", "none")] if listed else []
        python = _OTHER_PYTHON.search(output)
        told = f"; of other Python versions: {python[1]}" if python else ""
        return failed(Cause.ABSENT, f"{_ABSENT.findall(output)[-1]}{told}", versions)
    last = [line for line in output.splitlines() if line.strip()]
    return failed(Cause.OTHER, "; ".join(errors[:2]) or (last[-1] if last else "pip said nothing"))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
