"""The table patch × pin on small releases: every word of a cell, its evidence, its places."""

import json
from dataclasses import replace

import pytest
from packages import gone_file, indented, new_file, state
from releases import BASE, FILE, changed, diff, release, series, table

from farm.errors import UsageError
from farm.findings import Status
from farm.hunks import Word
from farm.triage import TriagePin, of_pin, to_json, triage
from farm.triagetable import GOOD, MOVED, UPSTREAM
from farm.upstream import Proof

LIMIT = ("            size = LIMIT\n", "            size = LIMIT - 1\n")
BREAK = ("                break\n", "                continue\n")
FINISH = ("        return len(blocks)\n", "        return len(blocks) + 1\n")
OURS = changed(BASE, BREAK, FINISH)
PATCH = diff(BASE, OURS)  # two hunks
TOP = ("LIMIT = 16\n", "LIMIT = 16\nMOST = 32\n")
NOISE = ("            self.freed.append(self.pool[block])\n", "            self.free(self.pool[block])\n")  # by the first hunk
NOISE_2 = ("        self.allocated.discard(request)\n", "        self.allocated.remove(request)\n")  # by the second


def cell(found, pin="0.30.0", patch="a.patch"):
    return found.cell(patch, pin)


def proofs(found):
    return [(e.proof, e.enough) for e in found.evidence]


# --- words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("newer", "status"), [
    pytest.param(BASE, "clean", id="clean"),
    pytest.param(changed(BASE, TOP), "offset", id="offset"),
    pytest.param(changed(BASE, ("        for block in range(last - 1, first - 1, -1):\n", "        for block in order():\n")),
                 "fuzz", id="fuzz"),
    pytest.param(changed(BASE, NOISE, NOISE_2, BREAK), "rejected", id="rejected"),
    pytest.param(OURS, UPSTREAM, id="upstream"),
])
def test_status(tmp_path, newer, status):
    found = table(tmp_path, series(PATCH), v29=BASE, v30=newer)
    assert [c.status for c in found.cells] == ["clean", status]
    assert found.exit_code == (0 if status in GOOD else 1)


@pytest.mark.parametrize(("data", "status"), [
    pytest.param(b"", Status.MALFORMED, id="empty"),
    pytest.param(PATCH[:-30], Status.MALFORMED, id="cut-off"),
    pytest.param(PATCH + PATCH, Status.DUPLICATE_DIFF, id="twice"),
    pytest.param(indented(PATCH) + PATCH, Status.DUPLICATE_DIFF, id="indented-copy"),
    pytest.param(PATCH.replace(FILE.encode(), b"../../etc/passwd"), Status.ESCAPES, id="escapes"),
    pytest.param(new_file("csrc/kernel.cu"), Status.NEEDS_COMPILE, id="compiled"),
    pytest.param(new_file("tests/test_x.py"), Status.NO_CHANGE, id="outside"),
])
def test_other_statuses_are_those_of_check(tmp_path, data, status):
    found = table(tmp_path, series(data), v29=BASE, v30=BASE)
    assert {c.status for c in found.cells} == {status.value}
    assert all(c.detail and not c.hunks for c in found.cells)
    assert found.exit_code == 1


def test_one_that_fails_is_left_out_and_the_rest_goes_on(tmp_path):
    later = diff(OURS, changed(OURS, LIMIT))
    found = table(tmp_path, series(b"no diff\n", PATCH, later), v29=BASE)
    assert [c.status for c in found.cells] == ["malformed", "clean", "clean"]


def test_a_patch_that_needs_one_that_is_left_out_says_so(tmp_path):
    second = diff(OURS, changed(OURS, ("                continue\n", "                continue  # on\n")))
    found = table(tmp_path, series(PATCH, second), v29=BASE, v30=changed(BASE, NOISE, NOISE_2))
    assert [c.status for c in found.cells] == ["clean", "clean", "rejected", "rejected"]
    assert "a.patch, left out here before it, changes the same file" in cell(found, patch="b.patch").detail
    assert cell(found).missing == ()


