"""The table of malformed and treacherous patches: each with its exact class, on real GNU patch, the tree left as it was.

Numbers are those of DOMAIN.md 4 (faults that happened); 4 and 17 of lists are in test_listing, 16 in test_check.
"""

import pytest
from packages import ONE, diff, gone_file, headers, hunk, indented, make_package, new_file, state

from farm.apply import judge
from farm.findings import Status
from farm.patchfile import PatchFile

CLEAN, OFFSET, FUZZ, REJECTED, MALFORMED = Status.CLEAN, Status.OFFSET, Status.FUZZ, Status.REJECTED, Status.MALFORMED
NO_CHANGE, DUPLICATE, ESCAPES, COMPILE = Status.NO_CHANGE, Status.DUPLICATE_DIFF, Status.ESCAPES, Status.NEEDS_COMPILE

ONE_LINE = b"@@ -1 +1 @@\n-line 1\n+line one\n"
SECOND = hunk("line 17", "line X", at=15)
GIT = b"diff --git a/v1/one.py b/v1/one.py\nindex 0123456..789abcd 100644\n"
GERMAN = b"\\ Kein Zeilenumbruch am Dateiende.\n"
BARE = headers("v1/bare.py") + b"@@ -1,3 +1,3 @@\n a\n b\n-c\n"
CONTEXT = (b"*** a/v1/two.py\n--- b/v1/two.py\n***************\n*** 1,2 ****\n! line 1\n  line 2\n--- 1,2 ----\n! one\n"
           b"  line 2\n")
OLD, NEW = headers().splitlines(keepends=True)
INDEXED = b"Index: v1/one.py\n" + b"=" * 67 + b"\n"


def cut(data: bytes, lines: int) -> bytes:
    """The patch less its last lines."""
    return b"".join(data.splitlines(keepends=True)[:-lines])


def counted(data: bytes, old: str, new: str) -> bytes:
    """The patch with other counts in its first hunk header."""
    begin = data.index(b"@@ ")
    return data[:begin] + f"@@ -{old} +{new} @@\n".encode() + data[data.index(b"\n", begin) + 1:]


def git(*words: str, path: str = "v1/one.py", to: str = "") -> bytes:
    """A git header with these extended lines."""
    return "".join(f"{line}\n" for line in (f"diff --git a/{path} b/{to or path}", *words)).encode()


def crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def in_kind(data: bytes) -> bytes:
    """The lines of hunks in CRLF, headers in LF: the diff of a file with CRLF."""
    kept = (b"---", b"+++", b"@@", b"diff", b"index")
    return b"".join(line if line.startswith(kept) else line[:-1] + b"\r\n" for line in data.splitlines(keepends=True))


