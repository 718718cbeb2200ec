"""What is wrong between a list and its directory: each problem with its name and line, and the patches that can be read."""

import os
import time

import pytest
from packages import diff

from farm.findings import Problem
from farm.listing import read_listing

ONE, TWO = diff(), diff("v1/two.py")


def lay(folder, series, files):
    folder.mkdir()
    if series is not None:
        (folder / "series").write_bytes(series)
    for name, data in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("series", "files", "problems", "names"),
    [
        pytest.param(b"one.patch\ntwo.patch\n", ("one.patch", "two.patch"), [], ["one.patch", "two.patch"], id="clean"),
        pytest.param(b"two.patch\none.patch", ("one.patch", "two.patch"), [], ["two.patch", "one.patch"],
            id="no-newline-at-the-end"),
        pytest.param(b"", (), [], [], id="empty-list"),
        pytest.param(b"# words\n  # more\none.patch\n", ("one.patch",), [], ["one.patch"], id="whole-line-comments"),
        pytest.param(b"a#b.patch\n", ("a#b.patch",), [], ["a#b.patch"], id="hash-in-a-name"),
        pytest.param(b"one.patch # why\n", ("one.patch",), [(Problem.TRAILING_COMMENT, "one.patch", 1)], ["one.patch"],
                     id="trailing-comment"),
        pytest.param(b"one.patch\t#why\n", ("one.patch",), [(Problem.TRAILING_COMMENT, "one.patch", 1)], ["one.patch"],
                     id="trailing-comment-after-a-tab"),
        pytest.param(b"\none.patch\n\n", ("one.patch",), [(Problem.BLANK_LINE, "", 1), (Problem.BLANK_LINE, "", 3)],
            ["one.patch"],
                     id="blank-lines"),
        pytest.param(b"one.patch\n  \n", ("one.patch",), [(Problem.BLANK_LINE, "", 2)], ["one.patch"], id="line-of-spaces"),
        pytest.param(b"one.patch\nghost.patch\n", ("one.patch",), [(Problem.MISSING, "ghost.patch", 2)], ["one.patch"],
            id="missing"),
        pytest.param(b"ghost.patch\nghost.patch\n", (), [(Problem.MISSING, "ghost.patch", 1), (Problem.DUPLICATE, "ghost.patch",
            2)],
                     [], id="missing-twice"),
        pytest.param(b"one.patch\none.patch\n", ("one.patch",), [(Problem.DUPLICATE, "one.patch", 2)], ["one.patch"],
            id="twice"),
        pytest.param(b"one.patch\n./one.patch\n", ("one.patch",), [(Problem.DUPLICATE, "one.patch", 2)], ["one.patch"],
                     id="twice-in-another-spelling"),
        pytest.param(b"one.patch\n", ("one.patch", "two.patch"), [(Problem.UNLISTED, "two.patch", None)], ["one.patch"],
            id="unlisted"),
        pytest.param(b"one.patch\n", ("one.patch", "two.diff"), [(Problem.UNLISTED, "two.diff", None)], ["one.patch"],
                     id="unlisted-diff"),
        pytest.param(b"one.patch\n# two.patch\n", ("one.patch", "two.patch"), [(Problem.UNLISTED, "two.patch", None)],
            ["one.patch"],
                     id="commented-out"),
        pytest.param(b"one.patch\n", ("one.patch", "README.md", "0.28.0/two.patch", "tests/x.patch"), [], ["one.patch"],
                     id="sub-directories-and-words-are-not-asked-for"),
        pytest.param(b"sub/one.patch\n", ("sub/one.patch",), [], ["sub/one.patch"], id="listed-in-a-sub-directory"),
        pytest.param(b"one.patch\n", ("one.patch", "one.patch.orig", "pool.py.rej"),
                     [(Problem.LEFTOVER, "one.patch.orig", None), (Problem.LEFTOVER, "pool.py.rej", None)], ["one.patch"],
                     id="left-overs"),
        pytest.param(b"one.patch -p0\n", ("one.patch",), [(Problem.OPTIONS, "one.patch", 1)], ["one.patch"], id="options"),
        pytest.param(b"one.patch two.patch\n", ("one.patch", "two.patch"),
                     [(Problem.OPTIONS, "one.patch", 1), (Problem.UNLISTED, "two.patch", None)], ["one.patch"],
                 id="two-on-a-line"),
        pytest.param(b"../one.patch\n", (), [(Problem.ESCAPES, "../one.patch", 1)], [], id="parent"),
        pytest.param(b"/etc/passwd\n", (), [(Problem.ESCAPES, "/etc/passwd", 1)], [], id="absolute"),
        pytest.param(b"sub/../../one.patch\n", (), [(Problem.ESCAPES, "sub/../../one.patch", 1)], [], id="parent-within"),
        pytest.param(b"one.patch\r\ntwo.patch\r\n", ("one.patch", "two.patch"), [(Problem.CRLF, "series", 1)],
                     ["one.patch", "two.patch"], id="crlf"),
        pytest.param(b"one.patch\n# words\r\ntwo.patch\n", ("one.patch", "two.patch"), [(Problem.CRLF, "series", 2)],
                     ["one.patch", "two.patch"], id="crlf-on-one-line"),
        pytest.param(b"one.patch\rtwo.patch\r", ("one.patch", "two.patch"), [(Problem.CRLF, "series", 1)],
                     ["one.patch", "two.patch"], id="carriage-returns-alone"),
        pytest.param(None, ("one.patch",), [(Problem.NO_SERIES, "series", None)], [], id="no-series"),
        pytest.param(b"\xff\xfe\n", ("one.patch",), [(Problem.UNREADABLE, "series", None)], [], id="series-not-utf-8"),
        pytest.param(b"\xef\xbb\xbfone.patch\n", ("one.patch",),
                     [(Problem.MISSING, "\ufeffone.patch", 1), (Problem.UNLISTED, "one.patch", None)], [],
                 id="byte-order-mark"),
        pytest.param(b"one\x0bpatch\n", (), [(Problem.OPTIONS, "one", 1), (Problem.MISSING, "one", 1)], [],
            id="odd-white-space"),
        pytest.param(b"a\0b.patch\n", (), [(Problem.UNREADABLE, "a\0b.patch", 1)], [], id="nul-in-a-name"),
        pytest.param(b"x" * 300 + b"\n", (), [(Problem.UNREADABLE, "x" * 300, 1)], [], id="name-too-long"),
        pytest.param(b"sub\n", ("sub/one.patch",), [(Problem.UNREADABLE, "sub", 1)], [], id="a-directory"),
    ],
)
def test_problems(tmp_path, series, files, problems, names):
    listing = read_listing(lay(tmp_path / "s", series, dict.fromkeys(files, ONE)))
    assert [(p.problem, p.name, p.line) for p in listing.problems] == problems
    assert [patch.name for patch in listing.patches] == names
    assert all(problem.detail for problem in listing.problems)


