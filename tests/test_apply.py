"""Applying: what is changed and what is left, links broken, the row and the errors of the main job."""

import os
import sys

import pytest
from packages import ONE, diff, gone_file, hunk, make_package, new_file, state

from farm.apply import apply_patch, judge
from farm.errors import SeriesError, UsageError
from farm.findings import Application, Status
from farm.patchfile import PatchFile
from farm.records import PatchRow, Reason, Verdict


@pytest.fixture
def package(tmp_path):
    root = make_package(tmp_path)
    (root / "v1/__pycache__").mkdir()
    for name in ("one", "two"):
        (root / f"v1/__pycache__/{name}.cpython-311.pyc").write_bytes(b"byte code")
    return root


def changed(package, before):
    after = state(package)
    return {path for path in {*before, *after} if before.get(path) != after.get(path)}


def test_a_good_patch_changes_its_files_and_drops_their_byte_code(package):
    before = state(package)
    patch = PatchFile("one.patch", diff())
    assert apply_patch(package, patch, position=3) == PatchRow("one.patch", patch.sha256, 3, 1, 0, 0, ("v1/one.py",))
    assert "line ten\n" in (package / "v1/one.py").read_text()
    assert changed(package, before) == {"v1/one.py", "v1/__pycache__/one.cpython-311.pyc"}


@pytest.mark.parametrize("data", [
    pytest.param(diff("v1/run.sh"), id="content"),
    pytest.param(b"diff --git a/v1/run.sh b/v1/run.sh\nold mode 100755\nnew mode 100644\n", id="mode"),
    pytest.param(b"diff --git a/v1/run.sh b/v1/go.sh\nrename from v1/run.sh\nrename to v1/go.sh\n", id="rename"),
    pytest.param(gone_file("v1/run.sh"), id="deletion"),
])
def test_hard_links_are_broken(package, tmp_path, data):
    """A tree shares its files with the pristine package: neither a byte nor a mode may reach that."""
    twin = tmp_path / "pristine.sh"
    os.link(package / "v1/run.sh", twin)
    assert judge(package, PatchFile("x.patch", data)).status is Status.CLEAN
    assert twin.read_text() == ONE and twin.stat().st_mode & 0o777 == 0o755 and twin.stat().st_nlink == 1


def test_the_mode_of_a_patched_file_stays(package):
    judge(package, PatchFile("x.patch", diff("v1/run.sh")))
    assert (package / "v1/run.sh").stat().st_mode & 0o777 == 0o755


def test_offsets_are_signed_and_a_note(package):
    (package / "v1/one.py").write_text("new\nnew\n" + ONE.replace("line 14\n", "").replace("line 13\n", "").replace("line 2\n",
        ""))
    patch = PatchFile("x.patch", diff() + hunk("line 18", "X", at=16) + diff("v1/two.py"))
    found = judge(package, patch)
    assert (found.status, found.hunks, found.offsets) == (Status.OFFSET, 3, (1, -1))
    assert found.detail == "2 hunks stand on other lines than the patch says, by +1, -1"


def test_offsets_in_the_row(package):
    (package / "v1/one.py").write_text("new\n" * 3 + ONE)
    row = apply_patch(package, PatchFile("x.patch", diff() + diff("v1/two.py")))
    assert (row.hunks, row.offset_hunks, row.max_offset) == (2, 1, 3)


def test_new_and_deleted_files(package):
    assert apply_patch(package, PatchFile("new.patch", new_file("v1/new/three.py"))).files == ("v1/new/three.py",)
    assert (package / "v1/new/three.py").read_text() == "x = 1\n"
    assert apply_patch(package, PatchFile("back.patch", gone_file("v1/new/three.py", "x = 1\n"))).files == ("v1/new/three.py",)
    assert not (package / "v1/new").exists()  # a directory left empty goes with its last file
    apply_patch(package, PatchFile("gone.patch", gone_file("v1/two.py")))
    assert not (package / "v1/two.py").exists() and not (package / "v1/__pycache__/two.cpython-311.pyc").exists()


