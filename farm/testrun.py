"""Run one suite with pytest in a tree's environment, and tell every test's fate.

The tests' source is laid out as a root of its own; pytest runs there under a
supervisor with the tree first on its path and `inside/pytest_outcomes.py`
loaded, which writes events to a file as they happen.  Whatever becomes of a
test process, of pytest, or of us, the events written so far say what was
promised, what ran, and what was running: `farm.outcomes` makes rows of them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from farm.bench import Card, Suite, TestRun
from farm.errors import InvalidMeasurement, TestProcessLost
from farm.graft import graft, test_path
from farm.hostfile import read
from farm.isolation import Sandbox
from farm.lifeline import Supervised
from farm.outcomes import End, Event, outcomes, progress_text, read_events
from farm.records import Reason

PLUGIN = Path(__file__).parent / "inside" / "pytest_outcomes.py"
TELL_EVERY_S = 2.0
PYTEST_FAILED = (3, 4)  # its exit statuses for an internal error and for wrong usage
CUT = {None: Reason.TESTS_STALLED, -signal.SIGKILL: Reason.TESTS_CRASHED}  # SIGKILL: as of a machine out of memory
TAIL_LINES = 15
TAIL_CHARS = 1500


@dataclass(frozen=True)
class TestRunSpec:
    """A suite, the tree that it judges, and where its tests lie.

    `tree_root` holds the vllm package; `pin_tests` and `newer_tests` are sdist directories that hold tests/
    and pyproject.toml and no vllm; `series_tests` maps relative paths to bytes.  `env` is the whole
    environment apart from what `run_suite` adds.  `scratch` is an empty directory of this run, for the caller
    to remove, best with a short path (tests make Unix sockets below it).  `site` follows the tree on the
    path where the environment's packages lie elsewhere than its interpreter looks.
    """

    __test__ = False  # pytest collects classes called Test*

    python: Path
    tree_root: Path
    suite: Suite
    scratch: Path
    env: Mapping[str, str]
    pin_tests: Path | None = None
    newer_tests: Path | None = None
    series_tests: Mapping[str, bytes] = field(default_factory=dict)
    site: Path | None = None
    card: Card | None = None
    sandbox: Sandbox | None = None  # what they run in; None: as this user, with all that this user may do
    records: Path | None = None  # where the supervisor leaves word for a later farm (farm.sweep.records)
    grace_s: float = 15.0  # beyond the suite's limit, until a test that no exception stops loses its process


def run_suite(spec: TestRunSpec, progress: Callable[[str], None]) -> TestRun:
    """Run the suite once; rows in collection order.

    Raises InvalidMeasurement where the tests imported another vllm than the tree's (wrong-tree) or where
    the selection does not fit the source (bad-config), TestProcessLost where pytest did not get as far as
    its session: a missing plugin, a broken interpreter.
    """
    suite = spec.suite
    root = _lay_out(spec)
    if (root / "vllm").exists():
        raise InvalidMeasurement(f"suite {suite.name}: {root} holds a vllm of its own, which would hide the tree's; "
                                 "give a tests directory without it", reason=Reason.WRONG_TREE)
    events_path, log = spec.scratch / "events.jsonl", spec.scratch / "pytest.log"
    argv, env = _command(spec, root), _environment(spec, events_path)
    try:
        child = Supervised.start(argv, env=env, cwd=root, stdout_path=log, within=_sandboxed(spec, env, root),
                                 records=spec.records)
    except OSError as error:
        raise TestProcessLost(f"suite {suite.name}: {error}; is the pin's environment complete?") from error
    try:
        with child:
            status = _watch(child, suite, events_path, progress)
        events = read_events(events_path)
    except ValueError as error:
        raise TestProcessLost(f"suite {suite.name}: {error}; does a test write to it?") from error
    tail = _tail(log)
    end = End(status, time.time(), suite.timeout_s + spec.grace_s, tail)
    _refuse_lost(suite, events, end)
    _refuse_wrong_tree(spec, events)
    rows = outcomes(events, suite, root, end)
    whole = {"collected", "end"} <= {e["event"] for e in events}
    complete = whole and status is not None and not any(r.outcome == "missing" for r in rows)
    note = None
    if not complete or status > 1:
        note = f"pytest {end.words(suite)}; its last lines:\n{tail}"
    paths = [e["path"] for e in events if e["event"] == "vllm"]
    return TestRun(tuple(rows), complete, paths[0] if paths else None, note, CUT.get(status))


# --- before -----------------------------------------------------------------------------------


def _lay_out(spec: TestRunSpec) -> Path:
    """The directory that node ids of the suite are relative to."""
    suite = spec.suite
    for entry in suite.select:
        pure = PurePosixPath(test_path(entry)[0])
        if pure.is_absolute() or ".." in pure.parts:
            raise _bad(suite, f"{entry} leaves the tests' root", "give paths relative to it")
    if suite.source == "series":
        root = spec.scratch / "series"
        root.mkdir()
        for name, content in spec.series_tests.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
    elif spec.pin_tests is None:
        raise _bad(suite, f"source {suite.source} needs the pin's sdist", "this pin has none")
    elif suite.source == "newer":
        root = _grafted_root(spec)
    else:
        root = spec.pin_tests
    for entry in suite.select:
        if not (root / test_path(entry)[0]).exists():
            raise _bad(suite, f"{test_path(entry)[0]} is not in {root}", "check the path against that version's tests")
    return root


def _grafted_root(spec: TestRunSpec) -> Path:
    """A root that looks like the pin's, with the newer tests grafted onto its files.

    Directories on the way to a grafted file are real, all else is linked to the pin's.
    """
    suite, pin, newer = spec.suite, spec.pin_tests, spec.newer_tests
    if newer is None:
        raise _bad(suite, "source newer needs the newer version's sdist", "give the suite a version")
    wanted: dict[str, list[str]] = {}
    for entry in suite.select:
        path, name = test_path(entry)
        if name:
            wanted.setdefault(path, []).append(name)
    root = spec.scratch / "grafted"
    root.mkdir()
    _link_missing(pin, root)
    for path, names in wanted.items():
        if not (newer / path).is_file():
            raise _bad(suite, f"{path} is not in {newer}", f"check the node id against {suite.version}")
        older = (pin / path).read_text(encoding="utf-8") if (pin / path).is_file() else None
        text = graft(older, (newer / path).read_text(encoding="utf-8"), names)
        for part in reversed(PurePosixPath(path).parents[:-1]):
            _make_real(root / part, pin / part, newer / part)
        (root / path).unlink(missing_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def _make_real(here: Path, pin: Path, newer: Path) -> None:
    """Turn a link to the pin's directory into a directory of links; the pin may lack it."""
    if here.is_dir() and not here.is_symlink():
        return
    here.unlink(missing_ok=True)
    here.mkdir()
    if pin.is_dir():
        _link_missing(pin, here)
    else:
        for name in ("__init__.py", "conftest.py"):
            if (newer / name).is_file():
                (here / name).symlink_to(newer / name)