# --- upstream -------------------------------------------------------------------------------


def test_it_reverses(tmp_path):
    found = cell(table(tmp_path, series(PATCH), v29=BASE, v30=changed(OURS, TOP)))
    assert proofs(found) == [(Proof.REVERSES, True), (Proof.SAME_CHANGE, True)]
    assert "every hunk at fuzz 0" in found.detail
    assert found.detail.endswith("Ask a person whether the patch can go here.")


def test_a_reverse_is_judged_on_the_pristine_never_under_another_patch(tmp_path):
    """The second patch undoes the first: under the first it would reverse, on the release alone it applies to nothing."""
    undo = diff(OURS, BASE)
    found = table(tmp_path, series(PATCH, undo, PATCH.replace(b"Why", b"Again")), v29=BASE)
    assert [c.status for c in found.cells] == ["clean", "clean", "clean"]
    twice = table(tmp_path / "twice", series(PATCH, ("again.patch", PATCH)), v29=BASE)
    assert [c.status for c in twice.cells] == ["clean", "rejected"]
    assert not cell(twice, "0.29.0", "again.patch").evidence


def test_the_same_change_in_other_surroundings(tmp_path):
    found = cell(table(tmp_path, series(PATCH), v29=BASE, v30=changed(OURS, NOISE, NOISE_2)))
    assert (found.status, proofs(found), found.base) == (UPSTREAM, [(Proof.SAME_CHANGE, True)], "0.29.0")
    assert [h.likeness.word for h in found.hunks] == [Word.SAME, Word.SAME]


def test_half_of_the_change_is_a_hint(tmp_path):
    found = cell(table(tmp_path, series(PATCH), v29=BASE, v30=changed(BASE, BREAK, NOISE, NOISE_2)))
    assert (found.status, proofs(found)) == ("rejected", [(Proof.SAME_CHANGE, False)])
    assert [h.likeness.word for h in found.hunks] == [Word.SAME, Word.STANDS]
    assert "Of its 2 hunks that change code 1 is there already (hunk 1)" in found.detail
    assert "Ask a person whether the rest is needed" in found.detail


def test_the_same_change_at_a_similar_place_alone_is_a_hint(tmp_path):
    """Without a pin that takes the patch nobody knows where its place is."""
    found = cell(table(tmp_path, series(PATCH), v30=changed(OURS, NOISE, NOISE_2)))
    assert (found.status, found.base, proofs(found)) == ("rejected", None, [(Proof.SAME_CHANGE, False)])
    assert "No listed pin takes it" in found.detail


OVERRIDE = "    def remove(self, first, last):\n        self.pool[first:last] = [None] * (last - first)\n\n"
THEIRS = "    def remove(self, first, last):\n        for block in range(first, last):\n            self.drop(block)\n\n"
BEFORE_ALLOCATE = "    def allocate(self, request, size):\n"
DEFINES = diff(BASE, changed(BASE, (BEFORE_ALLOCATE, OVERRIDE + BEFORE_ALLOCATE)))
DEFINED = changed(BASE, (BEFORE_ALLOCATE, THEIRS + "    def allocate(self, request, size, more=0):\n"))


def test_what_it_defines_is_defined_there(tmp_path):
    found = table(tmp_path, series(DEFINES), v28=BASE, v29=BASE, v30=DEFINED)
    assert [c.status for c in found.cells] == ["clean", "clean", UPSTREAM]
    (evidence,) = cell(found).evidence
    assert (evidence.proof, evidence.enough, evidence.file) == (Proof.DEFINITION, True, FILE)
    assert DEFINED.splitlines()[evidence.line - 1] == "    def remove(self, first, last):"
    assert "Manager.remove, which the patch adds, is defined in 0.30.0" in cell(found).detail
    assert "not in 0.28.0, 0.29.0" in cell(found).detail


def test_a_definition_without_a_pin_that_takes_the_patch_is_a_hint(tmp_path):
    found = cell(table(tmp_path, series(DEFINES), v30=DEFINED))
    assert (found.status, proofs(found)) == ("fuzz", [(Proof.DEFINITION, False)])


