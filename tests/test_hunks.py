"""What became of one hunk's change at its place in another release."""

import pytest
from packages import gone_file, new_file

from farm.hunks import HunkText, Place, Word, code, compare, hunk_texts, mapped_place, names_used, similar_place
from farm.moved import line_map
from farm.patchfile import PatchFile

OLD = ("def f(x):", "    # Why.", "    total = x + 1", "    if total > LIMIT:", "        total = LIMIT", "    done(total)",
       "    return total")


def hunk(*lines, file="v1/a.py"):
    return HunkText(file, file, 1, 5, 0, "", tuple((line[0], line[1:]) for line in lines))


def at(hunk_of, *newer, older=OLD):
    """The hunk compared where all of `older` became `newer`."""
    lines = line_map(older, newer)
    return compare(hunk_of, mapped_place(lines, 0, len(older)))


REPLACE = hunk("     total = x + 1", "-    if total > LIMIT:", "+    if total >= LIMIT:", "         total = LIMIT")
INSERT = hunk("     total = x + 1", "+    check(total)", "     if total > LIMIT:")
DELETE = hunk("         total = LIMIT", "-    done(total)", "     return total")
COMMENT = hunk(" def f(x):", "-    # Why.", "+    # Why not.", "     total = x + 1")
INDENT = hunk("-    done(total)", "+    if x:", "+        done(total)", "     return total")


def new(**swaps):
    """OLD with some lines, by number, put as others: a text, several in a tuple, or none."""
    found = []
    for number, line in enumerate(OLD):
        there = swaps.get(f"l{number}", line)
        found += [there] if isinstance(there, str) else list(there)
    return found


@pytest.mark.parametrize(("change", "newer", "word"), [
    pytest.param(REPLACE, new(), Word.STANDS, id="replace-stands"),
    pytest.param(REPLACE, new(l3="    if total >= LIMIT:"), Word.SAME, id="replace-same"),
    pytest.param(REPLACE, new(l3="    if  total >= LIMIT:  # as of now"), Word.SAME, id="same-but-for-white-space-and-comment"),
    pytest.param(REPLACE, new(l1=(), l3=("    # At least.", "    if total >= LIMIT:")), Word.SAME, id="same-other-comments"),
    pytest.param(REPLACE, new(l3="    if total > MOST:"), Word.GONE, id="replace-gone"),
    pytest.param(REPLACE, new(l3=("    if total >= LIMIT:", "        total = 0", "    if total > LIMIT:")), Word.STANDS,
                 id="added-is-there-and-removed-stands"),
    pytest.param(INSERT, new(), Word.STANDS, id="insert-stands"),
    pytest.param(INSERT, new(l2=("    total = x + 1", "    check(total)")), Word.SAME, id="insert-same"),
    pytest.param(INSERT, new(l2=("    total = x + 1", "    verify(total)")), Word.ABSENT, id="insert-where-code-changed"),
    pytest.param(INSERT, new(l5=("    check(total)", "    done(total)")), Word.SAME, id="insert-same-a-few-lines-off"),
    pytest.param(DELETE, new(), Word.STANDS, id="delete-stands"),
    pytest.param(DELETE, new(l5=()), Word.SAME, id="delete-same"),
    pytest.param(DELETE, new(l5="    finish(total)"), Word.GONE, id="delete-with-something-else-there"),
    pytest.param(COMMENT, new(), Word.NO_CODE, id="comment"),
    pytest.param(INDENT, new(), Word.STANDS, id="indent-stands"),
    pytest.param(INDENT, new(l5=("    if x:", "        done(total)")), Word.SAME, id="indent-same"),
])
def test_word(change, newer, word):
    assert at(change, *newer).word is word


def test_a_line_that_stood_there_before_is_not_the_added_one():
    """`check(total)` stands twice near the place already: only a third one is the patch's."""
    older = (*OLD, "    check(total)", "    check(total)")
    assert at(INSERT, *older, older=older).there == 0
    assert at(INSERT, *older[:3], "    check(total)", *older[3:], older=older).word is Word.SAME


def test_lines_that_tell_nothing_do_not_count():
    """`)` and `else:` stand everywhere, so they say nothing of a change that has other lines."""
    found = at(hunk("     total = x + 1", "+    call(", "+        one,", "+    )", "     if total > LIMIT:"), *new())
    assert found.added == 2


def test_but_they_do_where_there_is_nothing_else():
    assert at(hunk("         total = LIMIT", "+    else:", "+        pass", "     done(total)"), *new()).added == 2


