"""Controls: what a control cell ends with, and what that makes of the whole run."""

import pytest

from farm.campaign import VALID, controlled, verdict
from farm.records import Outcome, Reason, Verdict


@pytest.mark.parametrize(("ended", "must", "expected"), [
    pytest.param((Verdict.FAIL, Reason.FAILING_SET_DIFFERS), Reason.FAILING_SET_DIFFERS,
                 (Verdict.PASS, Reason.CONTROL_HELD), id="failed-as-it-must"),
    pytest.param((Verdict.PASS, Reason.AS_EXPECTED), Reason.FAILING_SET_DIFFERS, (Verdict.INVALID, Reason.CONTROL_MISSED),
                 id="passed"),
    pytest.param((Verdict.FAIL, Reason.TREE_FAILED), Reason.FAILING_SET_DIFFERS, (Verdict.INVALID, Reason.CONTROL_MISSED),
                 id="failed-for-another-reason"),
    pytest.param((Verdict.PASS, Reason.AS_EXPECTED), Reason.AS_EXPECTED, (Verdict.PASS, Reason.CONTROL_HELD),
                 id="passed-as-it-must"),
    pytest.param((Verdict.FAIL, Reason.UNKNOWN_KNOB), Reason.AS_EXPECTED, (Verdict.INVALID, Reason.CONTROL_MISSED),
                 id="no-warning"),
    pytest.param((Verdict.ERROR, Reason.BOOT_DIED), Reason.AS_EXPECTED, (Verdict.ERROR, Reason.BOOT_DIED), id="error-stays"),
    pytest.param((Verdict.INVALID, Reason.WRONG_TREE), Reason.AS_EXPECTED, (Verdict.INVALID, Reason.WRONG_TREE),
                 id="invalid-stays"),
])
def test_a_control_cell(ended, must, expected):
    outcome = controlled(Outcome(*ended, "what it saw", ("unproven",)), must)
    assert (outcome.verdict, outcome.reason) == expected
    assert "what it saw" in outcome.detail and outcome.unproven == ("unproven",)


@pytest.mark.parametrize(("controls", "wanted", "says"), [
    pytest.param([], False, None, id="none-asked-for"),
    pytest.param([], True, "no control was run", id="a-campaign-without-any"),
    pytest.param([("a", Reason.CONTROL_HELD), ("b", Reason.CONTROL_HELD)], True, VALID, id="all-held"),
    pytest.param([("a", Reason.CONTROL_HELD), ("b", Reason.CONTROL_MISSED)], False, "b ended control-missed", id="one-missed"),
    pytest.param([("a", None)], True, "a ended without a row", id="never-ran"),
    pytest.param([("a", Reason.NEEDS_UNMET)], True, "a ended needs-unmet", id="skipped"),
])
def test_a_whole_run(controls, wanted, says):
    said = verdict(controls, wanted=wanted)
    assert said == says if says in (None, VALID) else says in said