def test_a_definition_where_the_patch_applies_all_the_same_is_a_hint(tmp_path):
    """It would be defined twice in one class."""
    newer = changed(BASE, ("    def finish(self, request):\n", THEIRS + "    def finish(self, request):\n"))
    found = cell(table(tmp_path, series(DEFINES), v29=BASE, v30=newer))
    assert found.status == "clean"
    assert proofs(found) == [(Proof.DEFINITION, False)]
    assert "Manager.remove" in found.detail


def test_one_of_two_definitions_is_a_hint(tmp_path):
    more = changed(BASE, (BEFORE_ALLOCATE, OVERRIDE + "    def keep(self):\n        pass\n\n" + BEFORE_ALLOCATE))
    found = cell(table(tmp_path, series(diff(BASE, more)), v29=BASE, v30=DEFINED))
    assert (found.status, proofs(found)) == ("fuzz", [(Proof.DEFINITION, False)])


CLAIM = "Why.\n\nApplied-Upstream: 0.30.0, somebody/something#1\n\n"


@pytest.mark.parametrize(("newer", "traces", "says"), [
    pytest.param(changed(OURS, NOISE, NOISE_2), 1, "is there already", id="with-a-trace"),
    pytest.param(changed(BASE, NOISE, NOISE_2), 0, "nothing in the source was found to show it", id="alone"),
    pytest.param(BASE, 0, "the patch still applies here", id="and-yet-it-applies"),
])
def test_its_own_header_says_so(tmp_path, newer, traces, says):
    found = table(tmp_path, series(diff(BASE, OURS, preamble=CLAIM)), v29=BASE, v30=newer)
    assert [c.status for c in found.cells] == ["clean", UPSTREAM]
    assert cell(found, "0.29.0").claim is None
    assert (cell(found).claim, len(cell(found).traces)) == ("0.30.0", traces)
    assert cell(found).evidence[-1].proof is Proof.HEADER
    assert says in cell(found).detail
    assert "which a person wrote" in cell(found).detail


def test_what_its_header_calls_upstream_is_left_out_for_the_rest(tmp_path):
    needs_it = diff(OURS, changed(OURS, ("                continue\n", "                continue  # on\n")))
    found = table(tmp_path, series(diff(BASE, OURS, preamble=CLAIM), needs_it), v29=BASE, v30=BASE)
    assert [c.status for c in found.cells] == ["clean", "clean", UPSTREAM, "rejected"]


def test_a_version_that_nobody_can_order_is_no_claim(tmp_path):
    pin = TriagePin("ours", "nightly-of-ours", release(tmp_path, "x", changed(BASE, NOISE, NOISE_2)),
                    series(diff(BASE, OURS, preamble=CLAIM)))
    assert triage([pin]).cells[0].status == "rejected"


# --- rejected: what stands there ------------------------------------------------------------


def test_a_rejected_hunk_comes_with_its_place(tmp_path):
    newer = changed(BASE, TOP, ("            if self.pool[block] is None:\n                break\n",
                                "            if self.empty(block):\n                return\n"))
    found = cell(table(tmp_path, series(PATCH), v29=BASE, v30=newer))
    first, second = found.hunks
    assert (found.status, found.base) == ("rejected", "0.29.0")
    assert (first.file, first.number, first.line, first.applies, first.mapped) == (FILE, 1, 5, False, True)
    assert (first.likeness.word, first.likeness.gone, first.likeness.removed) == (Word.GONE, 1, 1)
    lines = newer.splitlines()
    assert list(first.stands) == lines[first.at - 1:first.at - 1 + len(first.stands)]
    assert lines[first.focus[0] - 1:first.focus[1] - 1] == ["            if self.empty(block):", "                return"]
    assert (second.applies, second.offset, second.likeness.word) == (True, 1, Word.STANDS)
    assert "1 of 2 hunks does not apply; by itself hunk 2 (offset 1) would" in found.detail


