"""JUnit for machines."""

from xml.etree import ElementTree

import pytest
from sample_run import RUN

from farm.records import Outcome, Reason, Verdict
from farm.report.junit import junit


@pytest.fixture
def suite(store):
    text = junit(store, RUN)
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n')
    return ElementTree.fromstring(text.encode()).find("testsuite")


def test_counts(suite):
    assert {k: suite.get(k) for k in ("name", "tests", "failures", "errors", "skipped", "timestamp")} == {
        "name": "smoke-cpu", "tests": "7", "failures": "1", "errors": "3", "skipped": "1",
        "timestamp": "2026-01-01T12:00:00"}
    assert len(suite.findall("testcase")) == 7


@pytest.mark.parametrize(("cell", "element", "reason"), [
    ("unit-0.29.0", "failure", "tests-broken"),
    ("prefill-pools", "error", "pool-mismatch"),
    ("prefill-dead", "error", "boot-died"),
    ("offload-0.29.0", "skipped", "needs-unmet"),
    ("missing cell 1", "error", "missing-rows"),
    ("replay-0.29.0", None, None),
])
def test_each_verdict_has_its_element(suite, cell, element, reason):
    case = next(c for c in suite.findall("testcase") if c.get("name") == cell)
    ends = [e for e in case if e.tag in ("failure", "error", "skipped")]
    assert [(e.tag, e.get("type")) for e in ends] == ([(element, reason)] if element else [])


def test_a_case_carries_its_time_and_conditions(suite):
    case = next(c for c in suite.findall("testcase") if c.get("name") == "prefill-tiny-0.29.0")
    assert (case.get("classname"), case.get("time")) == ("prefill.tiny.0_29_0-cpu", "20.000")
    told = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert told["verdict"] == "PASS" and told["pool"] == "4,096 tokens, pinned on each arm"


def test_the_log_tail_is_in_the_body(suite):
    case = next(c for c in suite.findall("testcase") if c.get("name") == "prefill-dead")
    error = case.find("error")
    assert error.get("message") == "the server died" and "line 19 <script>" in error.text


def test_characters_that_xml_cannot_hold_are_replaced(author):
    author.cell("c", "unit", Outcome(Verdict.FAIL, Reason.CHANGED, "zero \x00 and \ufffe and ü", ("never \ufffe",)))
    author.run(cells=1)
    case = ElementTree.fromstring(junit(author.store, RUN).encode()).find("testsuite/testcase")
    assert case.find("failure").get("message") == "zero  and \ufffd and ü"


def test_a_cell_that_has_not_run_yet_says_so_and_is_not_green(author):
    author.run(cells=1, status="interrupted", exit_code=130)
    case = ElementTree.fromstring(junit(author.store, RUN).encode()).find("testsuite/testcase")
    assert (case.find("error").get("type"), case.find("error").get("message")) == (
        "not-run-yet", "not run yet: the run is interrupted")
