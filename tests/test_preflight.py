"""What a run is refused for before a card is touched; trees and packages are shown by tests/test_matrix.py."""

from pathlib import Path

import pytest
from fake_wheels import write_wheel

from farm import config, preflight
from farm.bench import Card
from farm.errors import UsageError

MATRIX = """\
name: demo
pins: [p29]
isolation: bwrap
cells:
  - job: unit
    with: {suites: [{name: s, source: series}]}
  - {job: triage}
"""
CPU = Card("CPU-0", "cpu slot 1/1", "cpu", "a")


@pytest.fixture
def matrix(tmp_path, monkeypatch) -> Path:
    for folder in ("configs/matrix", "configs/pins", "patches/tests"):
        (tmp_path / folder).mkdir(parents=True)
    write_wheel(tmp_path / "index")
    (tmp_path / "configs/pins/p29.yaml").write_text(
        f"version: 0.29.0\nflavour: cpu\npip_args: [--no-index, --find-links, {tmp_path / 'index'}]\n")
    (tmp_path / "patches/series").write_text("# none\n")
    (tmp_path / "configs/matrix/m.yaml").write_text(MATRIX)
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FARM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "configs/matrix/m.yaml"


def broken(matrix: Path, monkeypatch) -> None:
    """From now on bubblewrap is there, and may not make a sandbox."""
    program = matrix.parents[2] / "bin" / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def quiet(text: str) -> None:
    pass


def test_a_run_that_only_this_machine_can_run_is_refused_where_it_can_make_no_sandbox(matrix, monkeypatch):
    broken(matrix, monkeypatch)
    with pytest.raises(UsageError, match="No permissions to create new namespace.*--only triage") as caught:
        preflight.preflight(config.load(matrix), quiet, [CPU])
    assert (caught.value.file, caught.value.line) == (matrix, 3)


@pytest.mark.parametrize(("only", "here", "isolation"), [
    pytest.param(("triage",), [CPU], "bwrap", id="cells-without-arms"),
    pytest.param((), None, "bwrap", id="other-machines-may-have-it"),
    pytest.param((), [CPU], "none", id="trusted"),
])
def test_a_run_that_needs_no_sandbox_here_is_not(matrix, monkeypatch, only, here, isolation):
    broken(matrix, monkeypatch)
    matrix.write_text(MATRIX.replace("isolation: bwrap", f"isolation: {isolation}"))
    planned = preflight.preflight(config.load(matrix, only), quiet, here)
    assert {cell.id: cell.needs.sandbox for cell in planned.cells} == {
        cell.id: cell.job.name == "unit" and isolation == "bwrap" for cell in planned.cells}
    assert len(planned.cells) == (1 if only else 2)


def test_a_cell_that_no_card_here_can_run_needs_no_sandbox_here(matrix, monkeypatch):
    broken(matrix, monkeypatch)
    (matrix.parents[1] / "profiles").mkdir()
    (matrix.parents[1] / "profiles/big.yaml").write_text("model: {tiny: qwen3next-cpu}\nneeds: {cuda: true}\n")
    matrix.write_text(MATRIX.replace("  - job: unit\n", "  - job: unit\n    profile: big\n"))
    assert len(preflight.preflight(config.load(matrix), quiet, [CPU]).cells) == 2
