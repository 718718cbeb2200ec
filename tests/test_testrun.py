"""Real pytest processes on a vllm of three lines: every way to end, and what is left of it in the rows."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from farm.bench import Suite
from farm.errors import InvalidMeasurement, TestProcessLost
from farm.lifeline import descendants
from farm.records import Reason, Verdict
from farm.testrun import TestRunSpec, run_suite

CONFTEST = "import vllm\n"
PYPROJECT = '[tool.pytest.ini_options]\naddopts = "--no-such-option"\nmarkers = ["cpu_test", "slow_test"]\n'


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(dedent(content), encoding="utf-8")
    return root


@pytest.fixture
def run(tmp_path):
    """run(files, suite options…, newer=files, spec options…) -> TestRun, on a tree whose vllm.N is 71."""
    tree = write(tmp_path / "tree", {"vllm/__init__.py": "N = 71\n"})

    def run(files, *, newer=None, series=None, progress=lambda text: None, python=sys.executable, grace_s=5.0, env=None,
            tree=tree, **suite):
        base = {"pyproject.toml": PYPROJECT, "tests/__init__.py": "", "tests/conftest.py": CONFTEST}
        pin = write(tmp_path / "pin", {**base, **files})
        scratch = tmp_path / "s"
        scratch.mkdir()
        options = {"name": "core", "source": "pin", "select": ("tests",), "workers": 0, "timeout_s": 20.0,
                   "deadline_s": 60.0, **suite}
        before = set(descendants(os.getpid()))
        spec = TestRunSpec(
            python=Path(python), tree_root=tree, suite=Suite(**options), scratch=scratch, grace_s=grace_s,
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **(env or {})}, pin_tests=pin,
            newer_tests=write(tmp_path / "newer", newer) if newer else None, series_tests=series or {},
        )
        try:
            return run_suite(spec, progress)
        finally:
            assert set(descendants(os.getpid())) <= before, "processes are left"
            assert not list(pin.rglob("__pycache__")), "the sdist was written to"

    return run


def fates(result):
    return {row.nodeid: row.outcome for row in result.outcomes}


MIXED = """
    import os, time, pytest, vllm

    @pytest.mark.parametrize("n, size", [(1, 3584), (2, 4608)])
    def test_sum(n, size):
        assert vllm.N == 7 + n

    def test_pass(tmp_path): assert vllm.N == 71
    @pytest.mark.skip(reason="no sm89")
    def test_skip(): ...
    @pytest.mark.xfail(reason="known")
    def test_xfail(): assert False
    @pytest.mark.xfail
    def test_xpass(): ...

    @pytest.fixture
    def bad(): raise RuntimeError("größer ✓ \\ud800")
    def test_error(bad): ...

    class TestC:
        @pytest.mark.parametrize("s", ["ä b", "x::y"])
        def test_in_class(self, s): print("Ω", s)
"""
X = "tests/test_x.py::"
MIXED_FATES = {
    X + "test_sum[1-3584]": "failed", X + "test_sum[2-4608]": "failed", X + "test_pass": "passed",
    X + "test_skip": "skipped", X + "test_xfail": "xfailed", X + "test_xpass": "xpassed", X + "test_error": "error",
    X + "TestC::test_in_class[\\xe4 b]": "passed", X + "TestC::test_in_class[x::y]": "passed",
}


@pytest.mark.parametrize("workers", [0, 2])
def test_every_outcome_with_and_without_xdist(run, workers):
    told = []
    result = run({"tests/test_x.py": MIXED}, workers=workers, progress=told.append)
    assert fates(result) == MIXED_FATES and list(fates(result)) == list(MIXED_FATES)
    assert result.complete and result.note is None
    message = {row.nodeid: row.message for row in result.outcomes}
    assert message[X + "test_sum[1-3584]"].splitlines()[0] == "E   assert 71 == (7 + 1)"
    assert message[X + "test_pass"] is None and message[X + "test_skip"] == "Skipped: no sm89"
    assert message[X + "test_xfail"] == "known" and "größer ✓ \\ud800" in message[X + "test_error"]
    assert result.vllm_path.endswith("/tree/vllm/__init__.py")
    assert told[-1] == "suite core: 9 of 9 tests, 3 failing"


DEADLY = """
    import os, signal, time
    def test_before(): ...
    def test_exit(): os._exit(3)
    def test_kill(): os.kill(os.getpid(), signal.SIGKILL)
    def test_after(): ...
