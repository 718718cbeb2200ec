"""What a host remembers of a card: its errors, its quarantine, its probes, and how it was when a run began.

A journal of JSON lines in the host's state folder, shared by all users of the
host, so a quarantine outlives the process that imposed it.  Lines are appended
in one write under a lock; one that was cut off by a crash is passed over.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from farm import jsontext
from farm.hostfile import content, lock, open_shared, read, told
from farm.records import Reason, utc_now

COUNTED = timedelta(hours=24)  # an older ERROR no longer counts: a card that errs once a week is not a broken one
LONGEST = 256 * 1024  # bytes of a journal, then all but its newest lines go
KEPT_LINES = 400
LOCKED_S = 10.0
DETAIL_CHARS = 500


@dataclass(frozen=True)
class CardError:
    """An ERROR of the card's own making."""

    at_utc: datetime
    reason: Reason
    detail: str
    run: str
    cell: str


@dataclass(frozen=True)
class Quarantine:
    """A card that is out: why, until when, and the errors that led to it.

    Past `until_utc` it is on trial: a passed probe lets it return, a failed one puts it in again.
    """

    reason: Reason
    until_utc: datetime
    errors: tuple[CardError, ...] = ()

    @property
    def over(self) -> bool:
        return utc_now() >= self.until_utc

    def __str__(self) -> str:
        last = f", last: {self.errors[-1].detail.splitlines()[0]}" if self.errors and self.errors[-1].detail else ""
        return (f"in quarantine until {self.until_utc:%F %T} UTC for {self.reason.value} "
                f"({counted(self.errors)}{last})")


def counted(errors: Sequence[CardError]) -> str:
    return f"{len(errors)} error{'' if len(errors) == 1 else 's'} of its own making"


@dataclass(frozen=True)
class Probed:
    """A health probe: passed, failed or unknown (it could not be carried out)."""

    at_utc: datetime
    outcome: str
    detail: str


@dataclass(frozen=True)
class Start:
    """What must not change while a run goes on; None: the card does not say."""

    power_limit_w: float | None = None
    driver: str | None = None


@dataclass(frozen=True)
class History:
    """`errors` are those that count: since the last quarantine, and not older than COUNTED."""

    name: str | None = None
    errors: tuple[CardError, ...] = ()
    quarantine: Quarantine | None = None  # also one that is over, until a passed probe ends it
    probed: Probed | None = None
    starts: Mapping[str, Start] = field(default_factory=dict)


@dataclass(frozen=True)
class Journal:
    """The journal of one card, by its UUID, below the host's state folder.  Every method raises FarmError where the file
    cannot be used."""

    state: Path
    card: str
    name: str | None = None

    @property
    def path(self) -> Path:
        return self.state / f"{self.card}.journal"

    def history(self) -> History:
        """What is known of the card; of one without a journal, nothing is.  Raises FarmError."""
        with told(self.path):
            written = read(self.path)
        return History() if written is None else _fold(written)

    def opened(self, run: str, now: Start) -> Start:
        """How the card was when the run began here: as it is `now` for the first worker that asks."""
        with self._writing() as write:
            start = self.history().starts.get(run)
            if start is None:
                start = now
                write({"event": "start", "run": run, "power_limit_w": now.power_limit_w, "driver": now.driver})
        return start

    def probed(self, outcome: str, detail: str) -> None:
        with self._writing() as write:
            write({"event": "probe", "outcome": outcome, "detail": detail[:DETAIL_CHARS]})

    def returned(self) -> None:
        """A passed probe has ended a quarantine that was over."""
        with self._writing() as write:
            write({"event": "returned"})

    def erred(self, error: CardError, *, after: int, for_s: float) -> Quarantine | None:
        """Note an ERROR of the card's own making; the quarantine that it leads to.

        That is its `after`th one that counts, or any on a card that is on trial.
        """
        with self._writing() as write:
            before = self.history()
            errors = (*before.errors, error)
            write({"event": "error", **_said(error)})
            on_trial = before.quarantine is not None
            if len(errors) < after and not on_trial:
                return None
            quarantine = Quarantine(error.reason, utc_now() + timedelta(seconds=for_s), errors)
            write({"event": "quarantined", "reason": error.reason.value, "until_utc": quarantine.until_utc.isoformat(),
                   "errors": [_said(e) for e in errors]})
            return quarantine

    @contextmanager
    def _writing(self) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        with told(self.path):
            fd = open_shared(self.path)
            try:
                if not lock(fd, LOCKED_S):  # for the few lines that another writer may be writing
                    raise OSError(f"another process has it locked for {LOCKED_S:.0f} s already")
                if os.fstat(fd).st_size > LONGEST:
                    _shorten(fd)
                yield lambda event: _append(fd, {"at_utc": utc_now().isoformat(), "card_name": self.name, **event})
            finally:
                os.close(fd)


