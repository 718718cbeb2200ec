"""triage: how patches fare, and what that makes of the pin."""

from dataclasses import dataclass, field

import pytest

from farm.bench import PatchTriage
from farm.records import PatchRow, Reason, Verdict
from jobs.triage import Triage


def patch(name, status="clean", **more):
    good = status in ("clean", "offset", "clean-but-moved")
    return PatchTriage(PatchRow(name, "aa", 0, 3, 0, 0, ("v1/x.py",), status, "what stands there"), good, **more)


@dataclass
class FakeBench:
    patches: list
    said: list = field(default_factory=list)

    def triage(self):
        return self.patches

    def progress(self, text):
        self.said.append(text)


@pytest.mark.parametrize(("patches", "verdict", "reason", "says", "unproven"), [
    pytest.param([patch("a.patch"), patch("b.patch", "offset")], Verdict.PASS, Reason.AS_EXPECTED,
                 "a.patch clean; b.patch offset", 0, id="stands"),
    pytest.param([], Verdict.PASS, Reason.AS_EXPECTED, "lists no patch", 0, id="empty"),
    pytest.param([patch("a.patch"), patch("b.patch", "rejected")], Verdict.FAIL, Reason.SERIES_BROKEN, "Rebase b.patch", 0,
                 id="rejected"),
    pytest.param([patch("b.patch", "upstream", upstream=True, traces=("defined there",))], Verdict.FAIL, Reason.SERIES_BROKEN,
                 "Applied-Upstream", 0, id="upstream-that-nobody-confirmed"),
    pytest.param([patch("b.patch", "upstream", upstream=True, claim="0.30.0", traces=("defined there",))], Verdict.PASS,
                 Reason.AS_EXPECTED, "b.patch left out: upstream from 0.30.0", 0, id="upstream-by-its-header"),
    pytest.param([patch("b.patch", "upstream", upstream=True, claim="0.30.0")], Verdict.PASS, Reason.AS_EXPECTED, "left out", 1,
                 id="a-claim-without-a-trace"),
    pytest.param([patch("b.patch", "clean-but-moved", moved=True)], Verdict.PASS, Reason.AS_EXPECTED, "clean-but-moved", 1,
                 id="moved"),
])
def test_verdict(patches, verdict, reason, says, unproven):
    *rows, outcome = Triage().run(FakeBench(patches))
    assert [r.record.patch for r in rows] == [p.row.patch for p in patches]
    assert (outcome.verdict, outcome.reason, len(outcome.unproven)) == (verdict, reason, unproven)
    assert says in outcome.detail
