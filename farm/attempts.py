"""The attempts of a cell, and what they say together.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from farm.records import Outcome, Reason, Verdict

EVIDENCE = frozenset({Verdict.PASS, Verdict.FAIL})
# What says nothing of a cell but that no good card, or no fit machine, was there for it.
WANTING = frozenset({Reason.NO_CARD, Reason.NODE_DIED, Reason.CARD_LOST, Reason.CARD_BUSY, Reason.CARD_UNHEALTHY,
                     Reason.ISOLATION_MISSING})


@dataclass(frozen=True)
class Earlier:
    """An attempt that was committed before: its card, where it had one, and its verdict."""

    card: str
    verdict: Verdict | None


def earlier(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Earlier]]:
    """{cell: attempts} of a run's rows of the table `cells`; an attempt without a row has neither card nor verdict."""
    found: dict[str, dict[int, Earlier]] = {}
    for row in rows:
        verdict = Verdict(row["verdict"]) if row["verdict"] else None
        found.setdefault(row["cell"], {})[row["attempt"]] = Earlier(row["card"] or "", verdict)
    return {cell: [by.get(n, Earlier("", None)) for n in range(1, max(by) + 1)] for cell, by in found.items()}


def is_last_word(outcome: Outcome) -> bool:
    """Whether a cell that the run gives up has its final verdict: one that wanted a card is run by a resume, on a machine
    that was repaired or freed meanwhile."""
    return outcome.verdict is not Verdict.ERROR or outcome.reason not in WANTING


def together(outcome: Outcome, before: Iterable[Earlier]) -> Outcome:
    """An attempt's outcome in the light of the earlier ones: a FAIL and a PASS of the same thing are flaky, never a PASS.

    An ERROR before is no evidence, and says nothing against what came after it.
    """
    others = ({attempt.verdict for attempt in before} & EVIDENCE) - {outcome.verdict}
    if outcome.verdict not in EVIDENCE or not others:
        return outcome
    said = f"an earlier attempt ended {others.pop().value}, this one {outcome.verdict.value} ({outcome.reason.value})"
    return replace(outcome, verdict=Verdict.FAIL, reason=Reason.FLAKY,
                   detail=f"{said}: attempts of the same thing disagree. {outcome.detail}")