def _append(fd: int, event: Mapping[str, Any]) -> None:
    size = os.fstat(fd).st_size
    # A line without an end: its writer was killed, and this one must not be lost with it.
    cut_off = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
    line = b"\n" * cut_off + json.dumps(event).encode() + b"\n"
    if os.pwrite(fd, line, size) < len(line):  # it took what fitted, and says no more than that
        os.ftruncate(fd, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def _fold(text: bytes) -> History:
    name: str | None = None
    errors: list[CardError] = []
    quarantine: Quarantine | None = None
    probed: Probed | None = None
    starts: dict[str, Start] = {}
    for line in text.split(b"\n"):
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # cut off, or not ours: passed over
            said = jsontext.loads(line)
            match said["event"]:
                case "start":
                    starts[jsontext.text(said["run"])] = _start(said)
                case "probe":
                    probed = Probed(jsontext.moment(said["at_utc"]), jsontext.text(said["outcome"]),
                                    jsontext.text(said["detail"]))
                case "error":
                    errors.append(_error(said))
                case "quarantined":
                    quarantine = Quarantine(Reason(said["reason"]), _until(said), tuple(map(_error, said["errors"])))
                    errors = []
                case "returned":
                    quarantine = None
            if said.get("card_name"):
                name = jsontext.text(said["card_name"])
    recent = tuple(e for e in errors if abs(utc_now() - e.at_utc) < COUNTED)  # of the future: by a clock that was wrong
    return History(name, recent, quarantine, probed, starts)


def _said(error: CardError) -> dict[str, Any]:
    return {"at_utc": error.at_utc.isoformat(), "reason": error.reason.value, "detail": error.detail[:DETAIL_CHARS],
            "run": error.run, "cell": error.cell}


def _error(said: Mapping[str, Any]) -> CardError:
    return CardError(jsontext.moment(said["at_utc"]), Reason(said["reason"]), jsontext.text(said["detail"]),
                     jsontext.text(said["run"]), jsontext.text(said["cell"]))


def _start(said: Mapping[str, Any]) -> Start:
    limit, driver = said["power_limit_w"], said["driver"]
    return Start(None if limit is None else jsontext.number(limit), None if driver is None else jsontext.text(driver))


def _until(said: Mapping[str, Any]) -> datetime:
    """When a quarantine ends; one that begins in the future was imposed by a wrong clock, and the card is on trial."""
    begins = jsontext.moment(said["at_utc"])
    return min(begins, utc_now()) if begins - utc_now() > COUNTED else jsontext.moment(said["until_utc"])


def _shorten(fd: int) -> None:
    """In place, since a sticky folder lets nobody replace another user's file.  Killed half way, it leaves lines twice."""
    kept = b"\n".join(content(fd).split(b"\n")[-KEPT_LINES:])[-LONGEST:]
    os.pwrite(fd, kept, 0)
    os.ftruncate(fd, len(kept))
