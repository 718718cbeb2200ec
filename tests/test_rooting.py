"""Which parts of a patch concern a package, by their names and what stands there."""

import pytest
from packages import diff, headers, hunk, make_package, new_file

from farm.findings import Application, Status
from farm.patchfile import PatchFile
from farm.rooting import root_in


@pytest.fixture
def package(tmp_path):
    return make_package(tmp_path)


@pytest.mark.parametrize(("data", "strip", "paths"), [
    pytest.param(diff(), 1, ("v1/one.py",), id="package"),
    pytest.param(diff("vllm/v1/one.py"), 2, ("v1/one.py",), id="repository"),
    pytest.param(diff("tests/x.py") + diff("vllm/v1/one.py") + diff("docs/x.md"), 2, ("v1/one.py",), id="repository-and-more"),
    pytest.param(diff(prefix=("vllm.orig/", "vllm/")), 1, ("v1/one.py",), id="quilt"),
    pytest.param(diff("vllm/v1/one.py", prefix=("", "")), 1, ("v1/one.py",), id="repository-without-level"),
    pytest.param(diff() + diff("tests/x.py"), 1, ("v1/one.py", "tests/x.py"),
                 id="tests-are-not-left-out-of-a-package-rooted-patch"),
    pytest.param(diff("vllm/v1/one.py") + diff("tests/kernels/x.cu") + new_file("benchmarks/x.cpp"), 2, ("v1/one.py",),
                 id="sources-of-tests-are-put-aside"),
    pytest.param(new_file("v1/sub/new.py"), 1, ("v1/sub/new.py",), id="new"),
])
def test_rooted(package, data, strip, paths):
    rooted = root_in(package, PatchFile("x.patch", data))
    assert (rooted.strip, rooted.paths) == (strip, paths)


def test_put_aside_parts_are_blotted_out_in_their_places(package):
    patch = PatchFile("x.patch", diff("tests/x.py") + diff("vllm/v1/one.py"))
    lines = root_in(package, patch).data.split(b"\n")
    assert lines[:9] == [b"#"] * 9 and lines[9:18] == diff("vllm/v1/one.py").splitlines()


def test_reversed_data_begins_with_the_last_part(package):
    patch = PatchFile("x.patch", b"Words.\n" + diff() + b"words\n" + diff("v1/two.py") + b"-- \n2.39\n")
    assert root_in(package, patch).reversed_data == diff("v1/two.py") + diff()


@pytest.mark.parametrize(("data", "status", "says"), [
    pytest.param(diff("csrc/ops.cu"), Status.NEEDS_COMPILE, "csrc/ops.cu", id="csrc"),
    pytest.param(diff("tests/x.py"), Status.NO_CHANGE, "names no file of the vllm package", id="tests"),
    pytest.param(diff(prefix=("", "")), Status.MALFORMED, "v1/one.py has no leading a/ or b/", id="no-level"),
    pytest.param(diff("vllm/v1/one.py") + diff("v1/two.py"), Status.MALFORMED, "Root all of it alike", id="two-roots"),
    pytest.param(b"--- a/v1/one.py.orig\n+++ b/v1/one.py\n" + hunk(), Status.MALFORMED, "would pick one", id="two-names"),
    pytest.param(headers("v1/link.py") + hunk(), Status.ESCAPES, "v1/link.py is a symbolic link", id="symlink"),
    pytest.param(headers("linked/sub/x.py") + hunk(), Status.ESCAPES, "leads through linked", id="through-a-symlink"),
    pytest.param(b"diff --git a/v1/one.py b/v1/two.py\nrename from v1/one.py\nrename to v1/two.py\n", Status.REJECTED,
                 "GNU patch would write over it", id="rename-onto-a-file"),
])
def test_refused_by_its_names(package, tmp_path, data, status, says):
    (package / "v1/one.py.orig").touch()
    (package / "v1/link.py").symlink_to(tmp_path)
    (package / "linked").symlink_to(tmp_path)
    found = root_in(package, PatchFile("x.patch", data))
    assert isinstance(found, Application) and found.status is status and says in found.detail


def test_compiled_sources_that_the_wheel_ships_are_built_where_they_run(package):
    (package / "v1/ops.cu").write_text("x\n")
    data = b"--- a/v1/ops.cu\n+++ b/v1/ops.cu\n@@ -1 +1 @@\n-x\n+y\n"
    assert root_in(package, PatchFile("x.patch", data)).paths == ("v1/ops.cu",)
