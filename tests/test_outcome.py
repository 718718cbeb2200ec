"""What hunks make of a file by their own words."""

import pytest
from packages import ONE, headers, hunk

from farm.outcome import applied
from farm.unidiff import parse_patch

MARK = b"\\ No newline at end of file\n"


def made(content, hunks, moves=None):
    (section,) = parse_patch(headers() + hunks)
    return applied(content, list(zip(section.hunks, moves or [0] * len(section.hunks), strict=True)))


TEXT = ONE.encode()


@pytest.mark.parametrize(("content", "hunks", "moves", "after"), [
    pytest.param(TEXT, hunk(), None, TEXT.replace(b"line 10\n", b"line ten\n"), id="replaced"),
    pytest.param(TEXT, hunk() + hunk("line 17", "X", at=15), None, TEXT.replace(b"line 10\n", b"line ten\n").replace(b"line 17",
                 b"X"),
                 id="two-hunks"),
    pytest.param(b"new\n" + TEXT, hunk(), [1], b"new\n" + TEXT.replace(b"line 10\n", b"line ten\n"), id="moved"),
    pytest.param(b"new\n" + TEXT, hunk(), None, None, id="not-there"),
    pytest.param(TEXT, b"@@ -7,0 +8 @@\n+new\n", None, TEXT.replace(b"line 8\n", b"new\nline 8\n"),
                 id="inserted-without-context"),
    pytest.param(TEXT, b"@@ -20,0 +21 @@\n+new\n", None, TEXT + b"new\n", id="appended"),
    pytest.param(TEXT, b"@@ -1,2 +0,0 @@\n-line 1\n-line 2\n", None, TEXT[14:], id="removed"),
    pytest.param(b"", b"@@ -0,0 +1,2 @@\n+a\n+b\n", None, b"a\nb\n", id="filled"),
    pytest.param(b"a\nb", b"@@ -1,2 +1,2 @@\n a\n-b\n" + MARK + b"+c\n" + MARK, None, b"a\nc", id="no-newline"),
    pytest.param(b"a\nb", b"@@ -1,2 +1,2 @@\n a\n-b\n" + MARK + b"+b\n", None, b"a\nb\n", id="newline-added"),
    pytest.param(b"a\nb\n", b"@@ -1,2 +1,2 @@\n a\n-b\n" + MARK + b"+b\n", None, None, id="a-newline-that-the-patch-denies"),
    pytest.param(b"a\nb", b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n", None, None, id="a-newline-that-the-file-has-not"),
    pytest.param(b"a\r\nb\r\n", b"@@ -1,2 +1,2 @@\n a\r\n-b\r\n+c\r\n", None, b"a\r\nc\r\n", id="crlf"),
    pytest.param(b"a\r\nb\r\n", b"@@ -1,2 +1,2 @@\n a\n-b\n+c\n", None, None, id="lf-for-crlf"),
    pytest.param(b"a\n\nb\n", b"@@ -1,3 +1,3 @@\n-a\n+c\n\n b\n", None, b"c\n\nb\n", id="trimmed-context"),
])
def test_applied(content, hunks, moves, after):
    assert made(content, hunks, moves) == after
