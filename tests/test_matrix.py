"""The entry point: bad input ends with one clear line and exit 3 before any actor starts."""

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_wheels import write_wheel
from rich.console import Console

from farm import campaign, config, dispatch, gnupatch, matrix
from farm.bench import Card, Needs
from farm.drivers import Driver
from farm.errors import ResultsUnwritable
from farm.evidence import Evidence, RunInfo
from farm.records import Outcome, Reason, Verdict
from farm.scheduler import Scheduler, Task
from farm.store import Store

MATRIX = """\
name: demo
pins: [p29]
cells:
  - job: replay
    with:
      scenarios:
        - {name: a, block_size: 832, speculative_blocks: 3, prompts: [2000]}
  - job: prefill
    profile: tiny
    with: {prompts: [100]}
"""
PATCH = """\
Say why.

--- a/v1/pool.py
+++ b/v1/pool.py
@@ -1,3 +1,3 @@
 x0 = 0
-x1 = 1
+x1 = 10
 x2 = 2
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    for folder in ("configs/matrix", "configs/pins", "configs/profiles", "patches/tests"):
        (tmp_path / folder).mkdir(parents=True)
    write_wheel(tmp_path / "index")
    pin = "version: 0.29.0\nflavour: cpu\npip_args: [--no-index, --find-links, {}]\n"
    (tmp_path / "configs/pins/p29.yaml").write_text(pin.format(tmp_path / "index"))
    (tmp_path / "configs/profiles/tiny.yaml").write_text("model: {tiny: qwen3next-cpu}\n")
    (tmp_path / "configs/matrix/m.yaml").write_text(MATRIX)
    (tmp_path / "patches/series").write_text("# two\none.patch\n")
    (tmp_path / "patches/one.patch").write_text(PATCH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def run(project, monkeypatch):
    """run() -> (exit code, what was printed); dispatch is played, and what it was asked is in run.asked."""

    def go(only=(), results=None, resume=None, play=lambda cells: {}, take_over=False):
        def run_cells(cells, info, store, watcher, **_):
            go.asked.append([c.id for c in cells])
            return play(cells)

        monkeypatch.setattr(dispatch, "run_cells", run_cells)
        monkeypatch.setattr(dispatch, "attached", lambda address: _nothing())
        out = io.StringIO()
        request = matrix.Request(project / "configs/matrix/m.yaml", only, results or str(project / "results"), resume,
                                 take_over=take_over)
        code = matrix.main(request, Console(file=out, width=200))
        return code, out.getvalue()

    go.asked = []
    return go


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *exc):
        return False


def edit(file, old, new):
    path = Path(file)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def no_patch(project, monkeypatch):
    monkeypatch.setenv("PATH", str(project))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: edit("configs/matrix/m.yaml", "profile: tiny", "profile: tyni"),
         ["configs/matrix/m.yaml:9:", "unknown profile 'tyni'; did you mean 'tiny'?"]),
        (lambda p: edit("configs/matrix/m.yaml", "prompts: [100]", "promps: [100]"),
         ["configs/matrix/m.yaml:10:", "unknown key 'promps'; did you mean 'prompts'?"]),
        (lambda p: Path("patches/series").write_text("# two\none.patch\n\ntwo.patch\n"),
         ["patches/series:4:", "two.patch"]),
        (lambda p: edit("patches/one.patch", "-x1 = 1", "-x1 = 7"), ["patches/one.patch:5:", "hunk", "v1/pool.py"]),
        (lambda p: Path("patches/series").unlink(), ["patches", "series"]),
        (lambda p: Path("patches/stray.patch").write_text(PATCH), ["stray.patch"]),
        (lambda p: edit("configs/pins/p29.yaml", "0.29.0", "9.9.9"), ["configs/pins/p29.yaml:", "9.9.9"]),
    ],
    ids=["profile", "key", "missing-patch-file", "patch-does-not-apply", "no-series", "unlisted", "pin"],
)
def test_bad_input_is_one_line_and_exit_3(run, project, spoil, says):
    spoil(project)
    code, printed = run()
    last = printed.strip().splitlines()[-1]
    assert code == 3, printed
    assert all(part in last for part in says), printed
    assert run.asked == []


def test_without_gnu_patch_it_says_how_to_get_it(run, project, monkeypatch):
    monkeypatch.setattr(gnupatch.shutil, "which", lambda *a, **k: None)
    monkeypatch.setenv("PATH", str(project))
    code, printed = run()
    assert (code, run.asked) == (3, [])
    assert "GNU patch" in printed and "install" in printed


def test_results_that_cannot_be_written(run, project):
    (project / "file").write_text("")
    code, printed = run(results=str(project / "file/results"))
    assert (code, run.asked) == (3, [])
    assert "file/results is not writable" in printed


def test_an_arms_list_that_does_not_apply_is_found_before_a_card_is_touched(run, project):
    two = PATCH.replace("-x1 = 1\n+x1 = 10", "-x1 = 10\n+x1 = 11")
    (project / "patches/two.patch").write_text(two)
    (project / "patches/series").write_text("one.patch\ntwo.patch\n")
    edit("configs/matrix/m.yaml", "pins:", "arms: {baseline: {patches: none}, only-two: {patches: [two.patch]}}\npins:")
    code, printed = run()
    assert (code, run.asked) == (3, [])
    assert "two.patch:5:" in printed


PASS = Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine")
FAIL = Outcome(Verdict.FAIL, Reason.CHANGED, "not fine")
LOST = Outcome(Verdict.ERROR, Reason.ACTOR_DIED, "lost")


@pytest.mark.parametrize(("outcome", "code"), [(PASS, 0), (FAIL, 1), (LOST, 2)])
def test_the_verdicts_make_the_exit_code_and_the_runs_row(run, project, outcome, code):
    said, printed = run(play=lambda cells: {c.id: outcome for c in cells})
    assert said == code
    (row,) = Store.at(str(project / "results")).read("runs").to_pylist()
    assert (row["status"], row["exit_code"], row["cells"], row["name"]) == ("finished", code, 2, "demo")
    assert row["config"] == MATRIX and row["wall_s"] > 0


def test_an_interrupt_closes_the_runs_row_and_says_how_to_go_on(run, project):
    def interrupt(cells):
        raise KeyboardInterrupt

    code, printed = run(play=interrupt)
    (row,) = Store.at(str(project / "results")).read("runs").to_pylist()
    assert (code, row["status"], row["exit_code"]) == (130, "interrupted", 130)
    assert f"--resume {row['run']}" in printed


def test_a_resumed_run_keeps_its_beginning_and_adds_its_time(run, project):
    def interrupt(cells):
        raise KeyboardInterrupt

    run(play=interrupt)
    (first,) = Store.at(str(project / "results")).read("runs").to_pylist()
    run(resume=first["run"], play=lambda cells: {c.id: PASS for c in cells})
    (row,) = Store.at(str(project / "results")).read("runs").to_pylist()
    assert (row["started_utc"], row["status"]) == (first["started_utc"], "finished")
    assert row["wall_s"] > first["wall_s"]


@pytest.mark.parametrize(("reason", "told"), [(Reason.NO_CARD, True), (Reason.FARM_ERROR, False)], ids=lambda r: str(r))
def test_cells_that_found_no_card_are_told_with_the_command_that_runs_them(run, project, reason, told):
    error = Outcome(Verdict.ERROR, reason, "so it was")
    code, printed = run(play=lambda cells: {c.id: error for c in cells})
    (row,) = Store.at(str(project / "results")).read("runs").to_pylist()
    words = "found no card that can be used, and have no final verdict. When one is there, go on with: "
    assert code == 2
    assert (words in printed and f"--resume {row['run']}" in printed) is told


@pytest.mark.parametrize("end", [RuntimeError("surprise"), SystemExit(15)], ids=["fault", "ray-sigterm"])
def test_whatever_ends_a_run_its_row_is_closed(run, project, end):
    def stop(cells):
        raise end

    if isinstance(end, RuntimeError):
        with pytest.raises(RuntimeError):
            run(play=stop)
    else:
        assert run(play=stop)[0] == 130
    (row,) = Store.at(str(project / "results")).read("runs").to_pylist()
    assert row["status"] == ("failed" if isinstance(end, RuntimeError) else "interrupted")


def test_a_cluster_that_does_not_answer_is_bad_usage_at_once(run, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, printed = run()
    assert (code, run.asked) == (3, [])
    assert "no Ray cluster answers at 127.0.0.1:1" in printed


def test_to_take_over_no_run_is_bad_usage_at_once(run):
    code, printed = run(take_over=True)
    assert (code, run.asked) == (3, [])
    assert "--take-over goes with --resume RUN" in printed


def test_a_cache_that_cannot_be_made(run, project, monkeypatch):
    (project / "file").write_text("")
    monkeypatch.setenv("FARM_CACHE", str(project / "file/cache"))
    code, printed = run()
    assert (code, run.asked) == (3, [])
    assert "set FARM_CACHE to another" in printed


def interrupt(cells):
    raise KeyboardInterrupt


def the_row(project):
    (row,) = Store.at(str(project / "results")).read("runs").to_pylist()
    return row


def test_resume_refuses_an_unknown_run(run):
    code, printed = run(resume="demo-1")
    assert (code, run.asked) == (3, []) and "no run" in printed and "start one with" in printed
    run(play=interrupt)
    code, printed = run(resume="demo-1")
    assert code == 3 and "no run 'demo-1' in " in printed and "see: farm runs" in printed


def test_the_newest_run_goes_on(run, project):
    run(play=interrupt)
    assert run(resume="last", play=lambda cells: {c.id: PASS for c in cells})[0] == 0
    assert the_row(project)["status"] == "finished"


@pytest.mark.parametrize(("change", "says"), [
    pytest.param(lambda: edit("configs/matrix/m.yaml", "[2000]", "[2001]"), "with: scenarios was ", id="option"),
    pytest.param(lambda: edit("configs/matrix/m.yaml", "pins: [p29]", "pins: [p29]\nseed: 5"), "seed was 0, is 5", id="seed"),
    pytest.param(lambda: edit("configs/matrix/m.yaml", "pins: [p29]", "pins: [p29]\ncampaign: true"),
                 "campaign was False, is True", id="campaign"),
    pytest.param(lambda: edit("configs/profiles/tiny.yaml", "model:", "args: [--x]\nmodel:"), "profile tiny: args --x is new",
                 id="profile"),
    pytest.param(lambda: edit("configs/pins/p29.yaml", "flavour", "torch: torch==2.13.0\nflavour"),
                 "pin p29: torch is new: torch==2.13.0 (2 cells, the first ", id="pin"),
    pytest.param(lambda: edit("patches/one.patch", "+x1 = 10", "+x1 = 11"), "patch one.patch of arm patched was sha256 ",
                 id="patch"),
    pytest.param(lambda: Path("patches/series").write_text(""), None, id="unlisted"),
])
def test_resume_refuses_what_was_not_promised_and_names_it(run, project, change, says):
    run(play=interrupt)
    change()
    code, printed = run(resume=the_row(project)["run"])
    assert (code, len(run.asked)) == (3, 1)
    if says is not None:
        assert f"--resume {the_row(project)['run']}: this is not what the run has promised: " in printed and says in printed
        assert "Put it back as it was and resume, or start a new run" in printed
    assert the_row(project)["status"] == "interrupted"


def test_resume_refuses_another_choice_of_cells(run, project):
    run(only=("replay",), play=interrupt)
    code, printed = run(resume=the_row(project)["run"])
    assert code == 3 and "the run was started with --only replay, this is without --only" in printed


@pytest.mark.parametrize("change", [
    pytest.param(lambda: edit("configs/matrix/m.yaml", "name: demo", "# a word\nname: demo"), id="comment"),
    pytest.param(lambda: edit("configs/matrix/m.yaml", "name: demo", "name: demo\nattempts: 3\ncards: {cpu_slots: 2}"),
                 id="cards"),
])
def test_resume_goes_on_where_no_cell_has_changed(run, project, change):
    run(play=interrupt)
    change()
    assert run(resume=the_row(project)["run"], play=lambda cells: {c.id: PASS for c in cells})[0] == 0
    assert [len(asked) for asked in run.asked] == [2, 2] and the_row(project)["status"] == "finished"


def driven_by(project, **change):
    store, row = Store.at(str(project / "results")), the_row(project)
    driver = dataclasses.replace(Driver.here(), **change)
    store.commit_run(row["run"], {**row, "status": "running", "process": str(driver)})
    return row["run"]


@pytest.mark.parametrize(("change", "says"), [
    pytest.param({}, f"it is still running on {os.uname().nodename}, pid {os.getpid()}", id="here"),
    pytest.param({"host": "room-7", "boot": "b"}, "running on room-7, pid", id="elsewhere"),
])
def test_resume_refuses_a_run_that_is_driven(run, project, change, says):
    run(play=interrupt)
    code, printed = run(resume=driven_by(project, **change))
    assert (code, len(run.asked)) == (3, 1) and says in printed


def test_a_driver_on_another_machine_that_is_gone_can_be_followed(run, project):
    run(play=interrupt)
    name = driven_by(project, host="room-7", boot="b")
    assert "add --take-over" in run(resume=name)[1]
    assert run(resume=name, take_over=True, play=lambda cells: {c.id: PASS for c in cells})[0] == 0


def test_a_driver_that_was_killed_is_followed(run, project):
    run(play=interrupt)
    assert run(resume=driven_by(project, started=1), play=lambda cells: {c.id: PASS for c in cells})[0] == 0


def test_a_run_that_has_lost_its_own_row_goes_on_by_its_cells(run, project):
    run(play=interrupt)
    name = the_row(project)["run"]
    (project / f"results/table=runs/run={name}/run.parquet").write_bytes(b"PAR1")
    assert run(resume=name, play=lambda cells: {c.id: PASS for c in cells})[0] == 0
    assert the_row(project)["status"] == "finished"


def test_a_disk_that_refuses_ends_the_run_with_one_line_and_2(run, project):
    def full(cells):
        raise ResultsUnwritable("run x: cannot write below y (no space)")

    code, printed = run(play=full)
    (line,) = [text for text in printed.splitlines() if "cannot write" in text]
    assert code == 2 and f"--resume {the_row(project)['run']}" in line and the_row(project)["status"] == "failed"


def test_the_config_that_a_run_keeps_is_the_one_that_it_read(run, project):
    run(play=lambda cells: edit("configs/matrix/m.yaml", "name: demo", "name: other") or {c.id: PASS for c in cells})
    assert the_row(project)["config"] == MATRIX


def test_only_runs_a_part(run):
    run(only=("prefill",))
    assert [cell.split("-")[0] for cell in run.asked[0]] == ["prefill"]


@pytest.mark.parametrize("command", [["farm/matrix.py"], ["-m", "farm", "matrix"]], ids=["by-path", "module"])
def test_the_entry_points_say_3_for_bad_usage(project, command):
    argv = [str(config.PROJECT / command[0])] if command[0].endswith(".py") else command
    done = subprocess.run([sys.executable, *argv, "nowhere.yaml"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(config.PROJECT)}, check=False)
    assert done.returncode == 3
    assert "nowhere.yaml: cannot be read" in done.stdout + done.stderr
    none = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(config.PROJECT)}, check=False)
    assert none.returncode == 3


def test_the_matrix_file_has_its_run_bit():
    assert os.access(config.PROJECT / "farm/matrix.py", os.X_OK)
    assert (config.PROJECT / "farm/matrix.py").read_text().startswith("#!/usr/bin/env python3\n")


# --- campaigns ------------------------------------------------------------------------------


def ended(run, **reasons):
    """Play a run in which the cell of each job ends with this verdict and reason, its row committed."""
    def play(cells):
        outcomes = {}
        for cell in cells:
            verdict, reason = reasons.get(cell.job.name, (Verdict.PASS, Reason.AS_EXPECTED))
            outcome = Outcome(verdict, reason, "played")
            if cell.control:
                outcome = campaign.controlled(outcome, cell.control)
            row = Evidence(RunInfo(run.info.run, None, None), cell, 1).cell_row(outcome, final=True)
            run.store.commit(run.info.run, cell.id, 1, {"cells": [row]})
            outcomes[cell.id] = outcome
        return outcomes
    return play


@pytest.fixture
def campaigned(run, project, monkeypatch):
    """go(**reasons by job) -> (exit code, printed) of a matrix whose replay cell is a control that must end effect-absent."""
    edit("configs/matrix/m.yaml", "pins: [p29]", "pins: [p29]\ncampaign: true")
    edit("configs/matrix/m.yaml", "  - job: replay\n", "  - job: replay\n    control: effect-absent\n")
    seen = SimpleNamespace()

    def keep(*args, **more):
        seen.store, seen.info = args[2], args[1]
        return seen.play(args[0])

    def go(only=(), **reasons):
        seen.play = ended(seen, **reasons)
        monkeypatch.setattr(dispatch, "attached", lambda address: _nothing())
        monkeypatch.setattr(dispatch, "run_cells", keep)
        out = io.StringIO()
        code = matrix.main(matrix.Request(project / "configs/matrix/m.yaml", only, str(project / "results")),
                           Console(file=out, width=200))
        return code, out.getvalue()

    return go


@pytest.mark.parametrize(("reasons", "only", "code", "says"), [
    pytest.param({"replay": (Verdict.FAIL, Reason.EFFECT_ABSENT)}, (), 0, "PASS     control-held", id="held"),
    pytest.param({"replay": (Verdict.FAIL, Reason.EFFECT_ABSENT), "prefill": (Verdict.FAIL, Reason.CHANGED)}, (), 1,
                 "control-held", id="held-and-a-fail-is-evidence"),
    pytest.param({}, (), 2, "INVALID as a whole", id="the-control-passed"),
    pytest.param({"prefill": (Verdict.FAIL, Reason.CHANGED)}, (), 2, "INVALID as a whole", id="then-a-fail-is-none"),
    pytest.param({}, ("prefill",), 2, "no control was run", id="left-out"),
    pytest.param({"replay": (Verdict.SKIP, Reason.NEEDS_UNMET), "prefill": (Verdict.SKIP, Reason.NEEDS_UNMET)}, (), 0, "2 SKIP",
                 id="all-skipped"),
    pytest.param({"replay": (Verdict.SKIP, Reason.NEEDS_UNMET)}, (), 2, "INVALID as a whole", id="a-control-skipped-alone"),
])
def test_a_campaign_stands_with_its_controls(campaigned, reasons, only, code, says):
    ended_with, printed = campaigned(only, **reasons)
    assert (ended_with, says in printed) == (code, True), printed


@pytest.mark.parametrize(("took", "says", "estimate_s"), [
    ({}, "no estimate for 2 cells on 2 cards: no run in this results root has measured any of them", None),
    ({"replay": 8.0, "prefill": 20.0}, "estimate: 20 s for 2 cells on 2 cards (28 s one after another: 1.40 times as fast)",
     20.0),
    ({"prefill": 20.0}, "estimate: at least 20 s for 2 cells on 2 cards", None),
], ids=["first-run", "estimated", "half-known"])
def test_the_schedule_is_foreseen_by_what_earlier_runs_took(run, project, monkeypatch, took, says, estimate_s):
    """A cell of the same job and profile will do; the first run of the root is by hand."""
    store = Store.open(project / "results")
    for job, wall_s in took.items():
        spec = next(c for c in matrix.preflight(config.load(project / "configs/matrix/m.yaml"), lambda text: None).cells
                    if c.job.name == job)
        row = Evidence(RunInfo("by-hand", None, None), spec, 1).cell_row(
            Outcome(Verdict.PASS, Reason.AS_EXPECTED, "played"), final=True)
        store.commit("by-hand", spec.id, 1, {"cells": [row | {"wall_s": wall_s}]})

    def run_cells(cells, info, store, watcher, *, foresee, **_):
        schedule = Scheduler([Task(cell.id, Needs()) for cell in cells], 1)
        for name in ("a", "b"):
            schedule.add_card(Card(name, name, "cpu", "h"))
        foresee(schedule)
        return {}

    monkeypatch.setattr(dispatch, "attached", lambda address: _nothing())
    monkeypatch.setattr(dispatch, "run_cells", run_cells)
    out = io.StringIO()
    matrix.main(matrix.Request(project / "configs/matrix/m.yaml", (), str(project / "results")), Console(file=out, width=200))
    assert says in out.getvalue()
    assert [r["estimate_s"] for r in store.read("runs").to_pylist()] == [estimate_s]


def test_a_broken_series_may_end_its_own_cells_alone(run, project):
    edit("configs/matrix/m.yaml", "pins: [p29]", "pins: [p29]\non_series_error: fail")
    edit("patches/one.patch", "-x1 = 1", "-x1 = 7")
    planned = matrix.preflight(config.load(project / "configs/matrix/m.yaml"), lambda text: None)
    assert len(planned.cells) == 2
    assert {(o.verdict, o.reason) for o in planned.decided.values()} == {(Verdict.FAIL, Reason.SERIES_BROKEN)}
    assert sorted(planned.decided) == sorted(c.id for c in planned.cells)  # both have the patched arm