"""


def test_a_worker_that_dies_costs_its_test_alone(run):
    result = run({"tests/test_x.py": DEADLY}, workers=2)
    assert fates(result) == {X + "test_before": "passed", X + "test_exit": "crashed", X + "test_kill": "crashed",
                             X + "test_after": "passed"}
    assert result.complete


def test_pytest_that_dies_leaves_what_it_had_promised(run):
    result = run({"tests/test_x.py": DEADLY.replace("os._exit(3)", "...")})
    assert fates(result) == {X + "test_before": "passed", X + "test_exit": "passed", X + "test_kill": "crashed",
                             X + "test_after": "missing"}
    assert not result.complete and result.note.startswith("pytest died of signal 9") and result.cut is Reason.TESTS_CRASHED


def test_a_controller_that_is_killed_takes_its_workers_along(run):
    result = run({"tests/test_x.py": """
        import os, signal, time
        def test_quick(): ...
        def test_kill_the_controller():
            time.sleep(1)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
    """}, workers=1)
    assert fates(result) == {X + "test_quick": "passed", X + "test_kill_the_controller": "crashed"}
    assert not result.complete


def test_a_test_that_hangs_is_stopped_and_the_rest_goes_on(run):
    result = run({"tests/test_x.py": "import time\ndef test_hang(): time.sleep(60)\ndef test_after(): ..."},
                 timeout_s=1.0)
    assert fates(result) == {X + "test_hang": "timeout", X + "test_after": "passed"}
    assert "Timeout" in result.outcomes[0].message and result.complete


STUBBORN = """
    import signal, time
    def test_hang():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        time.sleep(60)
    def test_after(): ...