def test_without_a_pin_that_takes_it_the_most_similar_place(tmp_path):
    newer = changed(BASE, TOP, ("            if self.pool[block] is None:\n", "            if self.empty(block):\n"))
    first, second = cell(table(tmp_path, series(PATCH), v30=newer)).hunks
    assert (first.applies, first.mapped, first.likeness.word) == (False, False, Word.STANDS)
    assert "                break" in first.stands
    assert newer.splitlines()[first.at - 1] == first.stands[0]
    assert (second.applies, second.offset) == (True, 1)


def test_names_that_the_file_no_longer_has(tmp_path):
    ours = changed(BASE, ("        self.requests[request] = blocks\n",
                          "        self.requests[request] = blocks if use_tail else list(blocks)\n"))
    newer = changed(BASE, ('        use_tail = self.mode == "tail"\n', "        tail = self.of(use_tail=1)  # not use_tail\n"),
                    ("        if use_tail and size > LIMIT:\n", "        if tail and size > LIMIT:\n"),
                    ("        blocks = [object() for _ in range(size)]\n", "        blocks = make(size)\n"))
    found = cell(table(tmp_path, series(diff(BASE, ours)), v29=BASE, v30=newer))
    assert found.status == "rejected"
    assert found.hunks[0].lost == ("use_tail",)
    assert "Hunk 1 uses use_tail, which the file no longer has" in found.detail


def test_the_place_in_a_release_is_the_pristine_s_own_also_under_earlier_patches(tmp_path):
    """The first patch puts twenty lines above: the second one's place is told in lines of the release."""
    above = changed(BASE, ("LIMIT = 16\n", "LIMIT = 16\n" + "".join(f"OURS_{n} = {n}\n" for n in range(20))))
    both = changed(above, BREAK)
    newer = changed(BASE, ("                break\n", "                return\n"))
    found = cell(table(tmp_path, series(diff(BASE, above), diff(above, both)), v29=BASE, v30=newer), patch="b.patch")
    (hunk,) = found.hunks
    assert (found.status, hunk.likeness.word) == ("rejected", Word.GONE)
    assert newer.splitlines()[hunk.focus[0] - 1] == "                return"


def test_a_file_that_the_release_moved(tmp_path):
    newer = {"v2/manager.py": changed(BASE, TOP), "v3/manager.py": "x = 1\n"}
    found = cell(table(tmp_path, series(PATCH), v29=BASE, v30=newer))
    assert found.status == "rejected"
    assert [(h.there, h.mapped, h.likeness.word) for h in found.hunks] == [("v2/manager.py", True, Word.STANDS)] * 2


def test_a_file_that_is_gone(tmp_path):
    found = cell(table(tmp_path, series(PATCH), v29=BASE, v30={"v3/manager.py": "x = 1\n"}))
    assert [(h.there, h.likeness.word) for h in found.hunks] == [(None, Word.NO_FILE)] * 2
    assert found.status == "rejected"


NEW = new_file("v1/new.py", "x = 1\ny = 2\n")


@pytest.mark.parametrize(("data", "newer", "status", "word"), [
    pytest.param(NEW, {"v1/new.py": "# Ours.\nx = 1\n\ny = 2\nz = 3\n"}, UPSTREAM, Word.SAME, id="made-there-with-more"),
    pytest.param(NEW, {"v1/new.py": "x = 3\n"}, "rejected", Word.ABSENT, id="made-otherwise"),
    pytest.param(gone_file("v1/one.py", "x = 1\n"), {"v1/two.py": "x\n"}, UPSTREAM, Word.SAME, id="deleted-there-too"),
    pytest.param(gone_file("v1/one.py", "x = 1\n"), {"v1/one.py": "x = 2\n"}, "rejected", Word.GONE, id="changed-instead"),
])
def test_made_and_deleted_files(tmp_path, data, newer, status, word):
    found = table(tmp_path, series(data), v29={"v1/one.py": "x = 1\n"}, v30=newer)
    assert [c.status for c in found.cells] == ["clean", status]
    assert cell(found).hunks[0].likeness.word is word