def test_a_deletion_is_not_the_same_for_bracket_beside_bracket():
    """The removed call is gone, and another came: its closing bracket stands beside the same line as before."""
    older = ("    a = (", "        b", "    )", "    if a:", "        drop()", "    if c:", "        e()")
    newer = ("    a = (", "        b_of(c)", "    )", "    if a or c:", "        log(", "            a", "        )",
             "    if c:", "        e()")
    change = hunk("     )", "-    if a:", "-        drop()", "     if c:")
    assert at(change, *newer, older=older).word is Word.GONE


def test_partly_gone():
    change = hunk("-    total = x + 1", "-    if total > LIMIT:", "+    total = min(x + 1, LIMIT)")
    found = at(change, *new(l2="    total = x + 2"))
    assert (found.word, found.gone, found.removed) == (Word.PARTLY, 1, 2)


def test_on_another_patch():
    """What it removes never was in the release: an earlier patch puts it there."""
    change = hunk("-    total = ours(x)", "+    total = ours(x, 1)", "     if total > LIMIT:")
    assert at(change, *new()).word is Word.STACKED


def test_likest_lines():
    change = hunk("     total = x + 1", "+    self._num_retired_entries.pop(request, None)", "     if total > LIMIT:")
    (alike,) = at(change, *new(l2=("    total = x + 1", "    self._num_retired_blocks.pop(request, None)"))).alike
    assert (alike.wanted, alike.stands, alike.at) == (
        "self._num_retired_entries.pop(request, None)", "self._num_retired_blocks.pop(request, None)", 4)


def test_old_lines_are_like_nothing():
    """Only a line that the release has newly can be upstream's way of saying the same."""
    change = hunk("     total = x + 1", "+    if total > LIMITS:", "     if total > LIMIT:")
    assert at(change, *new()).alike == ()


def test_a_similar_place_without_another_release():
    lines = ("x = 0", *new(l3="    if total >= LIMIT:"))
    assert compare(REPLACE, similar_place(REPLACE, lines, 3)).word is Word.SAME
    assert compare(REPLACE, similar_place(REPLACE, ("x = 0", *OLD), 3)).word is Word.STANDS


@pytest.mark.parametrize("place", [
    pytest.param(Place((), (), 0, frozenset()), id="empty"),
    pytest.param(mapped_place(line_map((), ()), 0, 0), id="empty-files"),
    pytest.param(mapped_place(line_map(OLD, ("other",)), 3, 4), id="nothing-kept"),
])
def test_places_without_lines(place):
    assert compare(REPLACE, place).word in (Word.STACKED, Word.GONE)


@pytest.mark.parametrize(("line", "kept"), [
    pytest.param("    x  =  1  # why", "x = 1", id="comment"), pytest.param("# only", "", id="only-comment"),
    pytest.param("x = '#1' # why", "x = '#1'", id="after-a-string"),
    pytest.param('x = "a # b"', 'x = "a # b"', id="in-a-string"), pytest.param("\t", "", id="blank"),
])
def test_code(line, kept):
    assert code(line) == kept


def test_hash_is_no_comment_elsewhere():
    lines = ("#include <a.h>", "int x;")
    change = HunkText("k/a.h", "k/a.h", 1, 1, 0, "", (("-", lines[0]), ("+", "#include <b.h>"), (" ", lines[1])))
    assert compare(change, mapped_place(line_map(lines, lines), 0, 2)).word is Word.STANDS


def test_names_used():
    change = hunk("+    if use_eagle and not self.mode_of(group, key=use_tail):",
                  "+        log('words in quotes', \"more\")  # a comment",
                  '+        """', "+        prose of a docstring", '+        """', "-    gone = 1")
    assert names_used(change) == ("use_eagle", "self", "group", "use_tail", "log")


# --- reading --------------------------------------------------------------------------------


def read(data):
    (section,) = PatchFile("a.patch", data).sections
    return hunk_texts(data.split(b"\n"), section, section.paths)


def test_hunks_of_a_patch():
    data = (b"words\n\n--- a/v1/one.py\n+++ b/v1/one.py\n@@ -3,3 +3,3 @@ class A:\n x\n-\xff\n+y\r\n z\n"
            b"@@ -9,0 +10 @@\n+new\n\\ No newline at end of file\n")
    first, second = read(data)
    assert (first.file, first.becomes, first.number, first.line, first.start, first.heading) == (
        "v1/one.py", "v1/one.py", 1, 5, 2, "class A:")
    assert (first.old, first.new, first.change) == (("x", "\ufffd", "z"), ("x", "y", "z"), (1, 2))
    assert (second.number, second.line, second.start, second.old, second.new, second.change) == (2, 10, 9, (), ("new",), (0, 0))


def test_made_and_deleted_files():
    (made,), (gone,) = read(new_file("v1/new.py")), read(gone_file("v1/one.py"))
    assert (made.file, made.becomes, made.name) == (None, "v1/new.py", "v1/new.py")
    assert (gone.file, gone.becomes, gone.name) == ("v1/one.py", None, "v1/one.py")
