"""Why a patch does not apply: what is said of each hunk, and what stands there instead."""

import time

import pytest
from packages import ONE, diff, headers, hunk, make_package, new_file

from farm.apply import judge
from farm.findings import Rejected, Status
from farm.patchfile import PatchFile


@pytest.fixture
def package(tmp_path):
    return make_package(tmp_path)


def found(package, data):
    return judge(package, PatchFile("x.patch", data))


def test_a_rejected_hunk_shows_what_stands_there(package):
    (package / "v1/one.py").write_text("new\n" * 40 + ONE.replace("line 10\n", "line 10, changed\nand more\n"))
    (rejected,) = found(package, diff()).rejected
    assert rejected == Rejected(
        "v1/one.py", 1, 3, ("line 8", "line 9", "line 10", "line 11", "line 12"),
        ("line 8", "line 9", "line 10, changed", "and more", "line 11", "line 12"), 48)


def test_every_failed_hunk_is_named_and_no_other(package):
    data = headers() + hunk("line 4?", "x", at=2) + hunk() + hunk("line 17?", "x", at=15) + diff("v1/ghost.py")
    said = found(package, data)
    assert [(r.file, r.hunk, r.line, r.at) for r in said.rejected] == [
        ("v1/one.py", 1, 3, 2), ("v1/one.py", 3, 17, 15), ("v1/ghost.py", 1, 26, None)]
    assert "hunks #1, #3 of v1/one.py, hunk #1 of v1/ghost.py do not apply at fuzz 0 (4 hunks in all)" in said.detail
    assert (said.line, said.hunks, said.already) == (3, 4, False)


def test_a_file_that_is_not_there(package):
    said = found(package, diff("v1/ghost.py"))
    assert "v1/ghost.py is not in this pin's package" in said.detail and "?" not in said.detail
    assert [(r.file, r.stands, r.at) for r in said.rejected] == [("v1/ghost.py", (), None)]


@pytest.mark.parametrize(("data", "already"), [
    pytest.param(diff(old="line X", new="line 10"), True, id="its-change"),
    pytest.param(diff(old="line X", new="line 10") + diff("v1/two.py", old="line Y", new="line 10"), True,
                 id="both-its-changes"),
    pytest.param(new_file("v1/two.py"), True, id="the-file-that-it-makes"),
    pytest.param(new_file("v1/two.py") + diff(), True, id="the-file-beside-a-change-that-is-not"),
    pytest.param(diff(old="line X", new="line 10") + diff("v1/two.py"), False, id="one-of-its-changes"),
    pytest.param(new_file("v1/two.py") + diff(old="no"), False, id="the-file-beside-a-hunk-that-fails"),
])
def test_already(package, data, already):
    said = found(package, data)
    assert (said.status, said.already) == (Status.REJECTED, already), said


def test_a_part_that_is_there_already_is_told(package):
    """GNU patch passes over the whole part then; the other hunk of it would apply."""
    said = found(package, headers() + hunk("line X", "line 10") + hunk("line 17", "seventeen", at=15))
    assert [(r.hunk, r.already) for r in said.rejected] == [(1, True)]
    assert "Hunk #1 of v1/one.py is there already." in said.detail


def test_steps_that_are_there_already_are_undone_from_the_last(package):
    (package / "v1/one.py").write_text(ONE.replace("line 10\n", "X\n"))
    said = found(package, diff() + diff(old="line ten", new="X"))
    assert said.already and said.status is Status.REJECTED


def test_fuzz_names_its_hunks(package):
    said = found(package, diff("v1/two.py") + headers() + hunk() + hunk("line 17", "X", at=15).replace(b" line 15\n",
        b" other\n"))
    assert said.status is Status.FUZZ and [(r.file, r.hunk) for r in said.rejected] == [("v1/one.py", 2)]
    assert said.rejected[0].stands == ("line 15", "line 16", "line 17", "line 18", "line 19")
    assert "hunk #2 of v1/one.py would apply only with fuzz" in said.detail


def test_less_context_after_than_before(package):
    """GNU patch then takes the hunk at the end of the file alone."""
    data = headers() + b"@@ -7,4 +7,5 @@\n line 7\n line 8\n line 9\n+new\n line 10\n"
    assert "less context after its change than before" in found(package, data).detail


def test_lines_that_stand_there_already_under_another_context_are_told(package):
    """Fuzz would put them there a second time (DOMAIN.md 4, 3)."""
    (package / "v1/one.py").write_text(ONE.replace("line 10\n", "line 10\n    block.free(request_id)\n").replace("line 8\n",
        "line 8a\n"))
    data = headers() + b"@@ -8,5 +8,6 @@\n line 8\n line 9\n line 10\n+    block.free(request_id)\n line 11\n line 12\n"
    said = found(package, data)
    assert said.status is Status.REJECTED and not said.already
    assert "The lines that hunk #1 of v1/one.py would add stand in the file already" in said.detail


def test_short_lines_tell_nothing(package):
    (package / "v1/one.py").write_text(ONE.replace("line 8\n", "pass\n"))
    said = found(package, headers() + b"@@ -8,4 +8,5 @@\n line 8\n line 9\n+pass\n line 10\n line 11\n")
    assert said.status is Status.FUZZ and "already" not in said.detail


def test_line_ends_are_told(package):
    assert "Line ends differ" in found(package, diff("v1/crlf.py")).detail


@pytest.mark.parametrize("lines", [
    pytest.param(["x = 1"] * 3000, id="one-line-3000-times"),
    pytest.param([""] * 3000, id="blank"),
    pytest.param([f"    return {n % 7}" for n in range(3000)], id="seven-lines"),
])
def test_hostile_texts_are_judged_fast(package, lines):
    """200 hunks that fail, in a file in which everything is like everything."""
    (package / "v1/long.py").write_text("\n".join(lines) + "\n")
    hunks = b"".join(b"@@ -%d,9 +%d,9 @@\n" % (n * 12 + 1, n * 12 + 1) + b"".join(b" " + line.encode()
        + b"\n" for line in lines[:4])
                     + b"-gone\n+new\n" + b"".join(b" " + line.encode() + b"\n" for line in lines[:4]) for n in range(200))
    began = time.monotonic()
    said = found(package, headers("v1/long.py") + hunks)
    assert said.status is Status.REJECTED and len(said.rejected) == 200 and time.monotonic() - began < 5
