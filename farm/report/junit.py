"""A run for machines that read JUnit: one test case a cell.  FAIL is a failure; INVALID and ERROR are errors."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from farm.records import Reason, Verdict
from farm.report.view import NOT_RUN, UNREADABLE, CellView, RunView, view
from farm.store import Store

ELEMENTS = {Verdict.FAIL.value: "failure", Verdict.INVALID.value: "error", Verdict.ERROR.value: "error",
            Verdict.SKIP.value: "skipped"}
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2


def junit(store: Store, run: str) -> str:
    """An XML document.  Raises UsageError where the store has no such run."""
    shown = view(store, run)
    found = [ELEMENTS.get(c.verdict) for c in shown.cells] + ["error"] * shown.missing
    counts = {"tests": len(found), "failures": found.count("failure"), "errors": found.count("error"),
              "skipped": found.count("skipped")}
    suite = ElementTree.Element("testsuite", {
        "name": shown.name or run, "time": f"{sum(c.wall_s for c in shown.cells):.3f}",
        **{k: str(v) for k, v in counts.items()},
        **({"timestamp": f"{shown.started:%Y-%m-%dT%H:%M:%S}"} if shown.started else {})})
    _add_properties(suite, [("run", run), ("status", shown.status), ("project", shown.project)])
    for cell in shown.cells:
        _add_cell(suite, cell)
    for number in range(shown.missing):
        case = ElementTree.SubElement(suite, "testcase", {"classname": "missing", "name": f"missing cell {number + 1}"})
        if shown.missing_words == NOT_RUN:
            _add_end(case, "error", "not-run-yet", f"{NOT_RUN}: the run is {shown.status}")
        elif shown.missing_words == UNREADABLE:
            _add_end(case, "error", UNREADABLE, "; ".join(shown.problems))
        else:
            _add_end(case, "error", Reason.MISSING_ROWS.value, "the matrix promised this cell and it left no row")
    if said := _notes(shown):
        ElementTree.SubElement(suite, "system-out").text = _clean(said)
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _add_cell(suite: ElementTree.Element, cell: CellView) -> None:
    names = ".".join(filter(None, (cell.job, cell.profile.replace(".", "_"), cell.pin.replace(".", "_"))))
    case = ElementTree.SubElement(suite, "testcase", {
        "classname": _clean(names), "name": _clean(cell.cell), "time": f"{cell.wall_s:.3f}"})
    _add_properties(case, [("verdict", cell.verdict), ("reason", cell.reason), *cell.conditions])
    if element := ELEMENTS.get(cell.verdict):
        _add_end(case, element, cell.reason, cell.detail, cell.tail)
    else:
        ElementTree.SubElement(case, "system-out").text = _clean(cell.detail)


def _add_end(case: ElementTree.Element, element: str, reason: str, detail: str, tail: str = "") -> None:
    end = ElementTree.SubElement(case, element, {"type": reason, "message": _clean(detail)})
    end.text = _clean(f"{detail}\n{tail}".strip())


def _add_properties(parent: ElementTree.Element, pairs: list[tuple[str, str]]) -> None:
    properties = ElementTree.SubElement(parent, "properties")
    for name, value in pairs:
        if value:
            ElementTree.SubElement(properties, "property", {"name": _clean(name), "value": _clean(value)})


def _notes(run: RunView) -> str:
    return "\n".join([*(f"unproven: {line}" for line in run.unproven), *(f"skipped: {line}" for line in run.problems)])


def _clean(text: str) -> str:
    return _NOT_XML.sub("�", text)