ROOT = [
    # (1) what concerns no file of the package, or changes nothing
    pytest.param(diff("tests/v1/test_one.py"), NO_CHANGE, 1, id="1-only-tests"),
    pytest.param(new_file("docs/patch.md"), NO_CHANGE, 1, id="1-only-docs"),
    pytest.param(diff("setup.py") + diff("requirements/common.txt"), NO_CHANGE, 1, id="1-only-the-repository's-other-files"),
    pytest.param(diff("vllm/../tests/x.py"), ESCAPES, 1, id="1-out-of-the-package-and-back"),
    pytest.param(diff(new="line 10"), NO_CHANGE, 1, id="1-a-line-replaced-by-itself"),
    pytest.param(git("old mode 100755", "new mode 100644"), NO_CHANGE, 1, id="1-a-mode-that-it-has"),
    pytest.param(headers() + b"@@ -1,2 +1,2 @@\n line 1\n line 2\n", MALFORMED, 3, id="1-context-alone"),
    pytest.param(headers() + b"@@ -3,0 +3,0 @@\n", MALFORMED, 3, id="1-a-hunk-of-no-lines"),
    pytest.param(b"Only words.\n", MALFORMED, None, id="1-no-diff"),
    # (2) fuzz
    pytest.param(diff().replace(b" line 8\n", b" line eight\n"), FUZZ, 3, id="2-first-context-line-differs"),
    pytest.param(diff().replace(b" line 12\n", b" line XII\n"), FUZZ, 3, id="2-last-context-line-differs"),
    pytest.param(diff("v1/two.py") + diff().replace(b" line 8\n", b"\n"), FUZZ, 12, id="2-second-of-two-files"),
    pytest.param(diff().replace(b" line 9\n", b" line nine\n"), FUZZ, 3, id="2-two-lines-of-fuzz"),
    # rejected
    pytest.param(diff(old="line 11?"), REJECTED, 3, id="other-line-there"),
    pytest.param(diff() + diff("v1/two.py", old="line eleven?"), REJECTED, 12, id="second-file-fails"),
    pytest.param(diff("v1/ghost.py"), REJECTED, 1, id="no-such-file"),
    pytest.param(diff("v1/one.py/x.py"), REJECTED, 1, id="below-a-file"),
    pytest.param(new_file("v1/one.py/x.py"), REJECTED, 3, id="new-below-a-file"),
    pytest.param(new_file("v1"), REJECTED, 3, id="new-in-place-of-a-directory"),
    pytest.param(gone_file("v1/two.py") + new_file("v1/two.py/x.py"), REJECTED, 26, id="new-below-a-file-that-goes"),
    pytest.param(diff("docs/x.md") + diff(), REJECTED, 1, id="docs-among-package-rooted-parts"),
    pytest.param(b"--- a/v1/two.py\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-line 1\n-line 2\n-line 3\n", REJECTED, 1,
                 id="deletes-a-file-that-has-more"),
    pytest.param(git("similarity index 100%", "rename from v1/one.py", "rename to v1/two.py", to="v1/two.py"), REJECTED, 1,
                 id="renames-onto-a-file"),
    pytest.param(git("similarity index 100%", "copy from v1/one.py", "copy to v1/two.py", to="v1/two.py"), REJECTED, 1,
                 id="copies-onto-a-file"),
    pytest.param(git("similarity index 100%", "rename from v1/no.py", "rename to v1/yes.py", path="v1/no.py", to="v1/yes.py"),
                 REJECTED, 1, id="renames-what-is-not-there"),
    pytest.param(headers() + b"@@ -7,4 +7,5 @@\n line 7\n line 8\n line 9\n+new\n line 10\n", FUZZ, 3, id="less-context-after"),
    pytest.param(b"Prereq: 4.2\n" + diff(), REJECTED, 2, id="prerequisite-missing"),
    # (3) in already
    pytest.param(diff(old="line X", new="line 10"), REJECTED, 3, id="3-in-already"),
    pytest.param(diff(old="line X", new="line 10", at=6), REJECTED, 3, id="3-in-already-elsewhere"),
    pytest.param(new_file("v1/two.py"), REJECTED, 3, id="3-makes-a-file-that-exists"),
    pytest.param(new_file("v1/two.py", ONE), REJECTED, 3, id="3-made-already"),
    pytest.param(gone_file("v1/gone.py"), REJECTED, 3, id="3-deleted-already"),
    pytest.param(git("similarity index 100%", "rename from v1/was.py", "rename to v1/two.py", path="v1/was.py", to="v1/two.py"),
                 REJECTED, 1, id="3-renamed-already"),
    # (6) the same diff twice
    pytest.param(diff() + diff(), DUPLICATE, 12, id="6-twice"),
    pytest.param(diff() + b"\nAnd again:\n" + diff(), DUPLICATE, 14, id="6-twice-with-words-between"),
    pytest.param(diff() + diff(at=9).replace(hunk(at=9).split(b"\n", 1)[1], hunk().split(b"\n", 1)[1]), DUPLICATE, 12,
                 id="6-twice-with-another-line-number"),
    pytest.param(diff() + hunk(), DUPLICATE, 10, id="6-hunk-twice"),
    pytest.param(diff() + diff("v1/two.py") + diff(), DUPLICATE, 21, id="6-twice-with-another-file-between"),
    pytest.param(git("old mode 100644", "new mode 100755") * 2, DUPLICATE, 4, id="6-mode-twice"),
    pytest.param(new_file("v1/new.py") * 2, DUPLICATE, 7, id="6-new-file-twice"),
    pytest.param(diff() + SECOND + diff(), DUPLICATE, 19, id="6-one-of-its-hunks-twice"),
    pytest.param(b"Words:\n" + indented(diff()) + b"\n" + diff(), DUPLICATE, 4, id="6-indented-in-the-preamble"),
    pytest.param(indented(diff(), b"\t") + b"\n" + diff(), DUPLICATE, 3, id="6-indented-by-a-tab"),
    pytest.param(indented(diff(), b" X") + b"\n" + diff(), DUPLICATE, 3, id="6-indented-by-an-X"),
    pytest.param(diff() + b"Words:\n" + indented(diff()), DUPLICATE, 13, id="6-indented-after"),
    pytest.param(indented(GIT + diff()) + b"\n" + diff(), DUPLICATE, 5, id="6-indented-with-its-git-header"),
    pytest.param(indented(diff("v1/two.py", new="X")) + b"\n" + diff(), MALFORMED, 3, id="6-another-diff-indented"),
    pytest.param(headers("v1/two.py") + b"words\n" + indented(hunk(new="X")) + b"\n" + diff(),
                 MALFORMED, 1,
                 id="6-headers-cut-from-their-indented-hunk"),
    pytest.param(indented(git("rename from v1/two.py", "rename to v1/zwei.py", path="v1/two.py", to="v1/zwei.py")) + diff(),
                 MALFORMED, 3, id="6-rename-indented-in-the-preamble"),
    # (7) trimmed blank context lines
    pytest.param(headers("v1/b.py") + b"@@ -1,3 +1,3 @@\n-a\n+b\n \n\n", MALFORMED, 7, id="7-trimmed-at-the-end"),
    pytest.param(headers("v1/b.py") + b"@@ -1,3 +1,3 @@\n-a\n+b\n\n\n", MALFORMED, 7, id="7-two-trimmed-at-the-end"),
    pytest.param(headers("v1/b.py") + b"@@ -1,3 +1,3 @@\n-a\n+b\n \n", MALFORMED, 6, id="7-cut-off-with-the-file"),
    pytest.param(headers("v1/b.py") + b"@@ -1,3 +1,3 @@\n-a\n+b\n\n" + b"\n" + diff(), MALFORMED, 7,
                 id="7-trimmed-at-the-end-before-another-file"),
    pytest.param(cut(diff(), 1) + b"\n" + SECOND, MALFORMED, 9, id="7-trimmed-at-the-end-before-another-hunk"),
    # (8) counts
    pytest.param(counted(diff(), "8,6", "8,6"), MALFORMED, 9, id="8-both-counts-too-big"),
    pytest.param(counted(diff(), "8,6", "8,5"), MALFORMED, 9, id="8-old-count-too-big"),
    pytest.param(counted(diff(), "8,5", "8,6"), MALFORMED, 9, id="8-new-count-too-big"),
    pytest.param(counted(diff(), "8,4", "8,4"), MALFORMED, 9, id="8-both-counts-too-small"),
    pytest.param(counted(diff(), "8,4", "8,5"), MALFORMED, 9, id="8-old-count-too-small"),
    pytest.param(counted(diff(), "8,5", "8,4"), MALFORMED, 9, id="8-new-count-too-small"),
    pytest.param(counted(diff(), "8,6", "8,6") + diff("v1/two.py"), MALFORMED, 10, id="8-too-big-before-another-file"),
    pytest.param(counted(diff(), "8,8", "8,8") + SECOND, MALFORMED, 10, id="8-padded-before-another-hunk"),
    pytest.param(cut(diff(), 1), MALFORMED, 8, id="8-cut-off"),
    pytest.param(cut(diff(), 5), MALFORMED, 4, id="8-cut-off-after-its-first-line"),
    pytest.param(cut(diff(), 6), MALFORMED, 3, id="8-cut-off-after-its-header"),
    pytest.param(cut(diff(), 7), MALFORMED, 1, id="8-cut-off-before-its-hunk"),
    pytest.param(diff()[:-1], MALFORMED, 9, id="8-cut-off-before-its-last-newline"),
    pytest.param(diff() + b"+one more\n", MALFORMED, 10, id="8-a-line-more"),
    pytest.param(diff() + b"\n+one more\n", MALFORMED, 11, id="8-a-line-more-after-an-empty-one"),
    pytest.param(diff() + b"-\n", MALFORMED, 10, id="8-an-empty-removed-line-more"),
    pytest.param(diff() + b" line 13\n", MALFORMED, 10, id="8-a-context-line-more"),
    pytest.param(diff() + b"\n" + SECOND, MALFORMED, 11, id="8-hunk-set-apart"),
    pytest.param(SECOND + diff(), MALFORMED, 1, id="8-hunk-of-no-file"),
    pytest.param(INDEXED + hunk(), MALFORMED, 3, id="8-hunk-below-an-index-line-alone"),
    pytest.param(GIT + hunk(), MALFORMED, 3, id="8-hunk-below-a-git-header-alone"),
    pytest.param(OLD + hunk(), MALFORMED, 2, id="8-new-name-missing"),
    pytest.param(NEW + OLD + hunk(), MALFORMED, 3, id="8-names-in-the-wrong-order"),
    pytest.param(headers() + SECOND + hunk(), MALFORMED, 10, id="8-hunks-out-of-order"),
    pytest.param(diff() + hunk("line 12", "twelve", at=10), MALFORMED, 10, id="8-hunks-overlap"),
    pytest.param(headers() + b"@@ -8,5 +8,5\n" + hunk().split(b"\n", 1)[1], MALFORMED, 3, id="8-header-not-closed"),
    pytest.param(counted(diff(), "0,5", "0,5"), MALFORMED, 3, id="8-counts-from-line-0"),
    pytest.param(counted(diff(), "8,99999999999999999999", "8,5"), MALFORMED, 3, id="8-a-count-of-twenty-digits"),
    pytest.param(counted(diff(), "8," + "9" * 5000, "8,5"), MALFORMED, 3, id="8-a-count-of-5000-digits"),
    pytest.param(b"--- /dev/null\n+++ b/v1/new.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n", MALFORMED, 3,
                 id="8-new-file-with-old-lines"),
    pytest.param(b"--- a/v1/one.py\n+++ /dev/null\n@@ -1,2 +1,1 @@\n line 1\n-line 2\n", MALFORMED, 3,
                 id="8-deletion-that-keeps-lines"),
    pytest.param(gone_file("v1/two.py").replace(b"+0,0", b"+5,0"), MALFORMED, 3, id="8-deletion-that-leaves-lines-above"),
    pytest.param(b"--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+x\n", MALFORMED, 1, id="8-both-names-null"),
    pytest.param(git("index 1..2 100644"), MALFORMED, 1, id="8-git-header-and-nothing"),
    pytest.param(git("old mode 100644"), MALFORMED, 1, id="8-half-a-mode-change"),
    pytest.param(git("rename from v1/one.py", to="v1/uno.py"), MALFORMED, 1, id="8-half-a-rename"),
    pytest.param(git("rename from v1/two.py", "rename to v1/uno.py", to="v1/uno.py"), MALFORMED, 1,
                 id="8-rename-that-contradicts"),
    pytest.param(GIT + diff("v1/two.py"), MALFORMED, 3, id="8-git-header-of-another-file"),
    pytest.param(OLD + b"+++ b/v1/two.py\n" + hunk(), MALFORMED, 1, id="8-two-files-and-no-rename"),
    pytest.param(headers("v1/bare.py") + b"@@ -1,3 +1,3 @@\n a\n-b\n" + GERMAN + b"+B\n c\n" + GERMAN, MALFORMED, 6,
                 id="8-end-of-file-amid-a-hunk"),
    pytest.param(diff(prefix=("", "")), MALFORMED, 1, id="8-no-level"),
    pytest.param(diff("one.py", prefix=("", "")), MALFORMED, 1, id="8-no-directory"),
    pytest.param(new_file("x").replace(b"b/x", b"v1/new.py"), MALFORMED, 1, id="8-new-file-without-a-level"),
    pytest.param(diff("v1//one.py"), MALFORMED, 1, id="8-double-slash"),
    pytest.param(diff("v1/./one.py"), MALFORMED, 1, id="8-dot-in-a-path"),
    pytest.param(diff("v1/" + "x" * 300), MALFORMED, 1, id="8-name-too-long"),
    pytest.param(diff("v1/a b.py"), MALFORMED, 1, id="8-space-in-a-name-and-no-tab"),
    pytest.param(git("old mode 100644", "new mode 100755", path="v1/a b.py"), MALFORMED, 1, id="8-mode-of-a-name-with-a-space"),
    pytest.param(b"\xef\xbb\xbf" + diff(), MALFORMED, 3, id="8-byte-order-mark"),
    pytest.param(diff().decode().encode("utf-16"), MALFORMED, None, id="8-utf-16"),
    pytest.param(diff("vllm/v1/one.py") + diff("v1/two.py"), MALFORMED, 10, id="8-rooted-in-two-ways"),
    pytest.param(git("similarity index 100%", "rename from vllm/v1/one.py", "rename to tests/one.py", path="vllm/v1/one.py",
                     to="tests/one.py"), MALFORMED, 1, id="8-moved-out-of-the-package"),
    pytest.param(diff("vllm/v1/one.py") + new_file("v1/new.py"), MALFORMED, 10, id="8-new-file-rooted-in-another-way"),
    pytest.param(OLD + b"+++ b/v5/one.py\n" + hunk(), MALFORMED, 1, id="8-two-names-of-which-one-is-there"),
    pytest.param(git("old mode 100644", "new mode 100755", to="v1/uno.py"), MALFORMED, 1, id="8-mode-of-two-names"),
    pytest.param(git("old mode 10064", "new mode 100755"), MALFORMED, 1, id="8-mode-of-five-digits"),
    pytest.param(git("old mode 100644", "new mode 100755")[:-1], MALFORMED, 3, id="8-cut-off-in-a-mode"),
    pytest.param(diff() + b"@@ 15,5 +15,5 @@\n-line 17\n+X\n", MALFORMED, 10, id="8-second-hunk-header-damaged"),
    pytest.param(diff() + b"\n@ -15,5 +15,5 @@\n-line 17\n+X\n", MALFORMED, 11, id="8-second-hunk-header-damaged-and-apart"),
    pytest.param(b"iff --git a/v1/one.py b/v1/uno.py\nrename from v1/one.py\nrename to v1/uno.py\n" + diff(), MALFORMED, 3,
                 id="8-rename-without-its-git-header"),
    pytest.param(b"Xdiff --git a/v1/one.py b/v1/one.py\nold mode 100644\nnew mode 100755\n" + diff(), MALFORMED, 2,
                 id="8-mode-without-its-git-header"),
    pytest.param(b"--- a/b c d\nis why.\n" + new_file("v1/new.py"), MALFORMED, 3, id="8-words-that-gnu-patch-takes-for-a-name"),
    pytest.param(counted(diff(), "8,6", "8,6") + diff("v1/two.py", at=15, old="line 17"), MALFORMED, 10,
                 id="8-too-big-before-a-later-hunk-of-another-file"),
    # other forms of diff
    pytest.param(b"1c1\n< line 1\n---\n> line one\n", MALFORMED, None, id="normal-diff"),
    pytest.param(b"1d\n.\n", MALFORMED, None, id="ed-script"),
    pytest.param(headers() + b"1d\n.\n", MALFORMED, 1, id="ed-script-below-headers"),
    pytest.param(diff() + b"\nIndex: v1/two.py\n1d\n.\n", MALFORMED, 12, id="ed-script-after"),
    pytest.param(b"Index: v1/two.py\n1c1\n< line 1\n---\n> line X\n" + diff(), MALFORMED, 2, id="normal-diff-in-the-preamble"),
    pytest.param(CONTEXT, MALFORMED, None, id="context-diff"),
    pytest.param(diff() + CONTEXT, MALFORMED, 12, id="context-diff-after"),
    pytest.param(git("index 1..2 100644", "GIT binary patch", "literal 3", "Kc$_x", path="v1/x.so"), MALFORMED, 3,
                 id="git-binary"),
    pytest.param(b"Binary files a/x.so and b/x.so differ\n", MALFORMED, 1, id="binary"),
    pytest.param(diff() + git("index 1..2 100644", "Binary files a/v1/x.so and b/v1/x.so differ", path="v1/x.so"), MALFORMED,
                 12,
                 id="binary-beside-text"),
    # (9) left-overs
    pytest.param(new_file("v1/one.py.orig"), MALFORMED, 1, id="9-carries-an-orig"),
    pytest.param(diff() + new_file("v1/one.py.rej"), MALFORMED, 10, id="9-carries-a-rej"),
    pytest.param(diff("vllm/v1/one.py") + new_file("tests/test_x.py.orig"), MALFORMED, 10, id="9-carries-an-orig-of-a-test"),
    pytest.param(gone_file("v1/one.py.orig"), MALFORMED, 1, id="9-deletes-an-orig"),
    # (10) empty
    pytest.param(b"", MALFORMED, None, id="10-no-bytes"),
    pytest.param(b"\n\n", MALFORMED, None, id="10-empty-lines"),
    pytest.param(b"#" * 20_000_000, MALFORMED, None, id="10-twenty-megabytes"),
    # (12) escapes
    pytest.param(diff("../up.py"), ESCAPES, 1, id="12-parent"),
    pytest.param(diff("v1/../../up.py"), ESCAPES, 1, id="12-parent-within"),
    pytest.param(new_file("../up.py"), ESCAPES, 1, id="12-new-in-the-parent"),
    pytest.param(diff("vllm/../../up.py"), ESCAPES, 1, id="12-parent-of-the-repository"),
    pytest.param(diff("etc/passwd", prefix=("/", "/")), ESCAPES, 1, id="12-absolute"),
    pytest.param(diff("/etc/passwd"), ESCAPES, 1, id="12-absolute-below-the-level"),
    pytest.param(OLD + b"+++ b/../up.py\n" + hunk(), ESCAPES, 1, id="12-one-name-only"),
    pytest.param(b'--- "a/v1/\\056\\056/\\056\\056/up.py"\n+++ "b/v1/\\056\\056/\\056\\056/up.py"\n' + hunk(), ESCAPES, 1,
                 id="12-parent-in-a-quoted-name"),
    pytest.param(git("similarity index 100%", "rename from v1/one.py", "rename to ../up.py", to="../up.py"), ESCAPES, 1,
                 id="12-renames-to-the-parent"),
    pytest.param(git("similarity index 100%", "rename from v1/one.py", "rename to ../../up.py", to="v1/uno.py"), ESCAPES, 1,
                 id="12-rename-line-says-the-parent"),
    pytest.param(git("similarity index 100%", "copy from ../../etc/passwd", "copy to v1/p.py", path="../../etc/passwd",
                 to="v1/p.py"),
                 ESCAPES, 1, id="12-copies-from-outside"),
    pytest.param(git("new file mode 120000", "index 0000000..1", path="v1/l") + new_file("v1/l", "/etc\n"), ESCAPES, 1,
                 id="12-symlink"),
    pytest.param(git("old mode 100644", "new mode 120000"), ESCAPES, 1, id="12-turned-into-a-symlink"),
    pytest.param(git("old mode 100644", "new mode 160000"), MALFORMED, 1, id="12-turned-into-a-submodule"),
    pytest.param(diff("linked/x.py"), ESCAPES, 1, id="12-through-a-symlink"),
    pytest.param(new_file("linked/new.py"), ESCAPES, 1, id="12-new-through-a-symlink"),
    pytest.param(diff("vllm/linked/x.py"), ESCAPES, 1, id="12-through-a-symlink-repository-rooted"),
    pytest.param(diff("v1/link.py"), ESCAPES, 1, id="12-a-symlink-itself"),
    pytest.param(gone_file("v1/link.py"), ESCAPES, 1, id="12-deletes-a-symlink"),
    pytest.param(git("similarity index 100%", "rename from v1/one.py", "rename to linked/one.py", to="linked/one.py"), ESCAPES,
                 1,
                 id="12-renames-through-a-symlink"),
    # needs a compile
    pytest.param(diff("csrc/ops.cu"), COMPILE, 1, id="csrc"),
    pytest.param(diff("vllm/v1/one.py") + diff("csrc/ops.cu"), COMPILE, 10, id="csrc-of-the-repository"),
    pytest.param(diff("CMakeLists.txt"), COMPILE, 1, id="cmakelists"),
    pytest.param(diff("cmake/utils.cmake"), COMPILE, 1, id="cmake"),
    pytest.param(diff("rust/src/lib.rs"), COMPILE, 1, id="rust"),
    pytest.param(diff("v1/kernels/topk.cu"), COMPILE, 1, id="cu-that-the-package-has-not"),
    pytest.param(new_file("vllm/v1/fast.cpp"), COMPILE, 1, id="new-cpp-that-nothing-loads"),
    # (17) CRLF
    pytest.param(crlf(diff()), MALFORMED, 1, id="17-wholly"),
    pytest.param(crlf(GIT + diff()), MALFORMED, 1, id="17-wholly-of-git"),
    pytest.param(crlf(b"Words.\n" + diff("v1/crlf.py")), MALFORMED, 2, id="17-wholly-of-a-crlf-file"),
    pytest.param(diff().replace(b"+++ b/v1/one.py\n", b"+++ b/v1/one.py\r\n"), MALFORMED, 2, id="17-one-header"),
    pytest.param(crlf(git("old mode 100644", "new mode 100755")), MALFORMED, 1, id="17-mode-change"),
    pytest.param(diff("v1/crlf.py"), REJECTED, 3, id="17-lf-patch-of-a-crlf-file"),
    pytest.param(in_kind(diff()), REJECTED, 3, id="17-crlf-lines-for-an-lf-file"),
]


