"""Whether a boot is the one that its profile describes.  Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from farm import cmdline
from farm.bench import BootFacts
from farm.errors import InvalidMeasurement
from farm.records import Reason


@dataclass(frozen=True)
class ExpectedFacts:
    """Exact values of what a boot says of itself; None: not judged.  `args` must stand in what really runs."""

    block_size: int | None = None  # tokens
    pool_tokens: int | None = None
    backend: str | None = None
    connector: str | None = None
    args: tuple[str, ...] = ()

    def check(self, facts: BootFacts) -> None:
        """Raise InvalidMeasurement (facts-differ) that names every fact that differs, what was expected and what found."""
        differing = []
        for name in ("block_size", "pool_tokens", "backend", "connector"):
            expected, found = getattr(self, name), getattr(facts, name)
            if expected is not None and expected != found:
                unread = "not said in its log" if name not in facts.gaps else "said in words that farm/bootlog.py does not know"
                differing.append(f"{name}: expected {expected}, found {unread if found is None else found}")
        differing += [f"argument {word}: expected, found not in what runs ({shlex.join(facts.argv)})"
                      for word in cmdline.ignored(self.args, facts.argv)]
        if differing:
            raise InvalidMeasurement(f"the boot is not the one that its profile expects: {'; '.join(differing)}. Correct "
                                     "what is served, or the profile's expect", reason=Reason.FACTS_DIFFER)
