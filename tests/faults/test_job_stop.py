"""`ray job stop` of a matrix that was submitted as the README says, at moments that its own output names."""

from __future__ import annotations

import random
import re
import time

import pytest
from jobfarm import ROWS, Head, Project
from toyrun import attempts, evidence, until

from farm.runs import lines

pytestmark = [pytest.mark.faults, pytest.mark.ray, pytest.mark.timeout(600)]

CELLS, SECONDS = 6, 3.0
OVER = re.compile(r"succeeded|failed|stopped", re.IGNORECASE)
GONE_S = 30.0  # a bound for a loaded machine; the test prints what it took
# (what a job has printed when it is stopped, the first cell that does not come to its end before): while it starts, while
# it joins the cluster, in its first cells, among later ones, in its last.
MOMENTS = {"starting": ("Running entrypoint", 0), "joining": ("run doze-", 0), "first": ("script 0", 0),
           "half": (rf"\(3 of {CELLS}\)", 3), "last": (rf"\({CELLS - 1} of {CELLS}\)", CELLS - 1)}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    made = Head(tmp_path_factory.mktemp("head"), cpus=3)
    try:
        made.wait()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project that every job is of, with the results of the first."""
    root = tmp_path_factory.mktemp("submitted")
    return Project.make(root / "project", root / "whole", CELLS, SECONDS)


@pytest.fixture(scope="module")
def whole(head, project):
    """An uninterrupted run's evidence.  Its script is run as the README has it, by its own first line."""
    head.submit(project.root, "whole", *project.entrypoint()[1:])
    ended(head, "whole")
    (run,) = project.runs()
    found = evidence(project.store, run)
    assert len(found["measurements"]) == CELLS * ROWS and len(found["cells"]) == CELLS, head.log("whole")
    return found


def ended(head, name):
    """A job's last words, when it is over; a driver's exit code is in the job's log."""
    until(lambda: OVER.search(head.job("status", name).out), 300)
    until(lambda: not head.of_jobs(), GONE_S)
    return head.log(name)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_job_that_is_stopped_leaves_nothing_and_is_resumed(head, project, whole, moment, tmp_path):
    mine = Project(project.root, tmp_path / "results")
    name = f"moment-{moment}"
    words, number = MOMENTS[moment]
    head.shut.write_text(str(number))
    head.submit(mine.root, name, *mine.entrypoint())
    head.until(name, words)
    time.sleep(random.Random(moment).uniform(0.0, 1.0))
    took_s, said = head.stop(name)
    began = time.monotonic()
    until(lambda: not mine.left(head), GONE_S)
    gone_s = time.monotonic() - began
    head.shut.unlink()
    runs = mine.runs()
    committed = attempts(mine.store, runs[0]) if runs else []
    stands = [(line.status, line.cells) for line in lines(mine.store)] if runs else []
    rows = [row["status"] for row in mine.store.read("runs").to_pylist()] if runs else []
    print(f"\nray job stop ({moment}): took {took_s:.1f} s, nothing left {gone_s:.1f} s later, row {rows}, farm runs {stands}, "
          f"{len(committed)} of {CELLS} committed")
    assert "stopped" in said.lower(), said
    if runs:
        assert stands == [("interrupted", f"{len(committed)} of {CELLS}")]
        assert len(committed) == number, "cells that were shut came to their end"
    else:
        assert moment in ("starting", "joining")

    head.submit(mine.root, f"{name}-again", *mine.entrypoint(*(["--resume", runs[0]] if runs else [])))
    log = ended(head, f"{name}-again")
    (run,) = mine.runs()
    assert run in (runs or [run])
    ran = {line.split("] ")[1].split(":")[0] for line in log.splitlines() if ": attempt " in line}
    assert len(ran) == CELLS - len(committed) and not ran & {cell for cell, _, _ in committed}, log
    assert [a for a in attempts(mine.store, run) if a in committed] == committed
    assert evidence(mine.store, run) == whole
    assert [line.status for line in lines(mine.store)] == ["finished"]
