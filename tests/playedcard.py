"""A card that says what stands in a file, so that a test can play any card, also in another process.

The file is JSON: memory_used_bytes, power_limit_w, driver, clients (pids), uncorrected_errors, lost (bool), and probe,
the outcome of a health probe: passed, failed or unknown.  What is missing is as on a CPU slot; probes pass.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from farm import cards
from farm.bench import Card
from farm.cards import Client, Reading
from farm.errors import FarmError
from farm.health import Examined
from farm.records import Reason
from farm.worker import Worker

CARD = Card("GPU-0b5e2d1a-played", "played RTX 3090", "cpu", "host-1", memory_bytes=24 * 2**30)
FILE = "TEST_PLAYED_CARDS"  # environment variable: a folder with one file per card, which PlayedWorker reads


@dataclass(frozen=True)
class PlayedCard:
    card: Card
    file: Path

    def say(self, **facts):
        """Say this from now on, beside what was said before."""
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps({**self._said(), **facts}))
        beside.replace(self.file)

    def conditions(self):
        self.reading()
        return {"card": self.card.uuid, "card_name": self.card.name, "host": self.card.host}

    def reading(self):
        said = self._said()
        if said.get("lost"):
            raise FarmError(f"{self.card.name} no longer answers NVML (GPU is lost)", reason=Reason.CARD_LOST)
        return Reading(said.get("memory_used_bytes"), said.get("power_limit_w"), said.get("driver"),
                       tuple(Client.of(pid) for pid in said.get("clients", ())), said.get("uncorrected_errors"))

    def placed(self):
        return {card: frozenset(pids) for card, pids in self._said().get("placed", {}).items()}

    def examine(self, interpreter):
        outcome = self._said().get("probe", "passed")
        return Examined(outcome, f"played: {outcome}", 0.0)

    def _said(self):
        return json.loads(self.file.read_text()) if self.file.exists() else {}


class PlayedWorker(Worker):
    """A worker whose card is played by the file of its slot, `slot-1` …, in the folder that FILE names."""

    def _asked(self, card):
        return PlayedCard(card, played_file(Path(os.environ[FILE]), card.index))


def played_file(folder, index):
    return folder / f"slot-{index + 1}.json"


def play(folder, index, slots):
    """The played card of a slot, as the worker of that slot will see it."""
    return PlayedCard(cards.cpu_slot(index, slots), played_file(folder, index))