def test_a_patch_rooted_at_the_repository(tmp_path):
    rooted = diff(BASE, OURS, f"vllm/{FILE}") + new_file("tests/test_x.py")
    found = table(tmp_path, series(rooted), v29=BASE, v30=changed(OURS, NOISE, NOISE_2))
    assert [c.status for c in found.cells] == ["clean", UPSTREAM]
    assert [h.file for h in cell(found).hunks] == [FILE, FILE]


def test_line_ends_are_said(tmp_path):
    found = cell(table(tmp_path, series(PATCH), v29=BASE, v30={FILE: BASE.replace("\n", "\r\n").encode()}))
    assert found.status != "clean"
    assert "CRLF" in found.detail


# --- clean, but moved -----------------------------------------------------------------------

MUCH = ("class Base:\n", "".join(f"NEW_{n} = {n}\n" for n in range(25)) + "\n\nclass Base:\n")


def test_clean_but_moved(tmp_path):
    found = table(tmp_path, series(PATCH), v28=BASE, v29=changed(BASE, TOP), v30=changed(BASE, MUCH))
    assert [c.status for c in found.cells] == ["clean", "offset", MOVED]
    first, second = cell(found).hunks
    assert (first.movement.near.changed, first.movement.function, first.movement.in_function.changed) == (25, "Base.remove", 0)
    assert first.movement.much
    assert (second.movement.function, second.movement.in_function.changed) == ("Manager.finish", 0)
    assert cell(found).base == "0.29.0"
    assert "25 code lines within 40 of it changed since 0.29.0" in cell(found).detail
    assert found.exit_code == 0


def test_moved_stays_moved_until_somebody_looked(tmp_path):
    """0.31.0 is 0.30.0 as it is: what moved before it has still moved since the last release that stood."""
    found = table(tmp_path, series(PATCH), v29=BASE, v30=changed(BASE, MUCH), v31=changed(BASE, MUCH))
    assert [(c.status, c.base) for c in found.cells] == [("clean", None), (MOVED, "0.29.0"), (MOVED, "0.29.0")]


def test_a_diff_made_anew_for_the_pin_is_not_moved(tmp_path):
    newer = changed(BASE, MUCH)
    pins = [TriagePin("old", "0.29.0", release(tmp_path, "0.29.0", BASE), series(PATCH)),
            TriagePin("new", "0.30.0", release(tmp_path, "0.30.0", newer), series(diff(newer, changed(newer, BREAK, FINISH))))]
    assert [c.status for c in triage(pins).cells] == ["clean", "clean"]


def test_a_lost_name_is_moved_too(tmp_path):
    """It applies where little has changed, and would die of a NameError."""
    ours = changed(BASE, ("        return len(blocks)\n", "        return min(LIMIT, len(blocks))\n"))
    newer = BASE.replace("LIMIT", "MOST")
    found = cell(table(tmp_path, series(diff(BASE, ours)), v29=BASE, v30=newer))
    assert (found.status, found.hunks[0].lost, found.hunks[0].movement.much) == (MOVED, ("LIMIT",), False)
    assert "it uses LIMIT, which the file no longer has" in found.detail


STEP = "    if block:\n        a(block)\n        b(block)\n        c(block)\n    return block\n"
TWICE = "".join(f"\n\ndef step_{n}(block):\n{STEP}" for n in range(8))
ONCE_FIXED = TWICE.replace("        b(block)\n", "        d(block)\n", 1)
NAMELESS = (f"--- a/{FILE}\n+++ b/{FILE}\n@@ -4,5 +4,5 @@\n     if block:\n         a(block)\n-        b(block)\n"
            "+        d(block)\n         c(block)\n     return block\n").encode()


