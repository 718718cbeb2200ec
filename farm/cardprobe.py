"""All that the farm asks a card while it works on it: one small interface, so that a test can play any card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from farm import cards, health
from farm.bench import Card
from farm.cards import Reading
from farm.health import Examined, Interpreter


class CardProbe(Protocol):
    card: Card

    def conditions(self) -> dict[str, Any]:
        """The columns of schemas.CARD, as they are now.  Raises FarmError (card-lost)."""

    def reading(self) -> Reading:
        """What moves on it, as it is now.  Raises FarmError (card-lost)."""

    def placed(self) -> Mapping[str, frozenset[int]]:
        """Processes that compute, by the UUID of their card, on every card of this host; empty for a CPU slot."""

    def examine(self, interpreter: Interpreter) -> Examined:
        """Allocate, compute, compare, read back, within a deadline."""


@dataclass(frozen=True)
class RealCard:
    """A GPU by NVML and a script in torch, a CPU slot by the script's counterpart."""

    card: Card

    def conditions(self) -> dict[str, Any]:
        return cards.conditions(self.card)

    def reading(self) -> Reading:
        return cards.reading(self.card)

    def placed(self) -> Mapping[str, frozenset[int]]:
        return cards.placed() if self.card.kind == "cuda" else {}

    def examine(self, interpreter: Interpreter) -> Examined:
        return health.examine(self.card, interpreter)