@pytest.fixture
def package(tmp_path):
    root = make_package(tmp_path / "tree")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.py").write_text(ONE)
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "v1/link.py").symlink_to(tmp_path / "elsewhere/x.py")
    (root / "v1/b.py").write_bytes(b"a\n\n\n")
    (root / "v1/a b.py").write_text(ONE)
    (root / "v1/é.py").write_text(ONE)
    return root


@pytest.mark.parametrize(("data", "status", "line"), ROOT)
def test_treacherous(package, tmp_path, data, status, line):
    before = state(tmp_path)
    found = judge(package, PatchFile("bad.patch", data))
    assert (found.status, found.line) == (status, line), found
    assert found.detail and found.files == () and found.offsets == ()
    assert state(tmp_path) == before


def test_the_table_is_as_long_as_it_claims():
    assert len(ROOT) >= 60 and len({param.id for param in ROOT}) == len(ROOT)


GOOD = [
    pytest.param(diff(), CLEAN, id="plain"),
    pytest.param(GIT + diff(), CLEAN, id="git"),
    pytest.param(headers().replace(b"\n", b"\t2026-01-01 10:00:00.000000000 +0100\n") + hunk(), CLEAN, id="time-stamps"),
    pytest.param(headers().replace(b"\n", b" 2026-01-01 10:00:00\n") + hunk(), CLEAN, id="time-stamps-after-a-space"),
    pytest.param(INDEXED + diff(), CLEAN, id="index-line"),
    pytest.param(b"diff -ruN vllm.orig/v1/one.py vllm/v1/one.py\n" + diff(prefix=("vllm.orig/", "vllm/")), CLEAN,
                 id="diff-ruN"),
    pytest.param(b"--- a/v1/one.py.orig\n+++ b/v1/one.py\n" + hunk(), CLEAN, id="diff-of-an-orig"),
    pytest.param(b"From 0123 Mon Sep 17 00:00:00 2001\nSubject: x\n\nWords\n---\n v1/one.py | 2 +-\n\n" + GIT + diff()
                 + b"-- \n2.39.2\n\n",
                 CLEAN, id="mail-with-its-signature"),
    pytest.param(diff() + b"--\n2.39.2\n", CLEAN, id="trimmed-signature"),
    pytest.param(diff() + b"\n- a list of words\n- after it\n", CLEAN, id="list-after"),
    pytest.param(b"The old code said\n--- this\n+++\nand the new\n--- that ---\n\n" + diff(), CLEAN, id="prose-with-dashes"),
    pytest.param(b"--- why\nBecause.\n" + diff(), CLEAN, id="prose-that-begins-with-dashes"),
    pytest.param(b"--- why\nBecause.\n" + new_file("v1/new.py"), CLEAN, id="prose-that-begins-with-dashes-before-a-new-file"),
    pytest.param(git("old mode 100644", "new mode 100755") + b"-- \n2.39.2", CLEAN, id="mode-with-a-signature-cut-short"),
    pytest.param(b"diff --git a/vllm.orig/v1/one.py b/vllm/v1/one.py\nindex 1..2 100644\n"
                 + diff("v1/one.py", prefix=("a/vllm.orig/", "b/vllm/")), CLEAN, id="git-no-index"),
    pytest.param(b"--- a/v1/one.py~\n+++ b/v1/one.py\n" + hunk(), CLEAN, id="diff-of-a-backup"),
    pytest.param(b"--- the old behaviour\n+++ the new one\nand\n--- baseline\n+++ patched\n" + diff(), CLEAN,
                 id="prose-that-looks-like-headers"),
    pytest.param(diff() + headers() + hunk("line ten", "line X").replace(b"-8,5 +8,5", b"-9,5 +9,5") + diff("v1/two.py"),
                 OFFSET,
                 id="two-steps-at-one-place"),
    pytest.param(headers("v1/twins.py") + b"@@ -1,2 +1,3 @@\n a\n+x\n b\n" + headers("v1/twins.py")
                 + b"@@ -4,2 +4,3 @@\n a\n+x\n b\n",
                 CLEAN, id="the-same-lines-at-two-places"),
    pytest.param(b"> --- a/v1/two.py\n> +++ b/v1/two.py\n> @@ -1 +1 @@\n> -line 1\n> +x\n" + diff(), CLEAN, id="quoted-diff"),
    pytest.param(b"See\n  @@ -8,5 +8,5 @@ def f():\nbelow.\n" + diff(), CLEAN, id="indented-hunk-header-in-prose"),
    pytest.param(b"Binary files are not touched.\n" + diff(), CLEAN, id="prose-about-binary-files"),
    pytest.param(BARE + GERMAN + b"+C\n" + GERMAN, CLEAN, id="11-localised-marker"),
    pytest.param(BARE + GERMAN + b"+c\n", CLEAN, id="11-newline-added"),
    pytest.param(BARE + b"\\ No newline at end of file\n+C\n\\ No newline at end of file", CLEAN,
                 id="11-marker-without-newline"),
    pytest.param(git("similarity index 100%", "rename from v1/one.py", "rename to v1/uno.py", to="v1/uno.py"), CLEAN,
                 id="rename"),
    pytest.param(git("similarity index 90%", "rename from v1/one.py", "rename to v1/uno.py", "index 1..2 100644",
                 to="v1/uno.py")
                 + b"--- a/v1/one.py\n+++ b/v1/uno.py\n" + hunk(), CLEAN, id="rename-with-hunk"),
    pytest.param(git("similarity index 100%", "copy from v1/one.py", "copy to v1/uno.py", to="v1/uno.py"), CLEAN, id="copy"),
    pytest.param(git("similarity index 100%", "rename from vllm/v1/one.py", "rename to vllm/v1/uno.py", path="vllm/v1/one.py",
                     to="vllm/v1/uno.py"), CLEAN, id="rename-repository-rooted"),
    pytest.param(git("old mode 100644", "new mode 100755"), CLEAN, id="mode"),
    pytest.param(git("old mode 100755", "new mode 100644", path="v1/run.sh"), CLEAN, id="mode-back"),
    pytest.param(git("old mode 100644", "new mode 100755", "index 1..2") + diff(), CLEAN, id="mode-with-hunk"),
    pytest.param(git("new file mode 100644", "index 0000000..e69de29", path="v1/new.py"), CLEAN, id="new-empty-file"),
    pytest.param(git("new file mode 100755", "index 0000000..1", path="v1/new.sh") + new_file("v1/new.sh"), CLEAN,
                 id="new-executable"),
    pytest.param(git("deleted file mode 100644", "index e69de29..0000000", path="v1/empty.py"), CLEAN, id="deleted-empty-file"),
    pytest.param(new_file("v1/new/deep/three.py"), CLEAN, id="new-file-in-a-new-directory"),
    pytest.param(b"--- a/v1/new.py\t1970-01-01 00:00:00.000000000 +0000\n+++ b/v1/new.py\t2026-01-01 00:00:00 +0000\n"
                 b"@@ -0,0 +1 @@\n+x\n", CLEAN, id="new-file-of-diff-N"),
    pytest.param(gone_file("v1/two.py"), CLEAN, id="deleted-file"),
    pytest.param(b"--- a/v1/two.py\n+++ /dev/null\n@@ -1,20 +0,0 @@\n" + indented(ONE.encode(), b"-"), CLEAN,
                 id="deleted-file-plain"),
    pytest.param(headers("v1/empty.py") + b"@@ -0,0 +1 @@\n+x\n", CLEAN, id="filled-empty-file"),
    pytest.param(in_kind(diff("v1/crlf.py")), CLEAN, id="17-crlf-in-kind"),
    pytest.param(in_kind(b"diff --git a/v1/crlf.py b/v1/crlf.py\nindex 1..2 100644\n" + diff("v1/crlf.py")), CLEAN,
                 id="17-crlf-in-kind-of-git"),
    pytest.param(diff("v1/a b.py\t"), CLEAN, id="name-with-a-space"),
    pytest.param(b"diff --git a/v1/a b.py b/v1/a b.py\nindex 1..2 100644\n" + diff("v1/a b.py\t"), CLEAN,
                 id="name-with-a-space-of-git"),
    pytest.param(b'diff --git "a/v1/\\303\\251.py" "b/v1/\\303\\251.py"\nindex 1..2 100644\n--- "a/v1/\\303\\251.py"\n'
                 b'+++ "b/v1/\\303\\251.py"\n' + hunk(), CLEAN, id="quoted-name"),
    pytest.param(diff("vllm/v1/one.py") + diff("tests/v1/test_one.py") + diff("requirements/test.txt"), CLEAN,
                 id="repository-rooted-with-tests"),
    pytest.param(headers("v1/b.py") + b"@@ -1,3 +1,3 @@\n-a\n+b\n\n \n", CLEAN, id="7-trimmed-amid-a-hunk"),
    pytest.param(headers("q.sql") + b"@@ -1,2 +1,2 @@\n--- old\n+++ new\n select 1\n", CLEAN,
                 id="lines-that-look-like-headers"),
    pytest.param(diff() + SECOND, CLEAN, id="two-hunks"),
    pytest.param(diff() + b"Words between.\n" + diff("v1/two.py"), CLEAN, id="words-between-files"),
    pytest.param(diff() + diff(old="line ten", new="line X"), CLEAN, id="one-file-twice-in-steps"),
    pytest.param(headers() + b"@@ -7,0 +8 @@\n+new\n@@ -10 +11 @@\n-line 10\n+ten\n", CLEAN, id="no-context"),
    pytest.param(headers() + b"@@ -17,4 +17,5 @@\n line 17\n line 18\n line 19\n+new\n line 20\n", CLEAN,
                 id="less-context-at-the-end"),
    pytest.param(diff("v1/kernels.cu"), CLEAN, id="cu-that-the-package-ships"),
    pytest.param(new_file("v1/fast.cpp") + new_file("v1/fast.py", "load('fast.cpp')\n"), CLEAN, id="new-cpp-that-python-loads"),
    pytest.param(diff(at=6, old="line 10").replace(hunk(at=6).split(b"\n", 1)[1], hunk().split(b"\n", 1)[1]), OFFSET,
                 id="offset"),
]