"""


@pytest.mark.parametrize(("workers", "after", "complete"), [(1, "passed", True), (0, "missing", False)])
def test_a_hang_that_no_exception_stops_loses_its_process(run, workers, after, complete):
    result = run({"tests/test_x.py": STUBBORN}, workers=workers, timeout_s=1.0, grace_s=1.0)
    assert fates(result) == {X + "test_hang": "timeout", X + "test_after": after}
    assert result.complete is complete


def test_the_deadline_ends_everything(run):
    began = time.monotonic()
    result = run({"tests/test_x.py": "import time\ndef test_a(): ...\ndef test_b(): time.sleep(60)\ndef test_c(): ..."},
                 deadline_s=6.0)
    assert fates(result) == {X + "test_a": "passed", X + "test_b": "missing", X + "test_c": "missing"}
    assert not result.complete and result.cut is Reason.TESTS_STALLED and "deadline of 6 s" in result.note
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_cannot_be_imported_is_an_error_and_the_others_run(run, workers):
    result = run({"tests/test_bad.py": "from vllm import Gone\ndef test_x(): ...",
                  "tests/test_skip.py": "import pytest\npytest.skip('no cuda', allow_module_level=True)",
                  "tests/test_x.py": "def test_a(): ..."}, workers=workers)
    assert fates(result) == {"tests/test_bad.py": "error", "tests/test_skip.py": "skipped", X + "test_a": "passed"}
    assert "cannot import name 'Gone'" in result.outcomes[0].message


def test_a_vllm_that_cannot_be_imported_is_evidence_not_a_farm_error(run, tmp_path):
    broken = write(tmp_path / "broken", {"vllm/__init__.py": "raise RuntimeError('half a patch')"})
    result = run({"tests/test_x.py": "def test_a(): ..."}, tree=broken, select=(X + "test_a",))
    assert fates(result) == {"tests/conftest.py": "error"}
    assert "half a patch" in result.outcomes[0].message and not result.complete


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_dies_while_collecting_crashes_the_selection(run, workers):
    result = run({"tests/test_x.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"}, workers=workers,
                 select=("tests/test_x.py",))
    assert fates(result) == {"tests/test_x.py": "crashed"}
    assert not result.complete


def test_another_vllm_is_refused(run, tmp_path):
    write(tmp_path / "other", {"vllm/__init__.py": "N = 0"})
    with pytest.raises(InvalidMeasurement, match="not the tree's") as caught:
        run({"tests/conftest.py": f"import sys\nsys.path.insert(0, {str(tmp_path / 'other')!r})\nimport vllm",
             "tests/test_x.py": "def test_a(): ..."})
    assert (caught.value.verdict, caught.value.reason) == (Verdict.INVALID, Reason.WRONG_TREE)


def test_a_source_with_a_vllm_of_its_own_is_refused(run):
    with pytest.raises(InvalidMeasurement, match="holds a vllm of its own"):
        run({"vllm/__init__.py": ""})


def test_tests_that_never_import_vllm_are_told(run):
    assert run({"tests/conftest.py": "", "tests/test_x.py": "def test_a(): ..."}).vllm_path is None


def test_node_ids_marker_and_keyword_select(run):
    files = {"tests/test_x.py": MIXED, "tests/test_y.py": """
        import pytest
        @pytest.mark.cpu_test
        def test_one(): ...
        def test_two(): ...
    """}
    result = run(files, select=(X + "test_sum[1-3584]", X + "TestC", "tests/test_x.py::test_none"))
    assert fates(result) == {X + "test_sum[1-3584]": "failed", X + "TestC::test_in_class[\\xe4 b]": "passed",
                             X + "TestC::test_in_class[x::y]": "passed", "tests/test_x.py::test_none": "missing"}
    assert not result.complete


def test_marker_and_keyword(run):
    files = {"tests/test_y.py": """
        import pytest
        @pytest.mark.cpu_test
        def test_one(): ...
        @pytest.mark.cpu_test
        def test_two(): ...
        def test_three(): ...
    """}
    assert fates(run(files, marker="cpu_test", keyword="not two")) == {"tests/test_y.py::test_one": "passed"}


def test_newer_tests_run_on_the_pins_file_with_its_conftest(run):
    older = {"tests/conftest.py": "import vllm, pytest\n@pytest.fixture\ndef seven(): return 7\n",
             "tests/v1/__init__.py": "", "tests/v1/helper.py": "WHO = 'pin'\n", "tests/v1/core/__init__.py": "",
             "tests/v1/core/test_m.py": "import vllm\ndef test_own(seven): assert vllm.N\n",
             "tests/other/test_o.py": "def test_o(): ..."}
    newer = {"tests/v1/helper.py": "WHO = 'newer'\n", "tests/v1/core/test_m.py": """
        import pytest, vllm
        from tests.v1.helper import WHO
        @pytest.mark.parametrize("n", [1, 64])
        def test_new(n, seven): assert (vllm.N, WHO) == (seven + n, "pin")
        def test_unwanted(): assert False
    """, "tests/fresh/__init__.py": "", "tests/fresh/test_f.py": "import vllm\ndef test_f(): assert vllm.N == 71\n"}
    m = "tests/v1/core/test_m.py"
    result = run(older, newer=newer, source="newer", version="0.30.0",
                 select=(m, m + "::test_new", "tests/fresh/test_f.py::test_f"))
    assert fates(result) == {m + "::test_own": "passed", m + "::test_new[1]": "failed", m + "::test_new[64]": "passed",
                             "tests/fresh/test_f.py::test_f": "passed"}


def test_series_tests_run_from_the_bytes_they_came_as(run):
    ours = b"import vllm\ndef test_n(): assert vllm.N == 71\n"
    result = run({}, source="series", select=(), series={"test_ours.py": ours, "data/x.txt": b"\xff"})
    assert fates(result) == {"test_ours.py::test_n": "passed"}
    assert result.vllm_path


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"select": ("tests/gone.py",)}, "tests/gone.py is not in"),
        ({"select": ("../x.py",)}, "leaves the tests' root"),
        ({"select": ("/etc/x.py::test_a",)}, "leaves the tests' root"),
        ({"source": "newer", "select": ("tests/x.py::test_a",)}, "needs the newer version's sdist"),
        ({"source": "newer", "select": ("tests/x.py::test_a",), "newer": {"a": ""}}, "tests/x.py is not in"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused_before_anything_runs(run, options, says):
    with pytest.raises(InvalidMeasurement, match=says) as caught:
        run({}, **options)
    assert caught.value.reason is Reason.BAD_CONFIG


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param({"python": "/no/such/python"}, "no/such/python", id="no-python"),
        pytest.param({"python": "/bin/false"}, "ended with status 1 before any test ran", id="dies-at-once"),
        pytest.param({"marker": "and and"}, "ended with status 4", id="usage"),
        pytest.param({"marker": "and and", "workers": 1}, "ended with status 3", id="usage-in-a-worker"),
    ],
)
def test_a_pytest_that_never_starts_is_the_farms_fault(run, options, says):
    with pytest.raises(TestProcessLost, match=says):
        run({"tests/test_x.py": "def test_a(): ..."}, **options)


def test_settings_of_the_users_environment_do_not_reach_pytest(run):
    result = run({"tests/test_x.py": "def test_a(): ..."}, env={"PYTEST_ADDOPTS": "--collect-only"})
    assert fates(result) == {X + "test_a": "passed"}


def test_the_progress_callback_may_stop_the_run(run):
    """Ctrl-C comes as an exception out of a callback or a wait; the fixture sees that nothing is left."""
    def stop(text):
        if "1 of 2" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run({"tests/test_x.py": "import time\ndef test_a(): ...\ndef test_b(): time.sleep(60)"}, progress=stop)


# --- a real vLLM ------------------------------------------------------------------------------

RETIREMENT = "tests/v1/core/test_single_type_kv_cache_manager.py::"
EXPECTED = {RETIREMENT + "test_mamba_retirement_crosses_null_gaps": "failed"} | {
    f"{RETIREMENT}test_mamba_retirement_bounds_prefill_states[{lag}-{size}]":
        "failed" if lag and size == 3584 else "passed" for lag in (0, 1, 2) for size in (3584, 4608)}


@pytest.mark.vllm
def test_the_retirement_tests_on_an_unpatched_0_29_0(tmp_path, real_pin):
    pin = real_pin("0.29.0-cpu")
    suite = Suite("retirement", "newer", (RETIREMENT + "test_mamba_retirement_crosses_null_gaps",
                                          RETIREMENT + "test_mamba_retirement_bounds_prefill_states"),
                  version="0.30.0", workers=0)
    spec = TestRunSpec(
        python=pin.python, tree_root=pin.baseline.root, suite=suite, scratch=tmp_path / "s", pin_tests=pin.sdist("0.29.0"),
        newer_tests=pin.sdist("0.30.0"), env=pin.env(pin.baseline, tmp_path / "home"))
    spec.scratch.mkdir()
    result = run_suite(spec, print)
    assert fates(result) == EXPECTED and result.complete
    message = {row.nodeid.rpartition("::")[2]: row.message for row in result.outcomes}
    assert "71 == (7 + 1)" in message["test_mamba_retirement_bounds_prefill_states[1-3584]"]
    assert "71 == (7 + 2)" in message["test_mamba_retirement_bounds_prefill_states[2-3584]"]
    again = replace(spec, suite=replace(suite, select=suite.select[:1]), scratch=tmp_path / "s2")
    again.scratch.mkdir()
    assert fates(run_suite(again, print)) == {RETIREMENT + "test_mamba_retirement_crosses_null_gaps": "failed"}


LAID = """
    import os, pathlib
    events = pathlib.Path(os.environ["FARM_PYTEST_EVENTS"])
    def test_lay():
        {code}
        os._exit(1)
