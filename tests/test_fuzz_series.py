"""A short run of the series fuzzer, and that it notices every sort of fault that it looks for.

The long run: python tests/bench/fuzz_series.py --inputs 20000 --seed 1
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"
INPUTS = 240
# Stands in for `farm.check.check` and does wrong, by the number of the input.
SABOTEUR = '''
import dataclasses, os, subprocess, tempfile, time
from farm.check import check
from farm.findings import Status

def subject(directory, package, cache):
    number, workspace = int(directory.name[-6:]), package.parents[1]
    if number == 1:
        raise ValueError("no good")
    if number == 2:
        (workspace / "outside/new.py").touch()
    if number == 3:
        os.system(f"echo x >> {package}/v1/empty.py")
    if number == 4:
        os.system(f"echo x >> {directory}/1.patch")
    if number == 5:
        tempfile.mkdtemp()
    if number == 6:
        subprocess.Popen(["sleep", "600"], cwd=tempfile.gettempdir())
    if number == 7:
        time.sleep(600)
    if number == 8:
        os._exit(3)
    if number == 9:
        os.chmod(workspace / "canary.py", 0o600)
    if number == 10:
        end = time.process_time() + 1.5
        while time.process_time() < end:
            pass
    if number == 11:
        os.system(f"echo x > {workspace.parent}/stray.py")
    report = check(directory, package, cache)
    if number >= 20:  # all is well, it says
        report = dataclasses.replace(report, patches=tuple(dataclasses.replace(patch, application=dataclasses.replace(
            patch.application, status=Status.CLEAN)) for patch in report.patches))
    return report
'''


def fuzz(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    work = folder / "work"
    work.mkdir()
    done = subprocess.run([sys.executable, BENCH / "fuzz_series.py", "--work", work, "--keep", folder / "kept", *words],
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(folder)})
    assert list(work.iterdir()) == []
    return done


def counts(printed: str, title: str) -> dict[str, int]:
    line = re.search(rf"^{title}: [\d,]+(?: = (.*))?$", printed, re.MULTILINE)
    return {word: int(n.replace(",", "")) for word, n in re.findall(r"([\w-]+) ([\d,]+)", line[1] or "")}


def test_no_fault(tmp_path):
    done = fuzz(tmp_path, "--inputs", str(INPUTS), "--seed", "1", "--jobs", "2")
    assert done.returncode == 0 and done.stdout.endswith("no fault\n"), done.stdout
    assert sum(counts(done.stdout, "inputs by exit code").values()) == INPUTS, done.stdout
    statuses = counts(done.stdout, "patches by status")
    seldom = {"no-change", "needs-compile"}
    assert min(n for status, n in statuses.items() if status not in seldom) > 0, done.stdout
    assert min(counts(done.stdout, "lists by problem").values()) > 0, done.stdout
    assert int(re.search(r"plain loop of GNU patch: (\d+) good", done.stdout)[1]) > 20, done.stdout
    assert not (tmp_path / "kept").exists()


def test_every_sort_of_fault_is_noticed(tmp_path):
    (tmp_path / "saboteur.py").write_text(SABOTEUR)
    done = fuzz(tmp_path, "--subject", "saboteur:subject", "--inputs", "26", "--jobs", "2", "--wall-limit", "5",
                "--cpu-limit", "1", "--compare", "1")
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept >= {"000001-exception", "000002-outside", "000003-package", "000004-series", "000005-temporary",
                    "000006-process", "000007-hang", "000008-died", "000009-outside", "000010-hang"}, done.stdout
    assert not any(name[:6] in ("000000", *(f"{n:06}" for n in range(12, 20))) for name in kept), done.stdout
    assert any(name.endswith("-lie") for name in kept), done.stdout
    assert "beside the workers' directories: stray.py" in done.stdout
    assert (tmp_path / "kept/000001-exception/series/1.patch").is_file() and done.returncode == 1


@pytest.mark.parametrize("number", [0, 7, 41])
def test_an_input_is_the_same_everywhere(monkeypatch, number):
    show = f"from fuzz_cases import *; from fuzz_corpus import *; print(make_case(corpus(), 1, {number}).entries)"
    printed = [subprocess.run([sys.executable, "-c", show], check=True, capture_output=True, text=True, env={
        **os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{BENCH}:{BENCH.parents[1]}"}).stdout for seed in ("1", "2")]
    assert printed[0] == printed[1] and "patch" in printed[0]
