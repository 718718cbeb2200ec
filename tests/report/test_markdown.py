"""The comment on a pull request."""

import re

from sample_run import RUN

from farm.records import Outcome, Reason, TestRow, Verdict
from farm.report.markdown import markdown


def sections(text):
    return re.findall(r"^#+ (.*)$", text, re.MULTILINE)


def test_conditions_come_first_and_everything_has_its_section(store):
    assert sections(markdown(store, RUN)) == [
        "Patch farm: 2 PASS, 1 FAIL, 2 INVALID, 1 ERROR, 1 SKIP", "Conditions", "Verdicts", "A/B, one value a boot",
        "Tests", "Patches", "Time", "Unproven"]


def test_conditions_name_pin_card_argv_pool_and_boots(store):
    text = markdown(store, RUN)
    part = text[text.index("- `prefill-tiny-0.29.0`"):]
    told = dict(line[4:].split(": ", 1) for line in part.splitlines()[1:14] if line.startswith("  - "))
    assert told["pin"].startswith("0.29.0-cpu (vllm 0.29.0")
    assert told["pool"] == "4,096 tokens, pinned on each arm" and told["boots"] == "2 on each arm"
    assert re.fullmatch(r"[0-9a-f]{12} on each arm", told["argv hash"])


def test_cells_under_the_same_conditions_are_listed_together(store):
    assert "- `offload-0.29.0`, `prefill-dead`, `replay-0.29.0`, `unit-0.29.0`\n" in markdown(store, RUN)


def test_rows_of_a_table_have_its_columns_whatever_is_in_them(store):
    width = None
    for line in markdown(store, RUN).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        bars = line.count("|")
        width = width or bars
        assert bars == width, line


def test_texts_of_others_are_no_markup(store):
    text = markdown(store, RUN)
    assert "<script" not in re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert "&lt;script&gt;" in text and "&#42;star&#42;" in text


def test_a_log_is_folded_and_cannot_end_its_fence(author):
    author.cell("c", "prefill", Outcome(Verdict.ERROR, Reason.BOOT_DIED, "died\n```\nline\n````"))
    text = markdown(author.store, RUN)
    assert "<details><summary><code>c</code>: last lines of the log</summary>" in text
    assert "\n`````text\n```\nline\n````\n`````\n" in text


def test_failing_tests_are_named_by_group(store):
    text = markdown(store, RUN)
    assert "<details><summary>1 broken</summary>\n\n- `tests/v1/core/test_x.py::test_new`: assert 1 == 2\n" in text
    assert "1 broken, 1 fixed, 1 still failing, 1 flaky, 1 on one arm only (baseline 3 passed" in text


def test_a_vllm_sized_suite_fits_a_comment(author):
    rows = [(TestRow("s", f"tests/v1/core/test_x.py::test_{'n' * 80}[{i}]", "failed", message="m" * 150), {"arm": arm})
            for i in range(215) for arm in ("baseline", "patched")]
    author.cell("c", "unit", Outcome(Verdict.PASS, Reason.NO_REGRESSION, "fine"), rows)
    text = markdown(author.store, RUN)
    assert "- and 190 more, in table tests" in text and len(text) < 65536


def test_figures_name_the_values_of_each_boot(store):
    line = next(x for x in markdown(store, RUN).splitlines() if x.startswith("| `prefill-tiny-0.29.0` | `kv_peak`"))
    assert "| baseline 0.7705, 0.7704; patched 0.5342, 0.5342 | 30.7 % lower on patched (0.5342 against 0.7704;" in line
