"""pytest plugin that runs inside a tree's environment: what happens goes to a file, line by line.

Loaded with `-p pytest_outcomes`; knows pytest (6.2 and later) and the standard
library, and nothing of the farm.  Each event is one JSON line, written with a
single append to the file that FARM_PYTEST_EVENTS names, so that lines of several
processes do not mix and everything written survives whatever ends a process:

    start         pytest: version, distributed: bool      the controller, once
    conftest      path, message                           a conftest that cannot be imported
    collected     nodeids                                 each process that runs tests: its promise
    uncollected   nodeid, outcome, message                a file or directory failed or was skipped
    begin         nodeid                                  a test starts
    phase         nodeid, when, outcome, xfail, timeout, duration, message
    crash         nodeid, message                         xdist: the process that ran the test died
    down          message                                 xdist: a process died, running a test or collecting
    vllm          path                                    each process that imported vllm: from where
    end           exitstatus                              the session came to its end

`t` is the wall clock in seconds.  FARM_PYTEST_SELECT may name a JSON file with
node ids and paths: other tests are deselected.  FARM_PYTEST_LIMIT_S is the hard
limit of one test, for one that no exception can interrupt: its process exits.
"""

import faulthandler
import json
import os
import re
import sys
import time

import pytest

MESSAGE_CHARS = 2000


def pytest_configure(config):
    events = _Events(os.environ["FARM_PYTEST_EVENTS"])
    if not hasattr(config, "workerinput"):
        distributed = bool(getattr(config.option, "numprocesses", None))
        events.write("start", pytest=pytest.__version__, distributed=distributed)
        config.pluginmanager.register(_Controller(events), "farm-controller")
    config.pluginmanager.register(_Runner(events, _selected(), _limit_s()), "farm-runner")


@pytest.hookimpl(hookwrapper=True)
def pytest_load_initial_conftests():
    outcome = yield
    if outcome.excinfo is not None:
        error = outcome.excinfo[1]
        cause = getattr(error, "cause", None) or error  # ConftestImportFailure, pytest 8
        cause = cause[1] if isinstance(cause, tuple) else cause
        path = getattr(error, "path", None)
        if path is not None:
            _Events(os.environ["FARM_PYTEST_EVENTS"]).write(
                "conftest", path=str(path), message=f"{type(cause).__name__}: {cause}"[:MESSAGE_CHARS])


def _selected():
    path = os.environ.get("FARM_PYTEST_SELECT")
    if not path:
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _limit_s():
    value = os.environ.get("FARM_PYTEST_LIMIT_S")
    return float(value) if value else None


class _Events:
    """Appends whole lines; safe for several processes on one local file."""

    def __init__(self, path):
        self.path = path

    def write(self, event, **facts):
        line = json.dumps({"event": event, "t": time.time(), **facts}) + "\n"  # ASCII, lone surrogates too
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode("ascii"))
        finally:
            os.close(descriptor)


class _Controller:
    """Hears every report: the tests' own process without xdist, the process above them with it."""

    def __init__(self, events):
        self.events = events
        self.crashed = set()

    def pytest_collectreport(self, report):
        if not report.passed:
            self.events.write("uncollected", nodeid=report.nodeid, outcome=report.outcome, message=_message(report))

    def pytest_runtest_logstart(self, nodeid):
        self.events.write("begin", nodeid=nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem, report):
        self.crashed.add(crashitem)
        self.events.write("crash", nodeid=crashitem, message=_message(report))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, error):
        if error:
            self.events.write("down", message=str(error)[:MESSAGE_CHARS])

    def pytest_runtest_logreport(self, report):
        if report.nodeid in self.crashed and report.when not in ("setup", "call", "teardown"):
            return  # the report that xdist makes up for a crash
        self.events.write(
            "phase", nodeid=report.nodeid, when=report.when, outcome=report.outcome,
            xfail=hasattr(report, "wasxfail"), timeout=_is_timeout(report),
            duration=report.duration, message=_message(report),
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus):
        self.events.write("end", exitstatus=int(exitstatus))


class _Runner:
    """In each process that runs tests: what it promises, from where it imported vllm, its hard limit."""

    def __init__(self, events, selected, limit_s):
        self.events = events
        self.selected = selected
        self.limit_s = limit_s
        self.told = None

    def pytest_collection_modifyitems(self, config, items):
        if self.selected is None:
            return
        wanted = set(self.selected)
        kept = [item for item in items if wanted.intersection(_names(item.nodeid))]
        left = [item for item in items if not wanted.intersection(_names(item.nodeid))]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = kept

    def pytest_collection_finish(self, session):
        self.events.write("collected", nodeids=[item.nodeid for item in session.items])
        self.tell_vllm()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self):
        if self.limit_s:
            faulthandler.dump_traceback_later(self.limit_s, exit=True, file=sys.__stderr__)
        yield
        if self.limit_s:
            faulthandler.cancel_dump_traceback_later()
        self.tell_vllm()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_report_to_serializable(self):
        outcome = yield
        if outcome.excinfo is None:
            outcome.force_result(_clean(outcome.get_result()))

    def pytest_sessionfinish(self):
        self.tell_vllm()

    def tell_vllm(self):
        path = getattr(sys.modules.get("vllm"), "__file__", None)
        if path and path != self.told:
            self.told = path
            self.events.write("vllm", path=path)


def _names(nodeid):
    """Everything that selects a test: its node id, with and without parameters, its class, file and directories."""
    yield nodeid
    bare = nodeid.partition("[")[0]
    path, _, name = bare.partition("::")
    while name:
        yield path + "::" + name
        name = name.rpartition("::")[0]
    while path:
        yield path
        path = path.rpartition("/")[0]
    yield "."


def _clean(data):
    """Without lone surrogates, which xdist cannot send: it would lose the report and the worker with it."""
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(data, dict):
        return {_clean(key): _clean(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)([_clean(value) for value in data])
    return data


def _is_timeout(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    return bool(re.match(r"(Failed: )?Timeout \(?>", getattr(crash, "message", "")))


def _message(report):
    """The lines that pytest marks with E, or what else it says, cut to MESSAGE_CHARS characters; None if it passed."""
    if hasattr(report, "wasxfail") and not report.failed:
        return str(report.wasxfail)[:MESSAGE_CHARS] or None
    if report.passed:  # xdist would add the worker's name here
        return None
    if isinstance(report.longrepr, tuple):  # a skip: path, line, reason
        return str(report.longrepr[2])[:MESSAGE_CHARS]
    text = report.longreprtext
    marked = [line for line in text.splitlines() if re.match(r"E\s", line)]
    text = "\n".join(marked) if marked else text.strip()
    if len(text) > MESSAGE_CHARS:
        text = text[:MESSAGE_CHARS - 400] + "\n[…]\n" + text[-390:]
    return text or None
