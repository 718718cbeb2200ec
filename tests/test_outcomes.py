"""Events to rows: every way in which a test, its process, or pytest can end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farm.bench import Suite
from farm.outcomes import End, covers, outcomes, progress_text, read_events

SUITE = Suite("core", "pin", ("tests",), timeout_s=2.0, deadline_s=60.0)
A, B = "tests/x.py::test_a", "tests/x.py::test_b[1-3584]"
OVER = End(0, 100.0, limit_s=10.0)
DIED = End(-9, 100.0, limit_s=10.0, tail="last words")
CUT = End(None, 100.0, limit_s=10.0)


def collected(*nodeids):
    return {"event": "collected", "nodeids": list(nodeids)}


def begin(nodeid, t=95.0):
    return {"event": "begin", "nodeid": nodeid, "t": t}


def phases(nodeid, setup="passed", call="passed", teardown="passed", *, xfail=False, timeout=False, message=None):
    said = {"nodeid": nodeid, "event": "phase", "duration": 0.5}
    for when, outcome in (("setup", setup), ("call", call), ("teardown", teardown)):
        if outcome:
            worse = outcome != "passed" or xfail
            yield {**said, "when": when, "outcome": outcome, "xfail": xfail and when != "teardown",
                   "timeout": timeout and worse, "message": message if worse else None}


END = {"event": "end", "exitstatus": 0}


def fates(events, end=OVER, suite=SUITE):
    return {row.nodeid: row.outcome for row in outcomes(events, suite, Path("/root"), end)}


@pytest.mark.parametrize(
    ("kw", "outcome"),
    [
        ({}, "passed"),
        ({"call": "failed"}, "failed"),
        ({"call": "failed", "teardown": "failed"}, "failed"),
        ({"setup": "failed", "call": None}, "error"),
        ({"teardown": "failed"}, "error"),
        ({"setup": "skipped", "call": None}, "skipped"),
        ({"call": "skipped"}, "skipped"),
        ({"call": "skipped", "xfail": True}, "xfailed"),
        ({"xfail": True}, "xpassed"),
        ({"call": "failed", "timeout": True}, "timeout"),
        ({"setup": "failed", "call": None, "timeout": True}, "timeout"),
    ],
)
def test_phases_make_one_outcome(kw, outcome):
    assert fates([collected(A), *phases(A, **kw), END]) == {A: outcome}


@pytest.mark.parametrize(
    ("events", "end", "outcome"),
    [
        pytest.param([begin(A), {"event": "crash", "nodeid": A, "t": 96.0, "message": "gw0"}, END], OVER, "crashed",
                     id="worker-died"),
        pytest.param([begin(A), {"event": "crash", "nodeid": A, "t": 105.0, "message": "gw0"}, END], OVER, "timeout",
                     id="worker-ended-for-its-time"),
        pytest.param([begin(A)], DIED, "crashed", id="pytest-died"),
        pytest.param([begin(A), *phases(A, teardown=None)], DIED, "crashed", id="pytest-died-in-teardown"),
        pytest.param([begin(A, 80.0)], DIED, "timeout", id="pytest-ended-for-its-time"),
        pytest.param([], DIED, "missing", id="pytest-died-before"),
        pytest.param([begin(A)], CUT, "missing", id="deadline-while-running"),
        pytest.param([], CUT, "missing", id="deadline-before"),
        pytest.param([END], OVER, "missing", id="session-over-without-it"),
    ],
)
def test_a_promise_without_report(events, end, outcome):
    assert fates([collected(A, B), *phases(B), *events], end)[A] == outcome


def test_rows_carry_duration_message_and_collection_order():
    rows = outcomes([collected(A, B), collected(A, B), *phases(B, call="failed", message="E   assert 71 == (7 + 1)"),
                     *phases(A), END], SUITE, Path("/root"), OVER)
    assert [(r.suite, r.nodeid, r.duration_s, r.message) for r in rows] == [
        ("core", A, 1.5, None), ("core", B, 1.5, "E   assert 71 == (7 + 1)")]


def test_messages_can_be_written_as_utf8():
    row, = outcomes([collected(A), *phases(A, call="failed", message="größer \ud800 漢"), END], SUITE, Path("/"), OVER)
    assert row.message == "größer \\ud800 漢"


@pytest.mark.parametrize(
    ("select", "events", "end", "expected"),
    [
        pytest.param((A,), [collected(), END], OVER, {A: "missing"}, id="node-id-not-there"),
        pytest.param((A, "tests/y.py"), [collected(A), *phases(A), END], OVER, {A: "passed", "tests/y.py": "missing"},
                     id="empty-file"),
        pytest.param(("tests/x.py::test_b",), [collected(B), *phases(B), END], OVER, {B: "passed"}, id="parameters"),
        pytest.param((A, B), [{"event": "uncollected", "nodeid": "tests/x.py", "outcome": "failed", "message": "E"}] * 2
                     + [collected(), END], OVER, {"tests/x.py": "error"}, id="file-fails"),
        pytest.param((A,), [{"event": "uncollected", "nodeid": "tests/x.py", "outcome": "skipped", "message": "cuda"},
                            collected(), END], OVER, {"tests/x.py": "skipped"}, id="file-skipped"),
        pytest.param((A,), [{"event": "conftest", "path": "/root/tests/conftest.py", "message": "E"}],
                     End(4, 100.0, 10.0), {"tests/conftest.py": "error"}, id="conftest"),
        pytest.param((A, "tests/y.py"), [{"event": "uncollected", "nodeid": "tests/x.py", "outcome": "failed",
                                          "message": "E"}], DIED, {"tests/x.py": "error", "tests/y.py": "crashed"},
                     id="died-while-collecting-the-second"),
        pytest.param((A, B), [{"event": "start"}], DIED, {A: "crashed", B: "crashed"}, id="died-while-collecting"),
        pytest.param((A,), [{"event": "start"}, {"event": "down"}, END], OVER, {A: "crashed"}, id="worker-died-so"),
        pytest.param((A,), [{"event": "start"}], CUT, {A: "missing"}, id="deadline-while-collecting"),
        pytest.param((), [{"event": "start"}, collected(), END], End(5, 100.0, 10.0), {".": "missing"}, id="nothing"),
    ],
)
def test_a_selection_is_a_promise_too(select, events, end, expected):
    assert fates(events, end, Suite("core", "pin", select)) == expected


@pytest.mark.parametrize(
    ("entry", "nodeid", "yes"),
    [(".", A, True), ("tests", A, True), ("tests/", A, True), ("tests/x.py", A, True), (A, A, True),
     ("tests/x.py::test_b", B, True), ("tests/x.py::test_", A, False), ("tests/x", A, False), ("test", A, False)],
)
def test_covers(entry, nodeid, yes):
    assert covers(entry, nodeid) is yes


def test_a_line_that_is_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "events"
    assert read_events(path) == []
    path.write_bytes(json.dumps(END).encode() + b'\n{"event": "en')
    assert read_events(path) == [END]


def test_progress_counts_tests_and_failures():
    events = [collected(A, B), collected(A, B), *phases(A, call="failed"), begin(B)]
    assert progress_text(SUITE, []) == "suite core: collecting"
    assert progress_text(SUITE, events) == "suite core: 1 of 2 tests, 1 failing"
