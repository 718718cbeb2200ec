"""A series tried on one release: what GNU patch says of each hunk alone, and what the next patch finds."""

import pytest
from releases import BASE, FILE, changed, diff, release, series

from farm.findings import Status
from farm.patchfile import PatchFile
from farm.tried import Release, SourceFile, claimed, lay_out, read_file, try_series

BREAK = ("                break\n", "                continue\n")
FINISH = ("        return len(blocks)\n", "        return len(blocks) + 1\n")
OURS = changed(BASE, BREAK, FINISH)
TOP = ("LIMIT = 16\n", "LIMIT = 16\nMOST = 32\n")


def tried(tmp_path, text, *patches, version="0.30.0"):
    work = tmp_path / "work"
    work.mkdir(parents=True)
    return list(try_series(release(tmp_path, version, text), version, series(*patches).patches, work))


@pytest.mark.parametrize(("text", "status", "told"), [
    pytest.param(BASE, Status.CLEAN, [("succeeded", 0), ("succeeded", 0)], id="clean"),
    pytest.param(changed(BASE, TOP), Status.OFFSET, [("succeeded", 1), ("succeeded", 1)], id="offset"),
    pytest.param(changed(BASE, TOP, (BREAK[0], "                return\n")), Status.REJECTED, [("FAILED", 0), ("succeeded", 1)],
                 id="one-of-two"),
    pytest.param(OURS, Status.REJECTED, [("FAILED", 0), ("FAILED", 0)], id="there-already"),
])
def test_each_hunk_alone(tmp_path, text, status, told):
    (found,) = tried(tmp_path, text, diff(BASE, OURS))
    assert found.application.status is status
    assert [(report.state, report.offset) for report in found.reports] == told
    assert (found.before[FILE].data, bool(found.after)) == (text.encode(), status.good)


def test_the_next_patch_finds_what_the_one_before_made(tmp_path):
    second = diff(OURS, changed(OURS, ("                continue\n", "                continue  # on\n")))
    first, next_one = tried(tmp_path, BASE, diff(BASE, OURS), second)
    assert first.after[FILE] == next_one.before[FILE] == SourceFile(FILE, OURS.encode())
    assert next_one.missing == ()


def test_one_that_fails_or_is_upstream_is_left_out(tmp_path):
    claims = diff(BASE, OURS, preamble="Applied-Upstream: 0.30.0\n\n")
    broken = diff(changed(BASE, TOP), changed(BASE, TOP, ("MOST = 32\n", "MOST = 64\n")))
    first, second, third = tried(tmp_path, BASE, claims, broken, diff(BASE, OURS))
    assert (first.claim, first.applies, second.applies, third.applies) == ("0.30.0", True, False, True)
    assert third.before[FILE].data == BASE.encode()
    assert third.missing == ("a.patch", "b.patch")


def test_a_preamble_makes_no_other_patch(tmp_path):
    (one,), (other,) = (tried(tmp_path / name, BASE, diff(BASE, OURS, preamble=name)) for name in ("a\n\n", "b\n"))
    assert one.diff == other.diff
    assert one.patch.data != other.patch.data


@pytest.mark.parametrize(("header", "version", "expected"), [
    ("0.30.0", "0.29.0", None), ("0.30.0", "0.30.0", "0.30.0"), ("0.30.0", "0.31.0+cpu", "0.30.0"), ("0.30.0", "ours", None),
])
def test_claimed(header, version, expected):
    assert claimed(PatchFile("a.patch", diff(BASE, OURS, preamble=f"Applied-Upstream: {header}\n")), version) == expected


def test_files_come_and_go(tmp_path):
    lay_out(tmp_path, {"a/b.py": SourceFile("a/b.py", b"x"), "c.py": None})
    assert read_file(tmp_path, "a/b.py") == SourceFile("a/b.py", b"x")
    lay_out(tmp_path, {"a/b.py": None})
    assert read_file(tmp_path, "a/b.py") is None
    assert read_file(tmp_path, "a") is None
    assert read_file(tmp_path, "a/b.py/c" * 2000) is None


def test_namesakes(tmp_path):
    found = Release(release(tmp_path, "0.30.0", {"a/x.py": "1\n", "b/x.py": "2\n", "x.py": "3\n", "b/y.py": "4\n"}))
    assert set(found.namesakes("a/x.py")) == {"b/x.py", "x.py"}
    assert found.file("b/y.py").lines == ("4",)
    assert found.file("z.py") is None
