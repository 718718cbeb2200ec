"""What becomes of a run's cards: rows of the table `cards`, and lines for who watches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from enum import Enum
from typing import Any

from farm.bench import Card
from farm.records import utc_now
from farm.store import Store


class CardEvent(str, Enum):
    """READY at the run's start, JOINED later.  The others take a card out: QUARANTINED may come back as JOINED."""

    READY = "ready"
    JOINED = "joined"
    LEFT_OUT = "left-out"
    QUARANTINED = "quarantined"
    LOST = "lost"


class CardLog:
    """Holds a run's events, those of an earlier life of the run first, and writes them to the results as one file.

    `say` takes what a line calls the card, and the line.
    """

    def __init__(self, store: Store, run: str, say: Callable[[str, str], None]) -> None:
        self._store, self._run, self._say = store, run, say
        self._rows: list[dict[str, Any]] = store.read("cards", run).to_pylist()
        self._saved = len(self._rows)

    def note(self, event: CardEvent, card: Card | None, name: str, *, host: str, reason: str | None = None, detail: str = "",
             until: datetime | None = None) -> None:
        """`card` is None where nobody answered that could say which it is; `name` is what a line calls it."""
        self._rows.append({
            "card": card and card.uuid, "card_name": card.name if card else name, "host": host, "at_utc": utc_now(),
            "event": event.value, "reason": reason, "detail": detail or None, "until_utc": until})
        self._say(name, f"{event.value}: {detail}" if detail else f"{event.value} on {host}{f' ({card.uuid})' if card else ''}")

    def save(self) -> None:
        """Write what is new.  Raises ResultsUnwritable."""
        if len(self._rows) > self._saved:
            self._store.commit_cards(self._run, self._rows)
            self._saved = len(self._rows)
