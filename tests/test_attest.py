"""What the process table shows of a server's processes."""

import os
import subprocess
import sys
from contextlib import contextmanager

import played
import pytest

from farm import attest
from farm.childenv import TIES
from farm.errors import InvalidMeasurement
from farm.records import Reason

LOAD = "import ctypes, sys; [ctypes.CDLL(p) for p in sys.argv[1:]]; print('up', flush=True); sys.stdin.read()"


@contextmanager
def mapping(*libraries):
    """The id of a process that maps these libraries."""
    with subprocess.Popen([sys.executable, "-c", LOAD, *map(str, libraries)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        yield child.pid
        child.stdin.close()


@pytest.fixture
def trees(tmp_path):
    return [played.write_tree(tmp_path / name) for name in ("one", "other")]


@pytest.mark.parametrize(
    ("mapped", "says"),
    [((0,), None), ((), "none of its processes maps an extension"), ((1,), "it maps .*other"), ((0, 1), "it maps .*other")],
    ids=["the-tree", "none", "another", "both"],
)
def test_the_tree_that_processes_run(trees, mapped, says):
    with mapping(*(trees[i] / "vllm/_C.abi3.so" for i in mapped)) as pid:
        if says is None:
            attest.attest_tree(trees[0], [pid], "look")
            return
        with pytest.raises(InvalidMeasurement, match=f"{says}.*; look$") as caught:
            attest.attest_tree(trees[0], [pid], "look")
    assert caught.value.reason is Reason.WRONG_TREE


@pytest.mark.parametrize(
    ("mapped", "says"),
    [(["pins"], None), ([], "none of its processes maps a library of torch"), (["venvs"], "it maps .*venvs/torch/lib"),
     (["pins", "venvs"], "it maps .*venvs/torch/lib")],
    ids=["the-pins", "none", "another", "both"],
)
def test_the_torch_that_processes_run(tmp_path, mapped, says):
    library = {name: played.write_torch(tmp_path / name) / "torch/lib/libtorch_cpu.so" for name in ("pins", "venvs")}
    with mapping(*(library[name] for name in mapped)) as pid:
        if says is None:
            attest.attest_torch(tmp_path / "pins/torch", [pid], "look")
            return
        with pytest.raises(InvalidMeasurement, match=f"{says}.*; look$") as caught:
            attest.attest_torch(tmp_path / "pins/torch", [pid], "look")
    assert caught.value.reason is Reason.WRONG_TREE


def test_a_torch_whose_files_are_links_into_a_cache(tmp_path):
    cached = played.write_torch(tmp_path / "cache") / "torch/lib/libtorch_cpu.so"
    linked = tmp_path / "pins/torch/lib/libtorch_cpu.so"
    linked.parent.mkdir(parents=True)
    linked.symlink_to(cached)
    with mapping(linked) as pid:
        attest.attest_torch(tmp_path / "pins/torch", [pid], "look")


@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize(("value", "says"), [(None, "takes it away"), ("x", "sets it to 'x'"), ("", "sets it to 'nothing'")],
                         ids=["gone", "another", "empty"])
def test_what_a_start_script_may_not_change(name, value, says):
    given = {name: "mine", "OTHER": "1"}
    attest.attest_ties({name: "mine"}, given)
    with pytest.raises(InvalidMeasurement, match=f"{name}=mine, but its start script {says}") as caught:
        attest.attest_ties({} if value is None else {name: value}, given)
    assert caught.value.reason is Reason.BAD_CONFIG


def test_what_is_known_of_a_process():
    with mapping() as pid:
        assert attest.command(pid)[:2] == (sys.executable, "-c")
        assert attest.environment(pid)["PATH"] == os.environ["PATH"]
        assert attest.parents([pid]) == {pid: os.getpid()}
    assert (attest.command(pid), attest.parents([pid])) == ((), {})
    with pytest.raises(InvalidMeasurement, match="cannot be read"):
        attest.environment(pid)
