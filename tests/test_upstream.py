"""Evidence that a release carries a patch's change already, each kind by itself."""

import pytest
from packages import gone_file, new_file
from releases import BASE, FILE, changed, diff, release

from farm.hunks import HunkText, Likeness, Word
from farm.moved import scopes
from farm.patchfile import PatchFile
from farm.rooting import Rooted, root_in
from farm.upstream import Proof, added_definitions, all_there, claimed, defined_there, defines, named_definitions, reverses

# --- taken out of the pristine --------------------------------------------------------------

FIXED = changed(BASE, ("                break\n", "                continue\n"))
FIX = diff(BASE, FIXED)


def taken_out(tmp_path, data, files):
    package = release(tmp_path, "0.30.0", files)
    rooted = root_in(package, PatchFile("a.patch", data))
    assert isinstance(rooted, Rooted)
    return reverses(rooted, package)


@pytest.mark.parametrize(("data", "files", "expected"), [
    pytest.param(FIX, FIXED, True, id="there"),
    pytest.param(FIX, "import os\n\n" + FIXED, True, id="there-on-other-lines"),
    pytest.param(FIX, BASE, False, id="not-there"),
    pytest.param(FIX, changed(FIXED, ("            self.freed.append(self.pool[block])\n", "            self.free(block)\n")),
                 False, id="there-in-other-context"),
    pytest.param(FIX, {"other.py": "x\n"}, False, id="no-file"),
    pytest.param(new_file("v1/new.py"), {"v1/new.py": "x = 1\n"}, True, id="the-same-new-file"),
    pytest.param(new_file("v1/new.py"), {"v1/new.py": "x = 2\n"}, False, id="another-new-file"),
    pytest.param(gone_file("v1/one.py"), {"v1/two.py": "x\n"}, True, id="deleted-there-too"),
    pytest.param(FIX + diff("a = 1\n", "a = 2\n", "v1/two.py", ""), {FILE: FIXED, "v1/two.py": "a = 1\n"}, False,
                 id="half-of-it"),
])
def test_reverses(tmp_path, data, files, expected):
    assert taken_out(tmp_path, data, files) is expected


# --- definitions ----------------------------------------------------------------------------

FINISH = "    def finish(self, request):\n"
OVERRIDE = changed(BASE, (FINISH, "    def remove(self, first, last):\n        self.pool[first:last] = []\n\n" + FINISH))


@pytest.mark.parametrize(("after", "names"), [
    pytest.param(OVERRIDE, ("Manager.remove",), id="method-that-another-class-has"),
    pytest.param(BASE + "\n\nclass New:\n    def f(self):\n        def g():\n            pass\n", ("New", "New.f"), id="class"),
    pytest.param(BASE + "\n\nasync def run():\n    pass\n", ("run",), id="function"),
    pytest.param(changed(BASE, ("def finish(self", "def end(self")), ("Manager.end",), id="renamed"),
    pytest.param(BASE, (), id="nothing"), pytest.param("def f(:\n", (), id="unreadable"),
])
def test_added_definitions(after, names):
    assert added_definitions(scopes(BASE), scopes(after)) == names


def hunk(*lines, heading=""):
    return HunkText(FILE, FILE, 1, 5, 0, heading, tuple((line[0], line[1:]) for line in lines))


METHOD = ("     return x", " ", "+    def remove(self, first, last):", "+        def inner():", "+            pass", " ")


