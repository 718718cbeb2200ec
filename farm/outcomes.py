"""From the events that `inside/pytest_outcomes.py` wrote to one row per test.  Pure.

A promise is what was collected, and what was selected.  What was promised and
has no report is told apart by what became of its process: `crashed` (it died
while the test ran), `timeout` (it had to die for the test's time), `missing`
(the test never came to run, or the suite's deadline cut it).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm import jsontext
from farm.bench import Suite
from farm.graft import test_path
from farm.hostfile import open_to_read
from farm.records import TestRow

Event = Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """How pytest's process ended.  status None: the suite's deadline ended it.  `t` is in wall clock seconds."""

    status: int | None
    t: float
    limit_s: float  # a test that had run this long when its process died was ended for its time
    tail: str = ""

    def words(self, suite: Suite) -> str:
        if self.status is None:
            return f"was ended by the suite's deadline of {suite.deadline_s:g} s"
        return f"died of signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"


def read_events(path: Path) -> list[Event]:
    """The whole lines of an events file; a line that is still being written is left for the next reading.

    Raises ValueError for what is none: the tests may have laid there what they like.
    """
    try:
        fd = open_to_read(path)
    except OSError as error:
        raise ValueError(f"{path} is no file of events any more ({error})") from error
    if fd is None:
        return []
    with open(fd, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    try:
        return list(map(_event, lines))
    except ValueError as error:
        raise ValueError(f"{path} holds a line that is no event ({error})") from error


def _event(line: bytes) -> Event:
    said = jsontext.loads(line)
    if not isinstance(said, dict):
        raise ValueError(f"{said!r:.80}")
    for name, read in _FACTS.get(jsontext.word(said.get("event")), {}).items():
        if name not in said:
            raise ValueError(f"{name} is missing in {said!r:.80}")
        read(said[name])
    return said


def _words(said: Any) -> list[str]:
    if not isinstance(said, list):
        raise ValueError(f"no list: {said!r:.80}")
    return list(map(jsontext.text, said))


def _text_or_none(said: Any) -> str | None:
    return None if said is None else jsontext.text(said)


# What is read of each kind of event, and by what.
_FACTS: Mapping[str, Mapping[str, Callable[[Any], object]]] = {
    "collected": {"nodeids": _words},
    "begin": {"nodeid": jsontext.text, "t": jsontext.number},
    "phase": {"nodeid": jsontext.text, "when": jsontext.text, "outcome": jsontext.text, "duration": jsontext.number,
              "message": _text_or_none, "timeout": bool, "xfail": bool},
    "crash": {"nodeid": jsontext.text, "t": jsontext.number, "message": _text_or_none},
    "uncollected": {"nodeid": jsontext.text, "outcome": jsontext.text, "message": _text_or_none},
    "conftest": {"path": jsontext.text, "message": _text_or_none},
    "vllm": {"path": jsontext.text},
}


def outcomes(events: Sequence[Event], suite: Suite, root: Path, end: End) -> list[TestRow]:
    """One row for each test that was promised, each file that could not be collected, and each selected
    entry that brought no test at all."""
    promised = dict.fromkeys(n for e in events if e["event"] == "collected" for n in e["nodeids"])
    phases: dict[str, list[Event]] = {}
    begun: dict[str, float] = {}
    crashed: dict[str, Event] = {}
    for event in events:
        if event["event"] == "phase":
            phases.setdefault(event["nodeid"], []).append(event)
        elif event["event"] == "begin":
            begun[event["nodeid"]] = event["t"]
        elif event["event"] == "crash":
            crashed[event["nodeid"]] = event
    session_over = any(e["event"] == "end" for e in events)
    rows = list(_uncollected(events, suite, root))
    for nodeid in promised:
        seen = phases.get(nodeid, [])
        if nodeid in crashed:
            crash = crashed[nodeid]
            rows.append(_died(suite, nodeid, crash["t"] - begun.get(nodeid, crash["t"]), crash["message"], end))
        elif any(e["when"] == "teardown" for e in seen):
            rows.append(_row(suite, nodeid, _outcome(seen), sum(e["duration"] for e in seen),
                             next((e["message"] for e in seen if e["message"]), None)))
        elif nodeid in begun and end.status is not None and not session_over:
            message = f"pytest {end.words(suite)} while this test ran\n{end.tail}"
            rows.append(_died(suite, nodeid, end.t - begun[nodeid], message, end))
        else:
            state = "was running" if nodeid in begun else "had not begun"
            rows.append(_row(suite, nodeid, "missing", None, f"pytest {end.words(suite)}; this test {state}"))
    kinds = {e["event"] for e in events}
    died = end.status is not None and "collected" not in kinds and (not session_over or "down" in kinds)
    return rows + _unmet(suite, rows, died, end)


def _outcome(phases: Sequence[Event]) -> str:
    by = {e["when"]: e for e in phases}
    if any(e["timeout"] for e in phases):
        return "timeout"
    if by.get("call", {}).get("outcome") == "failed":
        return "failed"
    if any(e["outcome"] == "failed" for e in phases):
        return "error"
    if skipped := [e for e in phases if e["outcome"] == "skipped"]:
        return "xfailed" if skipped[0]["xfail"] else "skipped"
    return "xpassed" if by.get("call", {}).get("xfail") else "passed"


def _uncollected(events: Sequence[Event], suite: Suite, root: Path) -> Iterable[TestRow]:
    """Files that failed or were skipped as a whole; each worker tells of the same ones."""
    rows: dict[str, TestRow] = {}
    for event in events:
        if event["event"] == "uncollected":
            nodeid = event["nodeid"] or "."
            outcome = "error" if event["outcome"] == "failed" else "skipped"
            rows.setdefault(nodeid, _row(suite, nodeid, outcome, None, event["message"]))
        elif event["event"] == "conftest":
            nodeid = Path(os.path.relpath(event["path"], root)).as_posix()
            rows.setdefault(nodeid, _row(suite, nodeid, "error", None, event["message"]))
    return rows.values()


def _unmet(suite: Suite, rows: Sequence[TestRow], died: bool, end: End) -> list[TestRow]:
    """Selected entries with no row at all: a selection is a promise too.  `died`: a process did, while collecting."""
    unmet = []
    for entry in suite.select or (".",):
        if any(covers(entry, row.nodeid) or _covers_file(row.nodeid, entry) for row in rows):
            continue
        if died:
            unmet.append(_row(suite, entry, "crashed", None, f"pytest {end.words(suite)} while collecting\n{end.tail}"))
        else:
            unmet.append(_row(suite, entry, "missing", None, f"selected, and not collected; pytest {end.words(suite)}"))
    return unmet


def covers(entry: str, nodeid: str) -> bool:
    """Whether a selection entry (directory, file, class, test, one parameter set) takes in a node id."""
    return entry in (".", nodeid) or any(nodeid.startswith(entry.rstrip("/") + c) for c in ("/", "::", "["))


def _covers_file(uncollected: str, entry: str) -> bool:
    """Whether a file or conftest that could not be collected explains that an entry brought nothing."""
    if "::" in uncollected:
        return False
    where = uncollected.removesuffix("conftest.py").rstrip("/") or "."
    return covers(where, test_path(entry)[0])


def _died(suite: Suite, nodeid: str, ran_s: float, message: str | None, end: End) -> TestRow:
    return _row(suite, nodeid, "timeout" if ran_s >= end.limit_s else "crashed", max(0.0, ran_s), message)


def _row(suite: Suite, nodeid: str, outcome: str, duration_s: float | None, message: str | None) -> TestRow:
    return TestRow(suite.name, _utf8(nodeid), outcome, duration_s, message and _utf8(message))


def _utf8(text: str) -> str:
    """Lone surrogates escaped: no table could hold them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def progress_text(suite: Suite, events: Sequence[Event]) -> str:
    promised = {n for e in events if e["event"] == "collected" for n in e["nodeids"]}
    done = {e["nodeid"] for e in events if e["event"] == "crash" or (e["event"] == "phase" and e["when"] == "teardown")}
    failing = {e["nodeid"] for e in events if e["event"] == "crash" or e.get("outcome") == "failed"}
    if not promised:
        return f"suite {suite.name}: collecting"
    text = f"suite {suite.name}: {len(done)} of {len(promised)} tests"
    return f"{text}, {len(failing)} failing" if failing else text
