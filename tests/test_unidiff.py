"""The structure of real patch texts, headers and hunks."""

import pytest

from farm.unidiff import Hunk, PatchSyntaxError, parse_patch

PLAIN = b"""\
Words before the diff.
--- a/v1/one.py\t2026-01-01
+++ b/v1/one.py\t2026-01-02
@@ -1,3 +1,3 @@ def f():
 a
-b
+B
 c
@@ -10 +10,2 @@
 x
+y
--- /dev/null
+++ b/v1/two.py
@@ -0,0 +1 @@
+new
"""
GIT = b"""\
diff --git a/v1/one.py b/v1/uno.py
similarity index 90%
rename from v1/one.py
rename to v1/uno.py
index 0b..1c 100644
--- a/v1/one.py
+++ b/v1/uno.py
@@ -1 +1 @@
-a
+b
diff --git a/v1/run.sh b/v1/run.sh
old mode 100644
new mode 100755
diff --git a/v1/link b/v1/link
new file mode 120000
--- /dev/null
+++ b/v1/link
@@ -0,0 +1 @@
+one.py
\\ No newline at end of file
"""
# A removed line that begins `-- ` and an added one that begins `++ ` look like file headers.
HEADERS_IN_BODY = b"""\
--- a/q.sql
+++ b/q.sql
@@ -1,2 +1,2 @@
--- a/comment
+++ b/comment
 select 1
"""


def test_plain_diff():
    one, two = parse_patch(PLAIN)
    assert one.paths == ("v1/one.py",) and (one.line, one.end) == (2, 12)
    assert one.hunks == (Hunk(4, (1, 3), (1, 3)), Hunk(9, (10, 1), (10, 2)))
    assert two.headers == ("b/v1/two.py",) and two.hunks == (Hunk(14, (0, 0), (1, 1)),)


def test_git_diff():
    rename, mode, link = parse_patch(GIT)
    assert rename.paths == ("v1/one.py", "v1/uno.py") and [h.line for h in rename.hunks] == [8]
    assert mode.paths == ("v1/run.sh",) and mode.hunks == ()
    assert link.symlink and not rename.symlink
    assert rename.moved == ("v1/one.py", "v1/uno.py") and mode.words == (b"old mode 100644", b"new mode 100755")
    assert link.creates and not rename.creates


def test_lines_of_a_hunk_are_no_headers():
    (only,) = parse_patch(HEADERS_IN_BODY)
    assert only.paths == ("q.sql",) and len(only.hunks) == 1


def test_trimmed_context_line_and_end_of_file():
    (only,) = parse_patch(b"--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n\n-b\n+c\n")
    assert len(only.hunks) == 1


@pytest.mark.parametrize(
    ("data", "line", "says"),
    [
        pytest.param(b"Only words.\n", None, "no unified diff", id="words"),
        pytest.param(b"1c1\n< a\n---\n> b\n", None, "no unified diff", id="ed-style"),
        pytest.param(b"diff --git a/x.so b/x.so\nindex 1..2 100644\nGIT binary patch\nliteral 3\n", 3, "binary",
                     id="git-binary"),
        pytest.param(b"Binary files a/x.so and b/x.so differ\n", 1, "binary", id="diff-binary"),
    ],
)
def test_refused(data, line, says):
    with pytest.raises(PatchSyntaxError, match=says) as caught:
        parse_patch(data)
    assert caught.value.line == line


def test_where_a_section_ends():
    """Its last hunk, and the words up to the next one's headers, are told apart."""
    one, two = parse_patch(PLAIN.replace(b"--- /dev/null", b"Words.\n--- /dev/null"))
    assert (one.last, one.end, two.line) == (12, 13, 13)


def test_lines_of_a_hunk():
    (only,) = parse_patch(b"--- a/x\n+++ b/x\n@@ -1,4 +1,4 @@\n a\n\n-b\n+c\n d\n")
    hunk = only.hunks[0]
    assert hunk.wanted == (b"a", b"", b"b", b"d") and hunk.changes == (b"-b", b"+c") and hunk.context == (2, 1)


@pytest.mark.parametrize(("written", "name"), [
    pytest.param(b"a/v1/one.py", "a/v1/one.py", id="plain"),
    pytest.param(b"a/v1/one.py\t2026-01-01", "a/v1/one.py", id="time-stamp"),
    pytest.param(b"a/v1/one.py 2026-01-01 10:00", "a/v1/one.py", id="time-stamp-after-a-space"),
    pytest.param(b"a/v1/one.py Thu Jan  1 10:00:00 2026", "a/v1/one.py", id="old-time-stamp"),
    pytest.param(b"a/v1/a b.py\t", "a/v1/a b.py", id="space"),
    pytest.param(b'"a/v1/\\303\\251 \\"x\\".py"', 'a/v1/\u00e9 "x".py', id="quoted"),
    pytest.param(b'"a/v1/\\377.py"', "a/v1/\udcff.py", id="no-utf-8"),
])
def test_names(written, name):
    (only,) = parse_patch(b"--- " + written + b"\n+++ " + written + b"\n@@ -1 +1 @@\n-a\n+b\n")
    assert only.headers == (name, name)
