"""boot: does each arm's server come up, and with which warnings?  Its facts (pool, block size, backend) are in the boot's row.

vLLM warns of a `VLLM_` variable that it does not know and goes on: a misspelt knob makes both arms the same.  So a boot
must warn of exactly the knobs that `unknown_knobs` lists, one entry a warning; none, unless told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from farm.bench import Bench, Event, Needs
from farm.records import Measurement, Outcome, Reason, Tagged, Verdict


@dataclass(frozen=True)
class Boot:
    """Options: `unknown_knobs`, one entry for each warning that a boot must give; `boots` of each arm."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    unknown_knobs: tuple[str, ...] = ()
    boots: int = 1

    name: ClassVar[str] = "boot"
    needs: ClassVar[Needs] = Needs()
    serves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.boots < 1:
            raise ValueError("boots must be positive")
        if strange := [k for k in self.unknown_knobs if not k.startswith("VLLM_")]:
            raise ValueError(f"{strange[0]}: vLLM only warns of names that begin VLLM_")

    def run(self, bench: Bench) -> Iterator[Event]:
        """One measurement a boot (`unknown_knob_warnings`, count), then the outcome.  Raises BootFailure."""
        differing: list[str] = []
        seen: list[tuple[str, ...]] = []
        for slot in bench.order(list(bench.arms), self.boots):
            with bench.serve(slot) as server:
                warned = server.facts.unknown_knobs
                yield Tagged(Measurement("unknown_knob_warnings", len(warned), "count"),
                             {"arm": slot.arm, "boot": slot.boot, "pair": slot.pair, "order": slot.order,
                              **server.facts.conditions()})
                seen.append(warned)
                if Counter(warned) != Counter(self.unknown_knobs):
                    differing.append(f"{slot.arm} boot {slot.boot} warned of {_listed(warned)}")
        if differing:
            yield Outcome(Verdict.FAIL, Reason.UNKNOWN_KNOB,
                          f"{'; '.join(differing)}, where exactly {_listed(self.unknown_knobs)} was expected. Correct the "
                          "name in the arm's or profile's env, or register it in vllm/envs.py")
        else:
            yield Outcome(Verdict.PASS, Reason.AS_EXPECTED,
                          f"{len(seen)} boots, each with {len(self.unknown_knobs)} warnings of unknown knobs, as expected")


def _listed(knobs: Sequence[str]) -> str:
    return ", ".join(f"{name} ({n} times)" if n > 1 else name for name, n in Counter(knobs).items()) or "no unknown knob"