def test_repository_rooted(package):
    """a/vllm/… reaches the tree; the tests that come with it are put aside."""
    before = state(package.parent)
    both = diff("tests/v1/test_one.py") + diff("vllm/v1/one.py")
    assert apply_patch(package, PatchFile("repo.patch", both)).files == ("v1/one.py",)
    assert changed(package.parent, before) == {"vllm/v1/one.py", "vllm/v1/__pycache__/one.cpython-311.pyc"}


CASES = {
    "hunk": (diff() + diff("v1/two.py", old="line eleven?"), 12,
        r"^patches/bad.patch:12: hunk #1 of v1/two.py does not apply at "
             r"fuzz 0 \(2 hunks in all\)"),
    "fuzz": (diff().replace(b" line 8\n", b" line eight\n"), 3, "fuzz: hunk #1 of v1/one.py would apply only with fuzz"),
    "missing": (diff() + diff("v1/ghost.py"), 10, "v1/ghost.py is not in this pin's package"),
    "exists": (new_file("v1/two.py"), 3, "it makes v1/two.py, which exists already"),
    "already": (diff(old="line X", new="line 10"), 3, "its change is there already"),
    "malformed": (diff()[:-1], 9, "malformed: it is cut off"),
    "duplicate": (diff() + diff(), 12, "duplicate-diff: it changes v1/one.py twice"),
    "csrc": (diff("csrc/ops.cu"), 1, "needs-compile"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(package, case):
    data, line, says = CASES[case]
    before = state(package)
    with pytest.raises(SeriesError, match=says) as caught:
        apply_patch(package, PatchFile("bad.patch", data, "patches"))
    assert caught.value.line == line and state(package) == before


@pytest.mark.parametrize("data", [
    pytest.param(diff("tests/v1/test_one.py"), id="only-tests"),
    pytest.param(diff(new="line 10"), id="same-line"),
])
def test_a_patch_that_changes_nothing_is_invalid(package, data):
    with pytest.raises(SeriesError, match="no-change") as caught:
        apply_patch(package, PatchFile("null.patch", data))
    assert (caught.value.verdict, caught.value.reason) == (Verdict.INVALID, Reason.NO_CHANGE)


def test_without_gnu_patch(package, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="GNU patch is not installed"):
        apply_patch(package, PatchFile("one.patch", diff()))


@pytest.mark.parametrize("script", [
    pytest.param("t = t.replace('line 10', 'line eleven')", id="another-line"),
    pytest.param("t = t.replace('line 10', 'line ten').replace('line 2\\n', '')", id="a-line-gone"),
    pytest.param("", id="nothing"),
])
def test_a_patch_program_that_does_something_else_is_found_out(package, monkeypatch, tmp_path, script):
    program = tmp_path / "bin/patch"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.stdin.read(); t = open('v1/one.py').read()\n{script}\n"
                       "open('v1/one.py', 'w').write(t)\nprint('patching file v1/one.py\\nHunk #1 succeeded at 8.')\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    before = state(package)
    found = judge(package, PatchFile("one.patch", diff()))
    assert found.status is Status.MALFORMED and "v1/one.py is not what the patch says" in found.detail
    assert state(package) == before


def test_a_patch_program_that_hangs_is_rejected(package, monkeypatch, tmp_path):
    program = tmp_path / "bin/patch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("farm.gnupatch.DEADLINE_S", 0.2)
    found = judge(package, PatchFile("one.patch", diff()))
    assert found.status is Status.REJECTED and "did not finish" in found.detail


def test_nothing_is_left_in_the_temporary_directory(package, monkeypatch, tmp_path):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)  # it is asked for once a process
    for data in (diff(), diff(old="no"), new_file("v1/x.py"), b""):
        assert isinstance(judge(package, PatchFile("x.patch", data)), Application)
    assert list((tmp_path / "tmp").iterdir()) == []
