"""What is wrong with a patch whatever the tree.  Its full table is test_treacherous."""

import pytest
from packages import diff, headers, hunk, indented, new_file

from farm.errors import SeriesError
from farm.faults import escapes, is_plain
from farm.findings import Status
from farm.patchfile import PatchFile, named


@pytest.mark.parametrize(("data", "status", "line"), [
    pytest.param(diff(), None, None, id="none"),
    pytest.param(b"", Status.MALFORMED, None, id="by-its-parse"),
    pytest.param(diff("../x.py"), Status.ESCAPES, 1, id="by-its-names"),
    pytest.param(indented(diff()) + diff(), Status.DUPLICATE_DIFF, 3, id="by-its-words"),
    pytest.param(diff() + diff(), Status.DUPLICATE_DIFF, 12, id="by-its-parts"),
])
def test_fault(data, status, line):
    fault = PatchFile("a.patch", data, "patches").fault
    assert (fault and fault.status, fault and fault.line) == (status, line)


def test_sections_raise_what_the_parse_says():
    with pytest.raises(SeriesError, match="patches/a.patch:9: .*cut off"):
        _ = PatchFile("a.patch", diff()[:-1], "patches").sections


@pytest.mark.parametrize(("path", "out"), [("/etc/x", True), ("../x", True), ("a/../x", True), ("a/..x", False), ("a/x",
    False)])
def test_escapes(path, out):
    assert escapes(path) is out


@pytest.mark.parametrize("path", ["a//b", "./a", "a/", "a\nb", "a\udcff", "x" * 256, "a/" * 501 + "b", "a\0b"])
def test_not_plain(path):
    assert is_plain("a/b é.py") and not is_plain(path)


def test_named_has_every_rooted_form_and_nothing_unsafe():
    patches = [PatchFile("1", diff("vllm/v1/one.py")), PatchFile("2", diff("../x")), PatchFile("3", new_file("v1/new.py"))]
    paths = named(patches)
    assert {"vllm/v1/one.py", "v1/one.py", "v1/new.py"} <= set(paths) and not any(".." in path for path in paths)


def test_only_a_hunk_below_a_name_is_live():
    """GNU patch needs a file's name before it takes an indented hunk; both have been tried."""
    quoted = PatchFile("1", indented(hunk()) + diff())
    assert quoted.fault is None
    assert PatchFile("2", indented(headers()[:16] + hunk(new="X")) + diff()).fault.status is Status.MALFORMED


@pytest.mark.parametrize("name", [rb'"a/v1/\\99.py"', rb'"a/v1/\\9.py"'])
def test_a_backslash_before_a_digit_that_is_no_octal(name):
    """git would take the digit as it stands; a fuzzer met a ValueError here."""
    assert PatchFile("x", b"--- " + name + b"\n+++ " + name + b"\n@@ -1 +1 @@\n-a\n+b\n").fault is None


@pytest.mark.parametrize("data", [
    pytest.param(headers() + b"@@ -4294967296,0 +4294967297 @@\n+x\n", id="old"),
    pytest.param(headers() + b"@@ -2147483647,0 +1,3 @@\n+a\n+b\n+c\n", id="far"),
    pytest.param(b"1,3c1\n+++ words\n> quoted\n" + diff(), id="a-normal-diff-to-the-plain-command"),
])
def test_what_gnu_patch_would_count_up_to_or_read_otherwise(data):
    """A fuzzer's: eight seconds of GNU patch, and a patch that the plain command refuses."""
    assert PatchFile("x", data).fault.status is Status.MALFORMED
