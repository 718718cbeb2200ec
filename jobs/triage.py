"""triage: does the series stand on this pin?  No card, no server, no tree: patches against the pristine package.

Each patch is applied in its order; one that the release carries already by its own header (`Applied-Upstream`) is put
aside, and what the source shows of it is said.  Every other end of a patch than applying is a FAIL: a person rebases
it, or confirms that the release carries it and says so in the header.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from farm.bench import Bench, Event, Needs, PatchTriage
from farm.records import Outcome, Reason, Tagged, Verdict


@dataclass(frozen=True)
class Triage:
    """No options."""

    name: ClassVar[str] = "triage"
    needs: ClassVar[Needs] = Needs(own_card=False)
    treeless: ClassVar[bool] = True
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    def run(self, bench: Bench) -> Iterator[Event]:
        bench.progress("triage of the series")
        patches = bench.triage()
        yield from (Tagged(patch.row) for patch in patches)
        yield judge(patches)


def judge(patches: Sequence[PatchTriage]) -> Outcome:
    """FAIL series-broken where a patch neither applies nor is carried by its header's word, else PASS."""
    broken = [p for p in patches if not p.good and p.claim is None]
    said = "; ".join(_words(p) for p in patches) or "the series lists no patch"
    unproven = tuple(
        [f"{p.row.patch}: applies, but the code near it changed since the release before; read it" for p in patches if p.moved]
        + [f"{p.row.patch}: its header says that {p.claim} carries it, and nothing of it was found in the source; ask a person"
           for p in patches if p.claim is not None and not p.traces])
    if broken:
        names = ", ".join(p.row.patch for p in broken)
        step = (f"Rebase {names} onto this pin; or where the release carries the change, let a person confirm it in the "
                "patch's header (Applied-Upstream: VERSION)")
        return Outcome(Verdict.FAIL, Reason.SERIES_BROKEN, f"{said}. {step}", unproven)
    return Outcome(Verdict.PASS, Reason.AS_EXPECTED, said, unproven)


def _words(patch: PatchTriage) -> str:
    if patch.claim is not None:
        return f"{patch.row.patch} left out: upstream from {patch.claim} on by its header"
    return f"{patch.row.patch} {patch.row.status}"