def _link_missing(source: Path, here: Path) -> None:
    for entry in source.iterdir():
        if entry.name != "__pycache__":
            (here / entry.name).symlink_to(entry)


def _command(spec: TestRunSpec, root: Path) -> list[str]:
    suite = spec.suite
    ini = root / "pyproject.toml"
    if not ini.is_file():
        ini = spec.scratch / "pytest.ini"
        ini.write_text("[pytest]\n", encoding="utf-8")
    argv = [
        str(spec.python), "-m", "pytest", "-p", "pytest_outcomes", "-c", str(ini), "--rootdir", str(root),
        "--confcutdir", str(root), "--basetemp", str(spec.scratch / "t"), "-o", "addopts=", "-p", "no:cacheprovider",
        "-q", "--tb=short", "--color=no", "--continue-on-collection-errors",
        "--timeout", str(suite.timeout_s), "--timeout-method", "signal",
    ]
    argv += ["-n", str(suite.workers), "--dist", "load"] if suite.workers else []
    argv += ["-m", suite.marker] if suite.marker else []
    argv += ["-k", suite.keyword] if suite.keyword else []
    return [*argv, *dict.fromkeys(test_path(entry)[0] for entry in suite.select or (".",))]


def _environment(spec: TestRunSpec, events: Path) -> dict[str, str]:
    plugins = spec.scratch / "plugin"  # alone in its directory: nothing else of the farm becomes importable
    plugins.mkdir()
    shutil.copy(PLUGIN, plugins)
    select = spec.scratch / "select.json"
    select.write_text(json.dumps(list(spec.suite.select or (".",))), encoding="utf-8")
    site = [spec.site] if spec.site else []
    path = [spec.tree_root, *site, *filter(None, spec.env.get("PYTHONPATH", "").split(os.pathsep)), plugins]
    env = {k: v for k, v in spec.env.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(str(p) for p in path)),
        "PYTHONDONTWRITEBYTECODE": "1",  # the sdist's directory is shared between runs
        "FARM_PYTEST_EVENTS": str(events),
        "FARM_PYTEST_SELECT": str(select),
        "FARM_PYTEST_LIMIT_S": str(spec.suite.timeout_s + spec.grace_s),
    }