def test_a_hunk_that_lands_elsewhere_because_its_change_is_there(tmp_path):
    """The next function has the same lines: GNU patch takes the fix a second time, at fuzz 0."""
    found = cell(table(tmp_path, series(NAMELESS), v29=TWICE, v30=ONCE_FIXED))
    (hunk,) = found.hunks
    assert (found.application.status, hunk.offset > 0, hunk.likeness.word) == (Status.OFFSET, True, Word.SAME)
    assert (ONCE_FIXED.splitlines()[hunk.astray - 4], hunk.focus) == ("def step_1(block):", (6, 7))
    assert (found.status, proofs(found)) == (UPSTREAM, [(Proof.SAME_CHANGE, True)])


def test_a_hunk_that_lands_elsewhere_is_moved(tmp_path):
    """Its own place has become another, and the next function still has the lines that it wants."""
    newer = TWICE.replace("        b(block)\n", "        e(block)\n", 1)
    found = cell(table(tmp_path, series(NAMELESS), v29=TWICE, v30=newer))
    assert (found.status, found.hunks[0].likeness.word) == (MOVED, Word.GONE)
    assert "it lands on line" in found.detail


# --- pins -----------------------------------------------------------------------------------


def test_pins_keep_their_order_and_the_nearest_is_the_base(tmp_path):
    found = table(tmp_path, series(PATCH), v33=changed(BASE, NOISE, NOISE_2), v28=BASE, v31=changed(BASE, TOP))
    assert [pin.label for pin in found.pins] == ["0.33.0", "0.28.0", "0.31.0"]
    assert [(c.status, c.base) for c in found.cells] == [("rejected", "0.31.0"), ("clean", None), ("offset", "0.28.0")]


def test_a_series_of_its_own_serves_as_base_by_the_patch_s_name(tmp_path):
    """The two patches differ in their line numbers and context; the same hunk is found by what it changes."""
    older = changed(BASE, TOP, ("LIMIT = 16\n", "LIMIT = 15\n"))
    own = series(diff(older, changed(older, BREAK, FINISH)))
    pins = [TriagePin("0.28.0", "0.28.0", release(tmp_path, "0.28.0", older), own),
            TriagePin("0.30.0", "0.30.0", release(tmp_path, "0.30.0", changed(OURS, NOISE, NOISE_2)), series(PATCH))]
    found = cell(triage(pins))
    assert (found.status, found.base) == (UPSTREAM, "0.28.0")
    assert all(h.mapped for h in found.hunks)


def test_series_that_list_other_patches(tmp_path):
    pins = [TriagePin("old", "0.29.0", release(tmp_path, "0.29.0", BASE), series(("a.patch", PATCH), directory="old")),
            TriagePin("new", "0.30.0", release(tmp_path, "0.30.0", BASE), series(("b.patch", PATCH), directory="new"))]
    found = triage(pins)
    assert found.patches == ("a.patch", "b.patch")
    assert found.cell("b.patch", "old") is None
    assert [pin.directory for pin in found.pins] == ["old", "new"]
    assert [c.status for c in found.cells] == ["clean", "clean"]


def test_no_patches_and_no_pins(tmp_path):
    assert table(tmp_path, series(), v30=BASE).cells == ()
    assert triage([]).exit_code == 0


def test_a_pin_twice(tmp_path):
    pin = TriagePin("0.30.0", "0.30.0", release(tmp_path, "0.30.0", BASE), series(PATCH))
    with pytest.raises(UsageError, match="0.30.0 is given twice"):
        triage([pin, replace(pin, version="0.31.0")])


def test_releases_stay_as_they_are(tmp_path):
    release(tmp_path, "0.29.0", BASE)
    release(tmp_path, "0.30.0", OURS)
    before = state(tmp_path)
    found = table(tmp_path, series(PATCH, new_file("v1/new.py"), gone_file(FILE, OURS)), v29=BASE, v30=OURS)
    assert len(found.cells) == 6
    assert state(tmp_path) == before


# --- values ---------------------------------------------------------------------------------


