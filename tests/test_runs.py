"""`farm runs`: how a run stands, how far it is, and how to go on."""

import dataclasses
import io
from datetime import datetime, timedelta, timezone

import pytest
from rich.console import Console
from test_store import attempt_rows

from farm import runs
from farm.drivers import Driver
from farm.store import Store

NOW = datetime(2026, 12, 2, 8, 0, tzinfo=timezone.utc)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FARM_RESULTS", str(tmp_path / "results"))
    return Store.open(tmp_path / "results")


def write(store, run, status="running", *, hours=1.0, cells=3, done=0, again=0, driver=None,
          command=("farm", "matrix", "m.yaml")):
    for n in range(done):
        rows = attempt_rows(run, f"c{n}", 1)
        rows["cells"][0]["final"] = True
        store.commit(run, f"c{n}", 1, rows)
    for n in range(again):
        rows = attempt_rows(run, f"c{done + n}", 1)
        rows["cells"][0]["final"] = False
        store.commit(run, f"c{done + n}", 1, rows)
    store.commit_run(run, {"status": status, "started_utc": NOW - timedelta(hours=hours), "cells": cells, "wall_s": 61.4,
                           "exit_code": 0 if status == "finished" else None, "command": list(command),
                           "process": driver and str(driver)})


HERE = Driver.here()


@pytest.mark.parametrize(("status", "driver", "stands", "goes_on"), [
    pytest.param("running", HERE, "running", False, id="alive"),
    pytest.param("running", dataclasses.replace(HERE, started=1), "interrupted", True, id="killed"),
    pytest.param("running", dataclasses.replace(HERE, boot="b"), "interrupted", True, id="the-machine-was-started-anew"),
    pytest.param("running", dataclasses.replace(HERE, boot="b", host="room-7"), "running (on room-7)", False, id="elsewhere"),
    pytest.param("running", None, "interrupted", True, id="of-an-older-farm"),
    pytest.param("interrupted", HERE, "interrupted", True, id="interrupted"),
    pytest.param("failed", HERE, "failed", True, id="failed"),
    pytest.param("finished", HERE, "finished", True, id="finished-and-cells-wanted-a-card"),
])
def test_how_a_run_stands(store, status, driver, stands, goes_on):
    write(store, "r", status, driver=driver, done=1, again=2)
    (line,) = runs.lines(store, NOW)
    assert (line.status, line.go_on is not None) == (stands, goes_on)


def test_a_run_that_has_all_it_promised_does_not_go_on(store):
    write(store, "r", "finished", done=3)
    (line,) = runs.lines(store, NOW)
    assert (line.status, line.cells, line.go_on) == ("finished", "3 of 3", None)


def test_cells_are_done_when_an_attempt_is_final(store):
    write(store, "r", done=1, again=1)
    assert runs.lines(store, NOW)[0].cells == "1 of 3"


def test_a_run_whose_row_is_damaged_is_listed_by_its_cells(store, tmp_path):
    write(store, "b", "finished", done=2)
    write(store, "a", hours=2.0)
    (tmp_path / "results/table=runs/run=b/run.parquet").write_bytes(b"PAR1")
    first, second = runs.lines(store, NOW)
    assert (first.run, first.status, first.cells) == ("b", "row unreadable", "2 of ?")
    assert first.go_on == "farm matrix CONFIG --resume b"
    assert second.run == "a"


@pytest.mark.parametrize(("command", "goes_on"), [
    (["/x/bin/farm", "matrix", "m.yaml"], "farm matrix m.yaml --resume r"),
    (["/x/farm/__main__.py", "matrix", "m.yaml", "--only", "a b"], "farm matrix m.yaml --only 'a b' --resume r"),
    (["farm/matrix.py", "m.yaml"], "farm/matrix.py m.yaml --resume r"),
    (["farm", "matrix", "--resume", "r", "m.yaml", "--take-over"], "farm matrix m.yaml --resume r"),
    (["farm", "matrix", "--resume=r", "m.yaml"], "farm matrix m.yaml --resume r"),
])
def test_the_command_that_goes_on(command, goes_on):
    assert runs.resumption(command, "r", runs.default_results()) == goes_on


def test_the_command_that_goes_on_names_results_that_are_not_the_default_here(monkeypatch):
    monkeypatch.setenv("FARM_RESULTS", "/of/another")
    command = ["farm", "matrix", "m.yaml"]
    assert runs.resumption(command, "r", "/of/this run") == "farm matrix m.yaml --results '/of/this run' --resume r"
    assert runs.resumption([*command, "--results=/x"], "r", "/of/this run") == "farm matrix m.yaml --results=/x --resume r"


def printed(store, width=80, terminal=True):
    out = io.StringIO()
    runs.print_runs(Console(file=out, width=width, force_terminal=terminal, color_system=None), runs.lines(store, NOW))
    return out.getvalue()


def test_the_table_fits_a_narrow_terminal_and_commands_are_below_it(store):
    write(store, "smoke-cpu-20261202T063520-d32c", driver=dataclasses.replace(HERE, started=1), done=2)
    write(store, "smoke-cpu-20261202T053520-d32d", "finished", hours=49.0, done=3)
    text = printed(store)
    assert "row 1 of" not in text and all(len(line) <= 80 for line in text.splitlines() if "│" in line)
    table = [[part.strip() for part in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert [row[1:] for row in table if row[1]] == [["finished", "0", "3 of 3", "2 d", "61"],
                                                   ["interrupted", "", "2 of 3", "60 min", "61"]]
    assert text.splitlines()[-1] == "go on with: farm matrix m.yaml --resume smoke-cpu-20261202T063520-d32c"


def test_in_a_pipe_every_run_is_one_line(store):
    write(store, "a", "interrupted")
    assert printed(store, terminal=False).splitlines() == [
        "run\tstatus\texit\tcells\tage\twall s\tstarted\tgo on with",
        "a\tinterrupted\t\t0 of 3\t60 min\t61\t2026-12-02T07:00:00Z\tfarm matrix m.yaml --resume a"]


def test_commands_below_the_table_are_those_of_the_newest_runs(store):
    for n in range(8):
        write(store, f"r{n}", "interrupted", hours=10.0 - n)
    assert printed(store).count("go on with") == runs.LISTED and "--resume r7" in printed(store)
