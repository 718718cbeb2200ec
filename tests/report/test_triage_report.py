"""The triage table as Markdown and on a terminal."""

import io
import re

import pytest
from releases import BASE, changed, diff, release, series, table
from rich.console import Console

from farm.report.triage import LINES, MOST_CHARACTERS, markdown, render
from farm.triage import TriagePin, triage

PATCH = diff(BASE, changed(BASE, ("                break\n", "                continue\n"),
                           ("        return len(blocks)\n", "        return len(blocks) + 1\n")))
TOP = ("LIMIT = 16\n", "LIMIT = 16\nMOST = 32\n")
ELSE = ("            if self.pool[block] is None:\n                break\n",
        "            if self.empty(block):\n                return self.stop(block)\n")
LONG = (ELSE[0], "            if self.empty(block):\n" + "".join(f"                step_{n}(block)\n" for n in range(30)))


@pytest.fixture
def found(tmp_path):
    """Clean, rejected, upstream, and not listed."""
    ours = changed(BASE, ("            size = LIMIT\n", "            size = 1\n"))
    claims = diff(BASE, ours, preamble="Applied-Upstream: 0.30.0\n\n")
    own = series(("c.patch", PATCH), directory="patches/0.31.0")
    alone = TriagePin("0.31.0", "0.31.0", release(tmp_path, "0.31.0", BASE), own)
    pins = [TriagePin(v, v, release(tmp_path, v, text), series(PATCH, claims))
            for v, text in (("0.29.0", BASE), ("0.30.0", changed(BASE, TOP, ELSE)))]
    return triage([*pins, alone])


def test_markdown_table(found):
    lines = markdown(found).splitlines()
    assert lines[0] == "## Triage: 3 patches on 3 pins, 1 cell to rebase"
    assert lines[2:7] == [
        "| patch | 0.29.0 | 0.30.0 | 0.31.0 |", "|---|---|---|---|",
        "| `a.patch` | ✅ clean | ❌ rejected 1/2 | - |", "| `b.patch` | ✅ clean | ⬆️ upstream | - |",
        "| `c.patch` | - | - | ✅ clean |"]
    assert "- 0.31.0: vLLM 0.31.0, 1 patch of patches/0.31.0, on " in "\n".join(lines[7:12])


def test_markdown_details(found):
    text = markdown(found)
    assert text.count("<details>") == text.count("</details>") == 2
    assert "<details><summary><code>a.patch</code> on 0.30.0: rejected 1/2</summary>" in text
    assert "1 of 2 hunks does not apply; by itself hunk 2 (offset 1) would." in text
    assert "**Hunk 1** (line 5 of the patch, here line 18): does not apply; gone, something else stands there" in text
    assert "\n   19                  return self.stop(block)\n" in text
    line = 1 + changed(BASE, TOP, ELSE).splitlines().index("        return len(blocks)")
    assert f"**Hunk 2** (line 14 of the patch, here line {line}): applies with offset 1; stands as it was" in text
    assert "Ask a person" in text.partition("b.patch</code> on 0.30.0")[2]


def test_a_place_is_cut(tmp_path):
    text = markdown(table(tmp_path, series(PATCH), v29=BASE, v30=changed(BASE, LONG)))
    (block,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(block.splitlines()) == LINES
    assert re.search(r"…  \d+ more lines\n", block)


def test_what_patches_and_releases_say_stays_text(tmp_path):
    bad = changed(BASE, ELSE).replace("self.stop(block)", "self.stop('```</details>|*x*\x1b[31m')")
    name = "a|b`<b>[x].patch"
    found = triage([TriagePin(v, v, release(tmp_path, v, text), series((name, PATCH))) for v, text in
                    (("0.29.0", BASE), ("0.30.0", bad))])
    text = markdown(found)
    assert "\x1b" not in text
    assert text.splitlines()[4].count(" | ") == 2
    assert "<b>" not in text
    assert "````text" in text
    out = io.StringIO()
    render(found, Console(file=out, width=200))
    assert name in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_markdown_fits_a_comment(tmp_path):
    """What does not fit is named."""
    patches = [(f"{n:03}.patch", PATCH) for n in range(120)]
    text = markdown(table(tmp_path, series(*patches), v30=changed(BASE, LONG)))
    assert len(text) < MOST_CHARACTERS + 5000
    assert text.count("<details>") == text.count("</details>") < 120
    assert "Not shown, for length: " in text
    assert text.rstrip().endswith("`--json` has all of it.")


@pytest.mark.parametrize("tty", [True, False], ids=["terminal", "pipe"])
def test_terminal(found, tty):
    out = io.StringIO()
    render(found, Console(file=out, width=100, force_terminal=tty, color_system=None))
    text = out.getvalue()
    for said in ("rejected 1/2", "a.patch on 0.30.0: rejected",
                 "hunk 1, line 5 of the patch, here line 18: does not apply; gone",
                 "b.patch on 0.30.0: upstream", "Ask a person", "1 patch of patches/0.31.0"):
        assert said in text
    assert "a.patch on 0.29.0" not in text


def test_a_hint_on_a_clean_cell_is_told(tmp_path):
    before = "    def allocate(self, request, size):\n"
    ours = "    def remove(self, first, last):\n        pass\n\n"
    patch = diff(BASE, changed(BASE, (before, ours + before)))
    newer = changed(BASE, ("    def finish(self, request):\n", ours + "    def finish(self, request):\n"))
    found = table(tmp_path, series(patch), v29=BASE, v30=newer)
    assert found.cell("a.patch", "0.30.0").status == "clean"
    assert "Manager.remove, which the patch adds, is defined in 0.30.0" in markdown(found)


def test_nothing_to_tell(tmp_path):
    text = markdown(table(tmp_path, series(PATCH), v29=BASE))
    assert text.startswith("## Triage: 1 patch on 1 pin, no cells to rebase\n")
    assert "<details>" not in text


MUCH = ("class Base:\n", "".join(f"NEW_{n} = {n}\n" for n in range(25)) + "\n\nclass Base:\n")


def test_lines_that_changed_near_a_hunk_and_in_its_function_are_counted_apart(tmp_path):
    """The function may reach further than what counts as near: none of the one need be of the other."""
    text = markdown(table(tmp_path, series(PATCH), v29=BASE, v30=changed(BASE, MUCH)))
    assert re.search(r"25 code lines near it changed; 0 of the \d+ in Base\.remove did", text)
    assert "of them in" not in text


def test_a_sentence_keeps_the_name_of_the_file_that_it_begins_with(tmp_path):
    bare = PATCH.replace(b"--- a/", b"--- ").replace(b"+++ b/", b"+++ ")
    text = markdown(table(tmp_path, series(bare), v29=BASE))
    assert "v1/core/manager.py has no leading a/ or b/" in text


def test_where_the_code_is_judged_is_said(found):
    assert "farm check DIR --pin PIN" in markdown(found)
