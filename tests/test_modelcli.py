"""`farm model`: a stand-in model in a directory of one's own."""

import pytest
from typer.testing import CliRunner

from farm import cli, models
from farm.errors import UsageError


def farm(*words):
    return CliRunner().invoke(cli.app, ["model", *map(str, words)])


@pytest.mark.parametrize("kind", models.KINDS)
def test_a_model_is_written_with_the_bytes_that_a_cell_serves(kind, tmp_path):
    said = farm(kind, tmp_path / "here")
    assert said.exit_code == 0, said.output
    served = models.write_model(kind, tmp_path / "cache")
    assert {p.name: p.read_bytes() for p in (tmp_path / "here").iterdir()} == {
        p.name: p.read_bytes() for p in served.path.iterdir()}
    assert served.sha256 in said.output and str(tmp_path / "here") in said.output.replace("\n", "")


def test_the_names_are_listed_with_what_they_are():
    said = farm()
    assert said.exit_code == 0
    assert all(kind in said.output for kind in models.KINDS) and set(models.WORDS) == set(models.KINDS)


@pytest.mark.parametrize(("words", "says"), [
    (["qwen"], "no stand-in model 'qwen'; there are: qwen3next-cpu, qwen3_5-gpu, dflash2-drafter"),
    (["qwen3_5-gpu"], "farm model qwen3_5-gpu DIR"),
], ids=["unknown", "nowhere"])
def test_what_cannot_be_written(words, says):
    failed = farm(*words)
    assert isinstance(failed.exception, UsageError) and says in str(failed.exception)


def test_a_directory_with_anything_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"mine")
    failed = farm("qwen3_5-gpu", tmp_path)
    assert isinstance(failed.exception, UsageError) and "weights.bin" in str(failed.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.bin"]
