"""Whether a card works, and whether an attempt's end may be the card's fault.

The probe is a short script in a process of its own: it allocates, computes, compares and reads back, with a deadline.
What is said of a card comes from the probe and from NVML alone, never from what a server or a test printed: a patch
under test may print anything.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from farm import folders, jsontext
from farm.bench import Card
from farm.lifeline import ProcessesLeft, Supervised
from farm.records import Outcome, Reason, Verdict
from farm.supervisor import signal_name

_INSIDE = Path(__file__).parent / "inside"
SCRIPTS = {"cpu": _INSIDE / "health_cpu.py", "cuda": _INSIDE / "health_cuda.py"}
DEADLINE_S = {"cpu": 60.0, "cuda": 180.0}  # of about 0.3 s of work, and 10 s of which most is the import of torch
_SOMEBODY_ENDED_IT = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)  # the kernel, short of memory, among them


class Blame(str, Enum):
    """Whose making an attempt's end is."""

    CARD = "card"  # counts towards quarantine
    SUSPECT = "suspect"  # the card is probed: failed, it counts
    ELSEWHERE = "elsewhere"  # nothing to ask the card


# Every reason that an ERROR may have and that is not named here is SUSPECT: a server that dies, stalls or goes silent,
# tests that crash, a fault of the farm's own.  A patch, a full disk or a broken card look the same from outside, so
# the probe decides.
_BLAME = {
    Reason.CARD_UNHEALTHY: Blame.CARD,  # a probe failed
    Reason.CARD_LOST: Blame.CARD,  # NVML says that it is gone
    Reason.MEMORY_HELD: Blame.CARD,  # held by no process that there is: only a reset of the card helps
    Reason.CARD_BUSY: Blame.ELSEWHERE,  # somebody else's process
    Reason.CARD_CHANGED: Blame.ELSEWHERE,  # somebody set another power limit
    Reason.NO_CARD: Blame.ELSEWHERE,  # nothing to probe
    Reason.ENV_BUILD_FAILED: Blame.ELSEWHERE,  # network, disk, pip
    Reason.BAD_CONFIG: Blame.ELSEWHERE,
    Reason.ISOLATION_MISSING: Blame.ELSEWHERE,  # bubblewrap is not installed
    Reason.ACTOR_DIED: Blame.ELSEWHERE,  # said by the driver; the next actor probes before its first use
    Reason.NODE_DIED: Blame.ELSEWHERE,
}


def blame(outcome: Outcome) -> Blame:
    """Whose making an outcome is.

    A FAIL is suspect too: wrong results of a faulty card must never read as a verdict about a patch.
    """
    if outcome.verdict is Verdict.ERROR:
        return _BLAME.get(outcome.reason, Blame.SUSPECT)
    return Blame.SUSPECT if outcome.verdict is Verdict.FAIL else Blame.ELSEWHERE


@dataclass(frozen=True)
class Interpreter:
    """What the probe runs in: for a GPU a pin's, which has torch; for a CPU slot our own will do."""

    python: Path
    env: Mapping[str, str] = field(default_factory=dict)


def own_interpreter(marks: Mapping[str, str]) -> Interpreter:
    """The farm's own Python with nothing but PATH and the marks of a run, for CPU slots."""
    return Interpreter(Path(sys.executable), {"PATH": os.environ.get("PATH", os.defpath), **marks})


@dataclass(frozen=True)
class Examined:
    """What a probe found.  `outcome`: passed, failed, or unknown (it could not be carried out)."""

    outcome: str
    detail: str
    took_s: float

    @property
    def passed(self) -> bool:
        return self.outcome == "passed"


def examine(card: Card, interpreter: Interpreter, *, script: Path | None = None, deadline_s: float | None = None) -> Examined:
    """Probe a card with the script of its kind (or another one that speaks like it).  Never raises for what it finds."""
    limit = DEADLINE_S[card.kind] if deadline_s is None else deadline_s
    begun = time.monotonic()
    try:
        with folders.private() as folder:
            argv = [str(interpreter.python), "-s", str(script or SCRIPTS[card.kind])]
            with Supervised.start(argv, env=interpreter.env, cwd=folder, stdout_path=folder / "out",
                                  stderr_path=folder / "err", cores=card.cores) as child:
                status = child.wait(limit)
            found = _found(folder, status, limit)
    except ProcessesLeft as error:  # it hangs in the driver
        found = ("failed", f"the probe hung and cannot be ended: {error}")
    except OSError as error:
        found = ("unknown", f"the probe could not be started: {error}")
    return Examined(*found, time.monotonic() - begun)


def _found(folder: Path, status: int | None, limit_s: float) -> tuple[str, str]:
    if status is None:
        return "failed", f"the probe did not end within {limit_s:.0f} s"
    said = _lines(folder / "out")
    try:
        found = jsontext.loads(said[-1]) if said else {}
        (outcome, detail), = found.items()
    except (ValueError, AttributeError):
        outcome = detail = None
    if (outcome, status) in (("passed", 0), ("failed", 1), ("unknown", 0)):
        return outcome, str(detail)
    if status in _SOMEBODY_ENDED_IT:
        return "unknown", f"somebody ended the probe with {signal_name(-status)}; is the machine short of memory?"
    last = next(reversed(_lines(folder / "err")), "it said nothing")
    ended = f"signal {signal_name(-status)}" if status < 0 else f"exit status {status}"
    return "failed", f"the probe ended with {ended}: {last}"


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [line.strip() for line in text.splitlines() if line.strip()]