def test_json(tmp_path):
    found = table(tmp_path, series(PATCH, b"\xff no diff \xe9\n"), v29=BASE, v30=changed(OURS, NOISE, NOISE_2))
    told = json.loads(json.dumps(to_json(found)))
    assert list(told) == ["pins", "patches", "cells", "exit_code"]
    assert told["patches"] == ["a.patch", "b.patch"]
    assert [(c["patch"], c["pin"], c["status"]) for c in told["cells"]] == [
        ("a.patch", "0.29.0", "clean"), ("b.patch", "0.29.0", "malformed"), ("a.patch", "0.30.0", UPSTREAM),
        ("b.patch", "0.30.0", "malformed")]
    assert list(told["cells"][2]) == ["patch", "sha256", "pin", "status", "good", "detail", "base", "claim", "missing",
                                      "application", "evidence", "hunks"]
    hunk = told["cells"][2]["hunks"][0]
    assert list(hunk) == ["file", "number", "line", "applies", "offset", "word", "added", "removed", "alike", "there", "at",
                          "stands", "focus", "mapped", "lost", "astray", "movement"]
    assert (hunk["word"], hunk["applies"]) == ("same", False)
    assert (hunk["added"], hunk["removed"]) == ({"there": 1, "of": 1}, {"gone": 1, "of": 1})
    assert told["exit_code"] == 1


def test_a_job_s_view_of_a_pin(tmp_path):
    found = table(tmp_path, series(PATCH, diff(BASE, changed(BASE, LIMIT), preamble=CLAIM)), v29=BASE, v30=changed(OURS, TOP))
    first, second = of_pin(found, "0.30.0")
    assert (first.row.patch, first.row.position, first.row.status, first.good, first.upstream, first.claim) == (
        "a.patch", 0, UPSTREAM, False, True, None)
    assert len(first.traces) == 2
    assert (second.row.patch, second.row.position, second.good, second.upstream, second.claim) == (
        "b.patch", 1, False, True, "0.30.0")
    assert [p.good for p in of_pin(found, "0.29.0")] == [True, True]
    assert of_pin(found, "0.29.0")[1].row.sha256 == found.cell("b.patch", "0.29.0").sha256


# --- hostile patches --------------------------------------------------------------------------

BIG = "".join(f"x{n % 7} = {n % 5}\n" for n in range(6000))


@pytest.mark.parametrize("data", [
    pytest.param(diff(BASE, BASE + "def f():\n" * 3000), id="thousands-of-definitions"),
    pytest.param(diff(BASE, BASE + "x = " + "(" * 50_000 + "\n"), id="nested-source"),
    pytest.param(diff(BASE, changed(BASE, ("LIMIT = 16\n", "LIMIT = 16 " + "# '" * 100_000 + "\n"))), id="a-long-line"),
    pytest.param(diff(BASE, BASE.replace("\n", " \n")), id="every-line"),
    pytest.param(diff(BIG, BIG.replace("x1 = 2\n", "x1 = 3\n"), "v1/big.py"), id="hundreds-of-hunks"),
    pytest.param(new_file(FILE, BIG), id="makes-what-is-there"),
    pytest.param(gone_file("v1/core/absent.py", BIG), id="deletes-what-is-not-there"),
    pytest.param(PATCH.replace(b"                continue", b"\x1b[31m\x00\xff"), id="control-characters"),
    pytest.param(PATCH.replace(b"@@ -", b"@@ -99999999"), id="far-line-numbers"),
    pytest.param(b"diff --git a/v1/core/manager.py b/v1/core/m.py\nsimilarity index 100%\nrename from v1/core/manager.py\n"
                 b"rename to v1/core/m.py\n", id="rename-alone"),
    pytest.param(b"diff --git a/v1/core/manager.py b/v1/core/manager.py\nold mode 100644\nnew mode 100755\n", id="mode-alone"),
])
def test_hostile_patches(tmp_path, data):
    moved = changed(BASE, NOISE, NOISE_2, BREAK)
    found = table(tmp_path, series(data, PATCH), v29={FILE: BASE, "v1/big.py": BIG},
                  v30={FILE: moved, "v1/big.py": BIG.replace("x1 = 2\n", "x1 = 4\n")}, v31={"v1/other.py": BASE})
    assert len(found.cells) == 6
    json.dumps(to_json(found))