def test_a_listed_patch_of_bad_content_is_there_to_be_judged(tmp_path):
    listing = read_listing(lay(tmp_path / "s", b"empty.patch\n", {"empty.patch": b""}))
    assert listing.problems == () and listing.patches[0].fault is not None


def test_a_close_name_is_offered(tmp_path):
    (missing, _) = read_listing(lay(tmp_path / "s", b"mamba-gaps.patch\n", {"mamba-gap.patch": ONE})).problems
    assert "there is mamba-gap.patch" in missing.detail


def test_what_never_ends_or_leads_nowhere_is_not_read(tmp_path):
    folder = lay(tmp_path / "s", b"pipe.patch\nlink.patch\n", {})
    os.mkfifo(folder / "pipe.patch")
    (folder / "link.patch").symlink_to("nowhere")
    (folder / "other.patch").symlink_to("nowhere")
    assert [(p.problem, p.name) for p in read_listing(folder).problems] == [
        (Problem.UNREADABLE, "pipe.patch"), (Problem.MISSING, "link.patch"), (Problem.UNLISTED, "other.patch")]


def test_a_series_that_is_a_pipe_or_no_directory(tmp_path):
    folder = lay(tmp_path / "s", None, {})
    os.mkfifo(folder / "series")
    assert [p.problem for p in read_listing(folder).problems] == [Problem.UNREADABLE]
    assert [p.problem for p in read_listing(tmp_path / "none").problems] == [Problem.NO_SERIES]
    (tmp_path / "file").touch()
    assert [p.problem for p in read_listing(tmp_path / "file").problems] == [Problem.UNREADABLE]


def test_the_notes_are_notes():
    assert {problem for problem in Problem if problem.is_note} == {Problem.TRAILING_COMMENT, Problem.BLANK_LINE}


def test_what_is_no_list_is_refused_at_once(tmp_path):
    (tmp_path / "series").write_bytes(b"\n" * 16 * 2**20)
    (problem,) = read_listing(tmp_path).problems
    assert problem.problem is Problem.UNREADABLE and "longer than 1048576 bytes" in problem.detail


def test_a_long_list_of_missing_patches_among_many_files_takes_no_time(tmp_path):
    for n in range(600):
        (tmp_path / f"the-patch-that-is-there-{n:04}.patch").touch()
    (tmp_path / "series").write_text("".join(f"the-patch-that-is-missing-{n:04}.patch\n" for n in range(600)))
    begun = time.process_time()
    problems = read_listing(tmp_path).problems
    assert time.process_time() - begun < 2.0
    assert [p.problem for p in problems].count(Problem.MISSING) == 600
