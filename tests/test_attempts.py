"""What the attempts of a cell say together."""

import pytest

from farm.attempts import WANTING, Earlier, earlier, is_last_word, together
from farm.records import Outcome, Reason, Verdict

P, F, E, N = Verdict.PASS, Verdict.FAIL, Verdict.ERROR, Verdict.INVALID


@pytest.mark.parametrize(
    ("before", "now", "then"),
    [
        ([], P, (P, Reason.AS_EXPECTED)), ([E], P, (P, Reason.AS_EXPECTED)), ([E, E], F, (F, Reason.AS_EXPECTED)),
        ([F], P, (F, Reason.FLAKY)), ([P], F, (F, Reason.FLAKY)), ([E, F, E], P, (F, Reason.FLAKY)),
        ([F], F, (F, Reason.AS_EXPECTED)), ([F], E, (E, Reason.AS_EXPECTED)), ([N], P, (P, Reason.AS_EXPECTED)),
        ([F], N, (N, Reason.AS_EXPECTED)), ([None], P, (P, Reason.AS_EXPECTED)),
    ])
def test_evidence_that_disagrees_is_flaky_and_never_a_pass(before, now, then):
    made = together(Outcome(now, Reason.AS_EXPECTED, "so it was"), [Earlier("", v) for v in before])
    assert (made.verdict, made.reason) == then
    assert made.detail.endswith("so it was")


@pytest.mark.parametrize("reason", Reason, ids=lambda r: r.value)
def test_an_error_that_wanted_a_card_is_not_the_last_word_and_all_else_is(reason):
    assert is_last_word(Outcome(E, reason, "")) is (reason not in WANTING)
    assert all(is_last_word(Outcome(v, reason, "")) for v in (P, F, N, Verdict.SKIP))
    assert reason.value in ("no-card", "node-died", "card-lost", "card-busy", "card-unhealthy", "isolation-missing") \
        or reason not in WANTING


def test_attempts_are_read_in_their_order_and_a_lost_row_leaves_its_place():
    rows = [{"cell": "a", "attempt": 3, "verdict": "PASS", "card": "g2"},
            {"cell": "a", "attempt": 1, "verdict": "ERROR", "card": None},
            {"cell": "b", "attempt": 1, "verdict": "FAIL", "card": "g1"}]
    assert earlier(rows) == {"a": [Earlier("", E), Earlier("", None), Earlier("g2", P)], "b": [Earlier("g1", F)]}