"""


@pytest.mark.parametrize("code", ["events.unlink(); os.mkfifo(events)", "events.unlink(); events.symlink_to('/dev/zero')",
                                  "events.write_text('5\\n')", "events.write_text('[' * 100_000 + '\\n')",
                                  """events.open('a').write('{{"event": "collected", "nodeids": 5}}\\n')""",
                                  """events.open('a').write('{{"event": "begin", "nodeid": "x"}}\\n')"""],
                         ids=["pipe", "link", "number", "deep", "no-list", "no-time"])
def test_what_tests_lay_in_the_place_of_the_events_is_their_own_loss(run, code):
    with pytest.raises(TestProcessLost, match="events.jsonl"):
        run({"tests/test_x.py": LAID.format(code=code)})


@pytest.mark.parametrize("laid", ["os.symlink(secret, log)", "os.mkfifo(log)"], ids=["link", "pipe"])
def test_what_tests_lay_in_the_place_of_their_log_is_not_followed(run, tmp_path, laid):
    (tmp_path / "secret").write_text("of the host")
    code = f"secret, log = {str(tmp_path / 'secret')!r}, events.with_name('pytest.log'); os.remove(log); {laid}"
    result = run({"tests/test_x.py": LAID.format(code=code)})
    assert not result.complete and "pytest.log cannot be read" in result.note and "of the host" not in result.note
