"""What a host remembers of a card: what counts, when it is out, and what a broken journal costs."""

import fcntl
from datetime import timedelta

import pytest

from farm import quarantine
from farm.errors import FarmError
from farm.quarantine import CardError, Journal, Start
from farm.records import Reason, utc_now


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path, "GPU-1", "RTX 3090")


def error(ago=timedelta(0), reason=Reason.MEMORY_HELD, detail="900 MiB are held"):
    return CardError(utc_now() - ago, reason, detail, "run-1", "cell-1")


def test_a_card_without_a_journal_has_no_history(journal):
    assert journal.history() == quarantine.History()
    assert not journal.path.exists()


@pytest.mark.parametrize(("after", "errors", "out"), [(1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False)])
def test_the_nth_error_puts_it_in_quarantine(journal, after, errors, out):
    found = [journal.erred(error(), after=after, for_s=60) for _ in range(errors)]
    assert [q is not None for q in found] == [False] * (errors - 1) + [out]
    assert journal.history().quarantine == found[-1]
    assert len(journal.history().errors) == (0 if out else errors)  # those that led to it no longer count


def test_a_quarantine_says_why_until_when_and_for_what(journal):
    before = utc_now()
    first, second = error(), error(reason=Reason.CARD_UNHEALTHY, detail="the probe did not end\nits log")
    journal.erred(first, after=2, for_s=60)
    found = journal.erred(second, after=2, for_s=60)
    assert found.reason is Reason.CARD_UNHEALTHY and found.errors == (first, second)
    assert timedelta(seconds=59) < found.until_utc - before < timedelta(seconds=90)
    assert not found.over
    assert "for card-unhealthy (2 errors of its own making, last: the probe did not end)" in str(found)


def test_old_errors_do_not_count(journal):
    journal.erred(error(ago=quarantine.COUNTED + timedelta(minutes=1)), after=2, for_s=60)
    assert journal.history().errors == ()
    assert journal.erred(error(), after=2, for_s=60) is None


def test_after_its_end_one_error_is_enough_unless_it_has_returned(journal):
    journal.erred(error(), after=1, for_s=0)
    assert journal.history().quarantine.over
    again = journal.erred(error(), after=5, for_s=0)  # on trial
    assert again is not None and len(again.errors) == 1
    journal.returned()
    assert journal.history().quarantine is None
    assert journal.erred(error(), after=2, for_s=60) is None


def test_the_start_of_a_run_is_what_its_first_worker_saw(journal, tmp_path):
    assert journal.opened("run-1", Start(350.0, "580.1")) == Start(350.0, "580.1")
    assert Journal(tmp_path, "GPU-1").opened("run-1", Start(200.0, "580.1")) == Start(350.0, "580.1")
    assert journal.opened("run-2", Start(200.0, "580.1")) == Start(200.0, "580.1")


def test_the_last_probe_and_the_name_are_known(journal, tmp_path):
    journal.probed("failed", "row 3 is wrong")
    journal.probed("passed", "all right" * 1000)
    found = Journal(tmp_path, "GPU-1").history()
    assert (found.name, found.probed.outcome, len(found.probed.detail)) == ("RTX 3090", "passed", quarantine.DETAIL_CHARS)


@pytest.mark.parametrize("harm", [
    b'{"event": "quarantined", "reason": "card-unh', b"\x00\xff\n", b"[]\n", b'"text"\n', b'{"event": "error"}\n',
    b'{"event": "quarantined", "reason": "no-such-reason", "until_utc": "x", "errors": []}\n', b"\n\n",
], ids=["cut-off", "bytes", "list", "text", "fields-missing", "unknown-reason", "empty-lines"])
def test_a_damaged_line_costs_that_line_alone(journal, harm):
    journal.erred(error(), after=2, for_s=60)
    with journal.path.open("ab") as file:
        file.write(harm)
    assert journal.erred(error(), after=2, for_s=60) is not None
    assert journal.history().quarantine is not None


def test_a_long_journal_is_shortened_and_keeps_what_is_new(journal, monkeypatch):
    monkeypatch.setattr(quarantine, "LONGEST", 20_000)
    monkeypatch.setattr(quarantine, "KEPT_LINES", 20)
    for number in range(200):
        journal.probed("passed", f"{number} " + "x" * 400)
    journal.erred(error(), after=1, for_s=60)
    journal.probed("passed", "the last")
    assert journal.path.stat().st_size < 40_000
    found = journal.history()
    assert found.quarantine is not None and found.probed.detail == "the last"


def test_a_journal_that_somebody_keeps_locked_is_no_wait_without_end(journal, monkeypatch):
    monkeypatch.setattr(quarantine, "LOCKED_S", 0.3)
    journal.probed("passed", "fine")
    with journal.path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FarmError, match=r"GPU-1.journal, .* \(another process has it locked"):
            journal.probed("passed", "fine")
    journal.probed("passed", "fine")


def test_a_full_disk_is_told(journal, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quarantine.os, "pwrite", full)
    with pytest.raises(FarmError, match="No space left on device.; make room"):
        journal.erred(error(), after=1, for_s=60)
