"""Controls: cells that must end in a known way, or nothing that was measured beside them is evidence.  Pure.

DESIGN.md, "Deciding an A/B": one patch removed must fail, a made-up knob must give exactly one warning.  A matrix
names a cell's `control:` reason; the cell then ends PASS `control-held` or INVALID `control-missed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from farm.records import Outcome, Reason, Verdict

VALID = "valid"


def controlled(outcome: Outcome, must: Reason) -> Outcome:
    """A control cell's outcome: held where the cell ended with the reason it must; an ERROR or INVALID end stays."""
    ended = f"{outcome.verdict.value} {outcome.reason.value}"
    if outcome.reason is must:
        return dataclasses.replace(outcome, verdict=Verdict.PASS, reason=Reason.CONTROL_HELD,
                                   detail=f"the control ended {ended}, as it must: {outcome.detail}")
    if outcome.verdict in (Verdict.PASS, Verdict.FAIL):
        return dataclasses.replace(
            outcome, verdict=Verdict.INVALID, reason=Reason.CONTROL_MISSED,
            detail=f"the control ended {ended} and must end {must.value}: this run cannot tell a good tree from a bad one. "
                   f"See whether the cell still runs what it is meant to. {outcome.detail}")
    return outcome


def verdict(controls: Iterable[tuple[str, Reason | None]], *, wanted: bool) -> str | None:
    """Of a whole run: VALID, or why its verdicts are no evidence; None where no control was asked for.

    `controls` are the control cells and the reason that each ended with (None: it has not ended).
    """
    ended = list(controls)
    if not ended:
        return "no control was run; take --only away, or give a cell a `control:`" if wanted else None
    missed = [f"{cell} ended {reason.value if reason else 'without a row'}" for cell, reason in ended
              if reason is not Reason.CONTROL_HELD]
    if not missed:
        return VALID
    return f"{'; '.join(missed)}, where every control must end {Reason.CONTROL_HELD.value}"