def _sandboxed(spec: TestRunSpec, env: Mapping[str, str], root: Path) -> tuple[str, ...]:
    """What tests see: interpreter, tree and the tests' sources; they write to their scratch and to the tree's caches."""
    if spec.sandbox is None:
        return ()
    shown = (spec.tree_root, spec.site, spec.pin_tests, spec.newer_tests)
    return spec.sandbox.for_tree(spec.python, shown, (spec.scratch,), env, card=spec.card, cwd=root)


# --- meanwhile --------------------------------------------------------------------------------


def _watch(child: Supervised, suite: Suite, events_path: Path, progress: Callable[[str], None]) -> int | None:
    """Exit status, or None where the deadline ended the group."""
    deadline = time.monotonic() + suite.deadline_s
    said = ""
    while (left := deadline - time.monotonic()) > 0:
        status = child.wait(timeout_s=min(TELL_EVERY_S, left))
        text = progress_text(suite, read_events(events_path))
        if text != said:
            progress(said := text)
        if status is not None:
            return status
    child.terminate()
    return None


# --- afterwards -------------------------------------------------------------------------------


def _refuse_lost(suite: Suite, events: Sequence[Event], end: End) -> None:
    kinds = {e["event"] for e in events}
    if "conftest" in kinds or ("start" in kinds and (end.status not in PYTEST_FAILED or kinds & {"begin", "down"})):
        return
    raise TestProcessLost(f"suite {suite.name}: pytest {end.words(suite)} before any test ran; does the pin's "
                          f"environment have pytest, pytest-xdist and pytest-timeout? Its last lines:\n{end.tail}")


def _refuse_wrong_tree(spec: TestRunSpec, events: Sequence[Event]) -> None:
    wanted = os.path.realpath(spec.tree_root / "vllm")
    for event in events:
        if event["event"] == "vllm" and os.path.realpath(os.path.dirname(event["path"])) != wanted:
            raise InvalidMeasurement(
                f"suite {spec.suite.name}: the tests imported {event['path']}, not the tree's {wanted}; look for what "
                "comes before the tree on sys.path (an editable install, a .pth file)", reason=Reason.WRONG_TREE)


def _tail(log: Path) -> str:
    try:
        written = read(log)  # the tests may have laid a link or a pipe in its place
    except OSError as error:
        return f"{log} cannot be read: {error}"
    return "\n".join((written or b"").decode("utf-8", errors="replace").splitlines()[-TAIL_LINES:])[-TAIL_CHARS:]


def _bad(suite: Suite, what: str, next_step: str) -> InvalidMeasurement:
    return InvalidMeasurement(f"suite {suite.name}: {what}; {next_step}", reason=Reason.BAD_CONFIG)
