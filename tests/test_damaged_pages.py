"""A results file with a sound footer and damaged pages: named, skipped, and the rest is read.  Readers that go."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from farm.errors import UsageError
from farm.store import Store

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "tests/data/runs/h200-smoke"


def test_a_query_names_the_file_with_damaged_pages_and_reads_the_rest(tmp_path, caplog):
    results = tmp_path / "results"
    shutil.copytree(SMOKE, results)
    path = next(results.glob("table=cells/run=*/*.parquet"))
    data = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    for column in map(group.column, range(group.num_columns)):
        begin = column.dictionary_page_offset or column.data_page_offset
        data[begin:begin + column.total_compressed_size] = b"\x5a" * column.total_compressed_size
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert Store.at(results).sql("select cell from cells").rows == ()
    assert str(path) in caplog.text


def test_a_results_root_that_is_a_file_is_called_one(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file; name the directory"):
        Store.at(tmp_path / "file")


def test_a_reader_that_goes_does_not_make_a_comparison_differ():
    runs = sorted(p.name.removeprefix("run=") for p in (SMOKE / "table=runs").iterdir())
    command = [sys.executable, "-m", "farm", "compare", runs[-1], runs[-1], "--results", str(SMOKE),
               "--second-results", str(SMOKE)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False).returncode == 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        process.stdout.close()  # before a word is written
        assert process.wait(120) == 0
