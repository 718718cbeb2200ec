"""The display while a run lasts."""

import io
import re
from datetime import datetime

import pytest
from rich.console import Console

from farm.records import Outcome, Reason, Verdict
from farm.report.live import Progress

PASS = Outcome(Verdict.PASS, Reason.AS_EXPECTED, "7 of 7\nand a log")
SKIP = Outcome(Verdict.SKIP, Reason.NEEDS_UNMET, "needs CUDA")


class Clock:
    t = 100.0

    def __call__(self):
        return self.t


def progress(**console):
    out = io.StringIO()
    clock = Clock()
    shown = Progress(Console(file=out, **console), clock, lambda: datetime(2026, 1, 1, 22, 14, 5))
    return shown, out, clock


def screen(shown):
    """What the live table would draw now."""
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True, color_system=None).print(shown._screen())
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def play(shown):
    shown.start(["unit", "replay"])
    shown.event("card 0", "unit", "building [tree] 0.29.0")
    shown.finished("unit", PASS)
    shown.finished("replay", SKIP)
    shown.close()


def test_a_log_gets_timestamped_lines_that_name_the_card():
    shown, out, _ = progress()
    play(shown)
    assert out.getvalue().splitlines() == [
        "22:14:05 [all cards] 2 cells to run",
        "22:14:05 [card 0] unit: building [tree] 0.29.0",
        "22:14:05 [card 0] unit: PASS as-expected: 7 of 7 (1 of 2)",
        "22:14:05 [no card] replay: SKIP needs-unmet: needs CUDA (2 of 2)",
    ]


def test_what_is_no_cells_is_a_line_on_a_terminal_too():
    shown, out, _ = progress(force_terminal=True, color_system=None, width=200)
    shown.event("card 0", "-", "ready on host h")
    shown.event("card 0", "unit", "boot 0")
    assert out.getvalue().splitlines() == ["22:14:05 [card 0] -: ready on host h"]


def test_a_long_line_stays_one_line():
    shown, out, _ = progress(width=40)
    shown.event("card 0", "unit", "x" * 200)
    assert len(out.getvalue().splitlines()) == 1


def test_each_line_is_flushed_at_once():
    class Pipe(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed = len(self.getvalue())

    pipe = Pipe()
    Progress(Console(file=pipe)).event("card 0", "unit", "hello")
    assert pipe.flushed == len(pipe.getvalue()) > 0


def test_a_terminal_shows_a_line_a_card_with_cell_elapsed_and_last_text():
    shown, _, clock = progress(force_terminal=True)
    shown.start(["a", "b", "c"])
    try:
        shown.event("card 1", "b", "boot 0")
        shown.event("card 0", "a", "old text")
        clock.t += 65
        shown.event("card 0", "a", "prefill [of] 2048")
        clock.t += 3600
        assert screen(shown) == ["card 0 a 1:01:05 prefill [of] 2048", "card 1 b 1:01:05 boot 0", "0 of 3 cells"]
        shown.finished("a", PASS)
        shown.event("card 1", "c", "boot 0")
        clock.t += 9
        assert screen(shown) == ["card 0 - waiting", "card 1 c 00:09 boot 0", "1 of 3 cells 1 PASS"]
    finally:
        shown.close()


def test_on_a_terminal_verdicts_stay_above_the_table():
    shown, out, _ = progress(force_terminal=True, color_system=None, width=120)
    play(shown)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "22:14:05 [card 0] unit: PASS as-expected: 7 of 7 (1 of 2)" in text
    assert "22:14:05 [no card] replay: SKIP needs-unmet: needs CUDA (2 of 2)" in text


def test_a_terminal_wraps_a_verdict_at_words():
    shown, out, _ = progress(force_terminal=True, color_system=None, width=40)
    shown.start(["unit"])
    shown.finished("unit", Outcome(Verdict.PASS, Reason.AS_EXPECTED, "every single pair is lower, beyond the margin"))
    shown.close()
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).split()
    assert {"single", "beyond", "margin"} <= set(words)
    assert max(map(len, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines())) <= 40


@pytest.mark.parametrize("console", [{}, {"force_terminal": True}])
def test_closing_twice_or_before_the_start_is_harmless(console):
    shown, _, _ = progress(**console)
    shown.close()
    shown.close()


def test_close_gives_the_terminal_its_cursor_back():
    shown, out, _ = progress(force_terminal=True)
    shown.start(["a"])
    shown.close()
    assert "\x1b[?25l" in out.getvalue() and out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")
