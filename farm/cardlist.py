"""The cards of a host as `farm cards` lists them: what each is, who has it, how it is, and its last verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timezone
from pathlib import Path
from typing import Any

from farm import cards
from farm.bench import Card
from farm.cardlock import CardLock, Holder, duration
from farm.cards import Reading
from farm.errors import FarmError
from farm.quarantine import History, Journal, counted
from farm.records import utc_now
from farm.store import Store

COLUMNS = ("card", "name", "kind", "capability", "memory GiB", "driver", "holder", "health", "last verdicts")
LAST = 5  # verdicts of a card
MOVING = ("clock_sm_mhz", "clock_memory_mhz", "temperature_c", "throttle_reasons")  # columns of schemas.CARD, in JSON alone
_LAST_VERDICTS = f"""
    select card, verdict, reason, run, cell, ended_utc from cells where card is not null
    qualify row_number() over (partition by card order by ended_utc desc, attempt desc) <= {LAST}
    order by ended_utc desc, attempt desc"""


@dataclass(frozen=True)
class LastVerdict:
    """How an attempt on the card ended."""

    verdict: str
    reason: str
    run: str
    cell: str
    ended_utc: str

    def __str__(self) -> str:
        return f"{self.verdict} {self.reason}" if self.verdict in ("ERROR", "INVALID", "FAIL") else self.verdict


@dataclass(frozen=True)
class CardLine:
    """One card.  Without `reading` and `conditions` it is not here (any more), or does not answer; `problem` says so."""

    uuid: str
    card: Card | None
    reading: Reading | None
    conditions: Mapping[str, Any]
    problem: str | None
    holder: Holder | None
    history: History
    verdicts: tuple[LastVerdict, ...]  # newest first

    @property
    def name(self) -> str | None:
        return self.card.name if self.card else self.history.name

    @property
    def health(self) -> str:
        """One sentence; the worst first."""
        history, quarantine = self.history, self.history.quarantine
        said = [self.problem] if self.problem else []
        if quarantine is not None:
            said.append(f"its quarantine for {quarantine.reason.value} is over since {quarantine.until_utc:%F %T} UTC; the "
                        "next run probes it before it returns" if quarantine.over else str(quarantine))
        if history.errors:
            last = history.errors[-1]
            said.append(f"{counted(history.errors)}, last {last.reason.value} at {last.at_utc:%F %T} UTC")
        if history.probed is not None:
            ago = duration((utc_now() - history.probed.at_utc).total_seconds())
            said.append(f"probe {history.probed.outcome} {ago} ago")
        return "; ".join(said) or "not probed yet"

    def row(self) -> tuple[Any, ...]:
        """In the order of COLUMNS."""
        card = self.card
        return (self.uuid, self.name, _kind(self.uuid, card), card and ".".join(map(str, card.capability or ())) or None,
                None if card is None or card.memory_bytes is None else round(card.memory_bytes / 2**30, 1),
                card and card.driver, self.holder and str(self.holder), self.health, ", ".join(map(str, self.verdicts)))

    def json(self) -> dict[str, Any]:
        """Everything, in values that JSON has; times are ISO 8601 in UTC."""
        card, reading, history, quarantine = self.card, self.reading, self.history, self.history.quarantine
        return {
            "card": self.uuid, "name": self.name, "kind": _kind(self.uuid, card), "host": card and card.host,
            "capability": card and card.capability and ".".join(map(str, card.capability)),
            "memory_bytes": card and card.memory_bytes, "driver": card and card.driver,
            "memory_used_bytes": reading and reading.memory_used_bytes, "power_limit_w": reading and reading.power_limit_w,
            "uncorrected_errors": reading and reading.uncorrected_errors,
            **{name: self.conditions.get(name) for name in MOVING},
            "clients": reading and [asdict(client) for client in reading.clients],
            "holder": self.holder and {
                "user": self.holder.user, "pid": self.holder.process.pid, "run": self.holder.run, "cell": self.holder.cell,
                "since_utc": self.holder.since.isoformat(), "age_s": self.holder.age_s()},
            "problem": self.problem,
            "quarantine": quarantine and {
                "reason": quarantine.reason.value, "until_utc": quarantine.until_utc.isoformat(), "over": quarantine.over,
                "errors": [_error(e) for e in quarantine.errors]},
            "errors": [_error(e) for e in history.errors],
            "probed": history.probed and {"at_utc": history.probed.at_utc.isoformat(), "outcome": history.probed.outcome,
                                          "detail": history.probed.detail},
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }


def lines(state: Path, store: Store | None) -> list[CardLine]:
    """The cards of this machine, then those that the host's state knows beside them: other CPU slots, and cards gone."""
    here = {card.uuid: card for card in cards.local_cards()}
    known = sorted({path.stem for path in state.iterdir() if path.suffix in (".lock", ".journal")})
    verdicts = {} if store is None else _verdicts(store)
    uuids = [*here, *(uuid for uuid in known if uuid not in here)]
    return [_line(state, uuid, here.get(uuid), verdicts.get(uuid, ())) for uuid in uuids]


def _line(state: Path, uuid: str, card: Card | None, verdicts: Iterable[LastVerdict]) -> CardLine:
    reading, conditions, problem = None, {}, None
    if card is not None:
        try:
            reading, conditions = cards.reading(card), cards.conditions(card)
        except FarmError as error:
            problem = str(error)
    elif uuid.startswith("GPU-"):
        problem = "no card with this UUID is in this machine now"
    return CardLine(uuid, card, reading, conditions, problem, CardLock(state, uuid).holder(), Journal(state, uuid).history(),
                    tuple(verdicts))


def _verdicts(store: Store) -> Mapping[str, list[LastVerdict]]:
    found: dict[str, list[LastVerdict]] = {}
    for card, verdict, reason, run, cell, ended in store.sql(_LAST_VERDICTS).rows:
        found.setdefault(card, []).append(
            LastVerdict(verdict, reason, run, cell, ended.astimezone(timezone.utc).isoformat() if ended else ""))
    return found


def _kind(uuid: str, card: Card | None) -> str:
    return card.kind if card else "cuda" if uuid.startswith("GPU-") else "cpu"


def _error(error: Any) -> dict[str, Any]:
    return {"at_utc": error.at_utc.isoformat(), "reason": error.reason.value, "detail": error.detail, "run": error.run,
            "cell": error.cell}
