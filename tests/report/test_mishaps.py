"""What went wrong on the way, in lines."""

import io
from datetime import datetime, timezone

from rich.console import Console
from sample_run import CPU, RUN

from farm.records import Outcome, Reason, Verdict
from farm.report import mishaps
from farm.report.terminal import render_terminal

AT = datetime(2026, 1, 1, 12, 0, 7, tzinfo=timezone.utc)


def event(what, **more):
    return {"card": "GPU-0a1b2c3d", "card_name": "RTX 3090", "host": "box", "at_utc": AT, "event": what, "reason": None,
            "detail": None, "until_utc": None} | more


def test_cards_that_are_ready_are_not_told_and_the_others_are_in_the_order_of_time():
    rows = [event("lost", at_utc=AT.replace(second=9), detail="node box died\nmore"), event("ready"), event("joined"),
            event("left-out", card=None, card_name="cuda seat 1/2", detail="did not start")]
    assert mishaps.cards(rows) == (
        "12:00:07 UTC joined: RTX 3090 b2c3d of box",
        "12:00:07 UTC left-out: cuda seat 1/2 of box: did not start",
        "12:00:09 UTC lost: RTX 3090 b2c3d of box: node box died")


def test_each_attempt_but_the_last_word_has_a_line():
    row = {"cell": "a", "attempt": 1, "verdict": "ERROR", "reason": "node-died", "final": False, "card": None,
           "card_name": None, "host": None, "detail": "\x1b[31mgone\nand a log"}
    on_card = {"card": "CPU-12345", "card_name": "slot", "host": "h"}
    rows = [{**row, "attempt": 3, "final": True}, {**row, "attempt": 2, **on_card}, row]
    assert mishaps.attempts(rows) == ("a: attempt 1 ERROR node-died on no card: gone",
                                      "a: attempt 2 ERROR node-died on slot 12345 of h: gone")


def test_a_terminal_shows_both(author):
    author.cell("prefill-x", "prefill", Outcome(Verdict.ERROR, Reason.NODE_DIED, "node box died"), final=False)
    author.cell("prefill-x", "prefill", Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine"), attempt=2)
    author.store.commit_cards(RUN, [event("quarantined", reason="card-unhealthy", detail="in quarantine until noon")])
    author.run(cells=1)
    out = io.StringIO()
    render_terminal(author.store, RUN, Console(file=out, width=200))
    text = out.getvalue()
    assert f"attempt 1 ERROR node-died on CPU slot 0 {CPU['card'][-5:]} of box: node box died" in text
    assert "quarantined: RTX 3090 b2c3d of box: in quarantine until noon" in text


def test_a_run_without_mishaps_has_no_such_section(store):
    out = io.StringIO()
    render_terminal(store, RUN, Console(file=out, width=200))
    assert "Cards that left" not in out.getvalue() and "Attempts made again" in out.getvalue()