@pytest.mark.parametrize(("data", "status"), GOOD)
def test_no_false_alarm(package, data, status):
    (package / "q.sql").write_bytes(b"-- old\nselect 1\n")
    (package / "v1/kernels.cu").write_text(ONE)
    (package / "v1/twins.py").write_text("a\nb\na\nb\n")
    before = state(package)
    found = judge(package, PatchFile("good.patch", data))
    assert found.status is status, found
    after = state(package)
    plain = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    assert found.files and {path for path in plain if not (package / path).is_dir()} == set(found.files)


# --- order ------------------------------------------------------------------------------------


def test_a_patch_that_needs_an_earlier_one(package):
    first, second = PatchFile("1.patch", diff()), PatchFile("2.patch", diff(old="line ten", new="line X"))
    assert judge(package, second).status is REJECTED
    assert [judge(package, patch).status for patch in (first, second)] == [CLEAN, CLEAN]


def test_two_that_overlap(package):
    """Both count: the second changes a context line of the first."""
    first, second = PatchFile("1.patch", diff()), PatchFile("2.patch", diff(old="line 11", new="line eleven",
        at=9).replace(b" line 10\n", b" line ten\n"))
    assert [judge(package, patch).status for patch in (first, second)] == [CLEAN, CLEAN]
    assert judge(package, first).already is False  # reversing it under the other would lie
