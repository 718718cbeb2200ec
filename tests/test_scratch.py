"""The small directory that stands for a package."""

import os
from pathlib import Path

import pytest
from packages import ONE, diff, gone_file, make_package, new_file, state

from farm.apply import judge
from farm.patchfile import PatchFile
from farm.scratch import scratch, workplace


@pytest.fixture
def package(tmp_path):
    root = make_package(tmp_path / "tree")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x.py").write_text(ONE)
    (root / "linked").symlink_to(tmp_path / "out")
    (root / "v1/link.py").symlink_to(tmp_path / "out/x.py")
    return root


def files(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_it_holds_what_the_patches_name_in_both_rooted_forms(package, tmp_path):
    patches = [PatchFile("1", diff("v1/run.sh")), PatchFile("2", diff("vllm/v1/two.py")), PatchFile("3", new_file("v1/new.py"))]
    small = scratch(package, patches, tmp_path / "small")
    assert small == tmp_path / "small/vllm" and files(small) == ["v1", "v1/run.sh", "v1/two.py"]
    assert (small / "v1/run.sh").stat().st_mode & 0o777 == 0o755 and not (small / "v1/run.sh").samefile(package / "v1/run.sh")


def test_bad_patches_name_nothing(package, tmp_path):
    patches = [PatchFile("1", b""), PatchFile("2", diff("../out/x.py")), PatchFile("3", diff("/etc/passwd"))]
    assert files(scratch(package, patches, tmp_path / "small")) == []


def test_symbolic_links_lead_nowhere(package, tmp_path):
    patches = [PatchFile("1", diff("linked/x.py")), PatchFile("2", diff("v1/link.py"))]
    small = scratch(package, patches, tmp_path / "small")
    assert files(small) == ["linked", "v1", "v1/link.py"]
    assert (small / "linked").is_symlink() and not (small / "linked").exists() and not (small / "v1/link.py").exists()


def test_what_is_no_plain_file_is_a_directory_that_no_patch_takes(package, tmp_path):
    os.mkfifo(package / "v1/pipe.py")
    small = scratch(package, [PatchFile("1", diff("v1/pipe.py"))], tmp_path / "small")
    assert (small / "v1/pipe.py").is_dir()


@pytest.mark.parametrize(("tmpdir", "room", "inside"), [(False, 0, True), (False, 1 << 60, False), (True, 0, False)],
                         ids=["memory", "memory-is-short", "TMPDIR-is-set"])
def test_where_files_are_tried(tmp_path, monkeypatch, tmpdir, room, inside):
    monkeypatch.setattr("farm.scratch.MEMORY", str(tmp_path))
    monkeypatch.setattr("farm.scratch._ROOM", room)
    monkeypatch.setenv("TMPDIR", str(tmp_path.parent)) if tmpdir else monkeypatch.delenv("TMPDIR", raising=False)
    with workplace() as folder:
        assert (Path(folder).parent == tmp_path) is inside
    assert not Path(folder).exists()


def test_a_machine_without_such_a_place(monkeypatch):
    monkeypatch.setattr("farm.scratch.MEMORY", "/nowhere")
    with workplace() as folder:
        assert Path(folder).is_dir()


ANY = {
    "clean": diff(), "two-files": diff() + diff("v1/two.py"), "repository": diff("vllm/v1/one.py") + diff("tests/x.py"),
    "new": new_file("v1/new.py"), "gone": gone_file("v1/two.py"), "missing": diff("v1/ghost.py"), "rejected": diff(old="no"),
    "below-a-file": new_file("v1/one.py/x.py"), "a-directory": new_file("v1"), "link": diff("linked/x.py"),
        "csrc": diff("csrc/x.cu"),
    "no-level": diff(prefix=("", "")), "new-without-level": new_file("x").replace(b"b/x", b"v1/new.py"),
        "docs": diff("docs/x.md"),
    "mixed": diff("vllm/v1/one.py") + diff("v1/two.py"), "broken": diff()[:-1], "benchmarks": new_file("benchmarks/x.py"),
    "rename": b"diff --git a/v1/one.py b/v1/uno.py\nrename from v1/one.py\nrename to v1/uno.py\n",
    "mode": b"diff --git a/v1/one.py b/v1/one.py\nold mode 100644\nnew mode 100755\n",
}


@pytest.mark.parametrize("case", ANY)
def test_a_patch_fares_there_as_in_the_package(package, tmp_path, case):
    patch = PatchFile("x.patch", ANY[case])
    small = scratch(package, [patch], tmp_path / "small")
    there, here = judge(small, patch), judge(package, patch)
    assert there == here
    for path in here.files:
        assert state(small).get(path) == state(package).get(path)