@pytest.mark.parametrize(("change", "at", "names"), [
    pytest.param(hunk(*METHOD, heading="class Manager(Base):"), None, ("Manager.remove",), id="class-in-the-header"),
    pytest.param(hunk(*METHOD, heading="def other(self):"), 30, ("Manager.remove",), id="class-at-the-place"),
    pytest.param(hunk(*METHOD), None, (), id="nobody-knows-the-class"),
    pytest.param(hunk(" class Other:", *METHOD), 30, ("Other.remove",), id="class-in-the-context"),
    pytest.param(hunk("+def f():", "+    pass"), None, ("f",), id="function"),
    pytest.param(hunk("+class New(Base):", "+    async def g(self):", "+        pass"), None, ("New", "New.g"), id="class"),
    pytest.param(hunk("-def f(a):", "+def f(a, b):"), None, (), id="signature"),
    pytest.param(hunk("+x = 1"), None, (), id="none"),
])
def test_definitions_read_from_a_hunk(change, at, names):
    assert named_definitions(change, scopes(BASE), at) == names
    assert defines(change) is any(line[0] == "+" and ("def " in line[1] or "class " in line[1]) for line in change.lines)


NAMES = [(FILE, "Manager.remove"), (FILE, "Manager.end")]


@pytest.mark.parametrize(("found", "takers", "enough", "says"), [
    pytest.param([0, 1], {"0.28.0": False, "0.29.0": False}, True,
                 "is defined in 0.30.0 (v1/core/manager.py:7) and not in 0.28.0, 0.29.0", id="all"),
    pytest.param([0], {"0.29.0": False}, False, "1 of the 2 that it adds", id="one-of-two"),
    pytest.param([0, 1], {}, False, "since when, no listed pin shows", id="no-pin-takes-it"),
    pytest.param([0, 1], {"0.28.0": False, "0.29.0": True}, False, "and in 0.29.0, which takes the patch all the same",
                 id="there-where-it-applies"),
])
def test_defined_there(found, takers, enough, says):
    evidence = defined_there(NAMES, {NAMES[i]: 7 for i in found}, "0.30.0", takers)
    assert (evidence.proof, evidence.enough, evidence.file, evidence.line) == (Proof.DEFINITION, enough, FILE, 7)
    assert says in evidence.detail


def test_nothing_defined_there():
    assert defined_there(NAMES, {}, "0.30.0", {"0.29.0": False}) is None


# --- the same change, and the header ----------------------------------------------------------

SAME, OTHER, PLAIN = Likeness(Word.SAME, 1, 1), Likeness(Word.GONE, 0, 1, 1, 1), Likeness(Word.NO_CODE)


@pytest.mark.parametrize(("likeness", "sure", "enough", "says"), [
    pytest.param([SAME, SAME], True, True, "every hunk that changes code is there already (hunks 1, 2)", id="all"),
    pytest.param([SAME, PLAIN], True, True, "(hunk 1)", id="comments-count-for-nothing"),
    pytest.param([SAME, SAME], False, False, "every hunk", id="all-at-similar-places-alone"),
    pytest.param([SAME, OTHER, PLAIN], True, False, "of its 2 hunks that change code 1 is there already (hunk 1)", id="one"),
    pytest.param([SAME, Likeness(Word.NO_FILE)], True, False, "of its 2 hunks", id="one-and-a-file-that-is-gone"),
])
def test_all_there(likeness, sure, enough, says):
    evidence = all_there([(n, FILE, like) for n, like in enumerate(likeness, 1)], sure=sure)
    assert (evidence.proof, evidence.enough) == (Proof.SAME_CHANGE, enough)
    assert says in evidence.detail


@pytest.mark.parametrize("likeness", [[OTHER, OTHER], [PLAIN], []], ids=["others", "comments-alone", "none"])
def test_nothing_there(likeness):
    assert all_there([(n, FILE, like) for n, like in enumerate(likeness, 1)], sure=True) is None


@pytest.mark.parametrize(("applies", "traces", "says"), [
    pytest.param(False, True, "which a person wrote", id="with-traces"),
    pytest.param(False, False, "nothing in the source was found to show it", id="alone"),
    pytest.param(True, False, "the patch still applies here", id="and-yet-it-applies"),
])
def test_a_claim(applies, traces, says):
    evidence = claimed("0.30.0", applies, traces)
    assert evidence.enough
    assert "Applied-Upstream: 0.30.0" in evidence.detail
    assert says in evidence.detail
