"""What GNU patch says, read from its real output, and that it is GNU patch at all."""

import pytest

from farm.errors import UsageError
from farm.gnupatch import HunkReport, read_report, require_gnu_patch

# Recorded from GNU patch 2.7.6 with --verbose under LC_ALL=C.
OFFSETS = """\
Hmm...  Looks like a unified diff to me...
The text leading up to this was:
--------------------------
|Hunk #7 FAILED at 3.
|--- a/v1/one.py
|+++ b/v1/one.py
--------------------------
patching file v1/one.py
Using Plan A...
Hunk #1 succeeded at 3 (offset 2 lines).
Hunk #2 succeeded at 40 (offset -1 lines).
Hunk #3 succeeded at 50.
done
"""
FAILED = """\
patching file v1/one.py
Using Plan A...
Hunk #1 succeeded at 1.
Hunk #2 FAILED at 15.
1 out of 2 hunks FAILED
patching file v1/two.py
Using Plan A...
Hunk #1 FAILED at 1.
1 out of 1 hunk FAILED
done
"""
PARTS = """\
Hmm...  Looks like a unified diff to me...
can't find file to patch at input line 3
Perhaps you used the wrong -p or --strip option?
File to patch:\x20
Skip this patch? [y]\x20
Skipping patch.
Hunk #1 ignored at 8.
1 out of 1 hunk ignored
Hmm...The next patch would create the file v1/two.py,
which already exists!  Applying it anyway.
  The next patch looks like a unified diff to me...
patching file v1/two.py
Using Plan A...
Hunk #1 FAILED at 1.
1 out of 1 hunk FAILED
Hmm...  The next patch looks like a unified diff to me...
patching file v1/one.py
Using Plan A...
Hunk #1 succeeded at 8.
Hmm...  Ignoring the trailing garbage.
done
"""
FUZZ = "patching file v1/one.py\nHunk #1 succeeded at 2 with fuzz 1 (offset 1 line).\ndone\n"


def test_offsets_and_echoed_words():
    report = read_report(0, OFFSETS)
    assert [h.offset for h in report.hunks] == [2, -1, 0] and not report.failed and not report.fuzzy


def test_failed_hunks_name_their_file():
    report = read_report(1, FAILED)
    assert report.failed == (HunkReport("v1/one.py", 2, "FAILED"), HunkReport("v1/two.py", 1, "FAILED", part=1))


def test_fuzz():
    assert read_report(0, FUZZ).fuzzy == (HunkReport("v1/one.py", 1, "succeeded", offset=1, fuzz=1),)


def test_a_file_that_comes_twice():
    report = read_report(1, "patching file a.py\nHunk #1 succeeded at 1.\npatching file a.py\nHunk #1 FAILED at 9.\n")
    assert [h.part for h in report.hunks] == [0, 1] and report.parts == 2


def test_parts_are_counted_as_gnu_patch_takes_them():
    """A file that is not there, one that would be made anew and one that is patched are a part each."""
    report = read_report(1, PARTS)
    assert [(h.part, h.file, h.state) for h in report.hunks] == [(0, "?", "ignored"), (1, "v1/two.py", "FAILED"),
                                                                 (2, "v1/one.py", "succeeded")]
    assert report.parts == 3 and report.missing_file == 3


def test_line_ends():
    assert read_report(1, "patching file a.py\nHunk #1 FAILED at 8 (different line endings).\n").failed[0].line_ends


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        pytest.param("patch: **** malformed patch at line 12: +x\n", "malformed", (12, "malformed patch at line 12: +x"),
                     id="malformed"),
        pytest.param("can't find file to patch at input line 3\n", "missing_file", 3, id="missing"),
        pytest.param("Reversed (or previously applied) patch detected!  Skipping patch.\n", "already",
                     "its change is there already", id="applied"),
        pytest.param("Hmm...The next patch would create the file x.py,\nwhich already exists!  Skipping patch.\n", "already",
                     "it creates a file that exists already", id="exists"),
    ],
)
def test_refusals(text, field, value):
    assert getattr(read_report(1, text), field) == value


@pytest.mark.parametrize(
    ("script", "says"),
    [
        pytest.param(None, "not installed", id="none"),
        pytest.param("echo 'patch 2.0-12u11-Apple'", "not GNU patch, it says of itself: patch 2.0", id="bsd"),
        pytest.param("exit 1", "not GNU patch, it says of itself: nothing", id="silent"),
    ],
)
def test_gnu_patch_is_required(tmp_path, monkeypatch, script, says):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "patch").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "patch").chmod(0o755)
    with pytest.raises(UsageError, match=says) as caught:
        require_gnu_patch()
    assert "apt-get install patch" in str(caught.value)


def test_gnu_patch_here():
    assert require_gnu_patch()[0].isdigit()
