"""Kernels that a patched tree is given: laid out as Triton 3.6 keeps them, one folder a kernel, its group naming its files."""

import json

import pytest

from farm import kernels


@pytest.fixture
def compiled(tmp_path):
    """Caches of an unpatched tree with two kernels, and one that is being compiled."""
    caches = tmp_path / "pristine"
    for key in ("AAA", "BBB"):
        folder = caches / "triton" / key
        folder.mkdir(parents=True)
        (folder / "k.cubin").write_bytes(key.encode())
        (folder / "k.json").write_text("{}")
        children = {name: str(folder / name) for name in ("k.cubin", "k.json")}
        (folder / "__grp__k.json").write_text(json.dumps({"child_paths": children}))
    (caches / "triton" / "AAA" / "tmp.pid_7").mkdir()
    (caches / "triton" / "AAA" / "tmp.pid_7" / "k.cubin").write_text("half")
    (caches / "vllm").mkdir()
    (caches / "vllm" / "modelinfo.json").write_text("of this tree's own code")
    return caches


def test_kernels_come_along_and_nothing_else(compiled, tmp_path):
    ours = tmp_path / "patched"
    assert kernels.seed(ours, compiled)
    assert sorted(str(p.relative_to(ours)) for p in ours.rglob("*") if p.is_file()) == sorted(
        f"triton/{key}/{name}" for key in ("AAA", "BBB") for name in ("k.cubin", "k.json", "__grp__k.json"))
    for key in ("AAA", "BBB"):
        children = json.loads((ours / "triton" / key / "__grp__k.json").read_text())["child_paths"]
        assert children == {name: str(ours / "triton" / key / name) for name in ("k.cubin", "k.json")}
        assert (ours / "triton" / key / "k.cubin").read_bytes() == key.encode()


def test_what_a_patched_tree_compiles_stays_its_own(compiled, tmp_path):
    ours = tmp_path / "patched"
    kernels.seed(ours, compiled)
    (ours / "triton" / "AAA" / "k.cubin").write_bytes(b"poisoned")
    (ours / "triton" / "CCC").mkdir()
    assert (compiled / "triton" / "AAA" / "k.cubin").read_bytes() == b"AAA"
    assert not (compiled / "triton" / "CCC").exists()


def test_kernels_that_are_there_already_are_left(compiled, tmp_path):
    own = tmp_path / "patched" / "triton" / "CCC"
    own.mkdir(parents=True)
    assert not kernels.seed(tmp_path / "patched", compiled)
    assert [p.name for p in (tmp_path / "patched" / "triton").iterdir()] == ["CCC"]


def test_an_empty_folder_is_no_hindrance(compiled, tmp_path):
    (tmp_path / "patched" / "triton").mkdir(parents=True)
    assert kernels.seed(tmp_path / "patched", compiled)


@pytest.mark.parametrize("made", [(), ("pristine",), ("pristine/triton",)], ids=["no-caches", "no-kernels", "empty"])
def test_nothing_compiled_is_nothing_copied(tmp_path, made):
    for folder in made:
        (tmp_path / folder).mkdir(parents=True)
    assert not kernels.seed(tmp_path / "patched", tmp_path / "pristine")
    assert not (tmp_path / "patched").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"child_paths": 7}', '{"child_paths": {"k": "/elsewhere/k"}}'])
def test_a_group_that_reads_otherwise_is_compiled_anew(compiled, tmp_path, text):
    (compiled / "triton" / "AAA" / "__grp__k.json").write_text(text)
    assert kernels.seed(tmp_path / "patched", compiled)
    assert not (tmp_path / "patched" / "triton" / "AAA" / "__grp__k.json").exists()
    assert (tmp_path / "patched" / "triton" / "BBB" / "__grp__k.json").exists()


def test_caches_that_cannot_be_written_are_compiled_anew(compiled, tmp_path):
    (tmp_path / "patched").mkdir()
    (tmp_path / "patched" / "triton").write_text("a file")
    assert not kernels.seed(tmp_path / "patched", compiled)
    assert [p.name for p in (tmp_path / "patched").iterdir()] == ["triton"]
