"""A played card: when a boot may begin, what waits, what is named, and what an outcome is worth afterwards."""

import os
import subprocess
import sys
import threading

import pytest
from playedcard import CARD, PlayedCard

from farm import keeper
from farm.errors import FarmError
from farm.evidence import Policy
from farm.health import Interpreter
from farm.keeper import Keeper
from farm.records import Outcome, Reason, Verdict

PYTHON = Interpreter(sys.executable)
GIB = 2**30


def quiet(text):
    pass


@pytest.fixture
def card(tmp_path):
    played = PlayedCard(CARD, tmp_path / "card.json")
    played.say(memory_used_bytes=GIB // 2, power_limit_w=350.0, driver="580.1", uncorrected_errors=0)
    return played


@pytest.fixture
def keep(card, tmp_path):
    """keep(run, policy words) -> the keeper of the played card for a run; every one in the same host state."""
    def make(run="run-1", **policy):
        return Keeper(card, tmp_path, Policy(**{"busy_wait_s": 0.0, **policy}), run)
    return make


@pytest.fixture
def stranger():
    """A process that is not below ours: an orphan of a shell's."""
    shell = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True)
    pid = int(shell.stdout)
    yield pid
    os.kill(pid, 9)  # raises where the farm has ended it


def raised(call, *args):
    with pytest.raises(FarmError) as caught:
        call(*args)
    return caught.value.reason, str(caught.value)


# --- where a server computes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("placed", "count"),
    [({}, None), ({CARD.uuid: []}, None), ({CARD.uuid: [7]}, None), ({CARD.uuid: [7, 41, 42]}, 2),
     ({CARD.uuid: [41], "GPU-other": [9]}, 1)],
    ids=["no-list", "empty", "strangers", "two", "neighbour"],
)
def test_the_processes_on_its_card_are_counted(keep, card, placed, count):
    card.say(placed=placed)
    assert keep().placed([40, 41, 42]) == count


def test_a_server_on_another_card_is_wrong_card(keep, card):
    card.say(placed={CARD.uuid: [41], "GPU-other": [42]})
    reason, said = raised(keep().placed, [40, 41, 42])
    assert reason is Reason.WRONG_CARD and "process 42 of the server computes on GPU-other" in said


# --- the gate --------------------------------------------------------------------------------


def test_an_idle_card_lets_a_boot_begin(keep):
    assert keep().gate(quiet).memory_used_bytes == GIB // 2


def test_a_foreign_process_is_named_and_left_alone(keep, card, stranger):
    card.say(clients=[stranger])
    reason, said = raised(keep().gate, quiet)
    assert reason is Reason.CARD_BUSY
    assert f"process {stranger} (sleep of " in said and "ends nobody else's process" in said
    os.kill(stranger, 0)


def test_our_own_processes_are_not_foreign(keep, card):
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    grandchild = int(child.stdout.readline())
    try:
        card.say(clients=[os.getpid(), child.pid, grandchild])
        keep().gate(quiet)
    finally:
        os.kill(grandchild, 9)
        child.communicate()


def test_what_carries_the_cards_mark_is_a_client_also_where_no_driver_can_tell(keep, card, tmp_path):
    """What a killed farm has left on a CPU slot, or in a container on a GPU."""
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Keeper(card, tmp_path / "elsewhere", Policy(busy_wait_s=0), "run-1")
    shell = subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"], env={**os.environ, **keep().marks},
                           capture_output=True, text=True, check=True)
    left = int(shell.stdout)
    try:
        reason, said = raised(keep().gate, quiet)
        assert reason is Reason.CARD_BUSY and f"process {left} (sleep of" in said
        elsewhere.gate(quiet)  # farms with another host state
    finally:
        os.kill(left, 9)
    keep(busy_wait_s=30).gate(quiet)


@pytest.mark.parametrize(("used", "memory", "free"), [
    (GIB, 24 * GIB, True), (2 * GIB, 24 * GIB, False), (6 * GIB, 139 * GIB, True), (8 * GIB, 139 * GIB, False),
    (None, None, True),
], ids=["a-desktop", "a-server", "a-large-card's-own", "a-large-card", "not-told"])
def test_memory_over_the_threshold_is_somebody(card, tmp_path, used, memory, free):
    big = PlayedCard(keeper_card(memory), card.file)
    card.say(memory_used_bytes=used)
    made = Keeper(big, tmp_path, Policy(busy_wait_s=0), "run-1")
    if free:
        made.gate(quiet)
    else:
        reason, said = raised(made.gate, quiet)
        assert reason is Reason.CARD_BUSY and "MiB of its memory are in use by nobody who can be named" in said


def keeper_card(memory):
    from dataclasses import replace
    return replace(CARD, memory_bytes=memory)


def test_it_waits_until_the_other_one_has_gone_and_tells_once(keep, card, stranger):
    card.say(clients=[stranger])
    told = []

    def tell(text):
        told.append(text)
        threading.Timer(0.5, lambda: card.say(clients=[])).start()

    keep(busy_wait_s=60).gate(tell)
    assert len(told) == 1 and f"process {stranger} (sleep of" in told[0]


@pytest.mark.parametrize(("changed", "says"), [
    ({"power_limit_w": 200.0}, "is 200 W now and was 350 W when run run-1 began here; set it back (nvidia-smi -i GPU-0b5e"),
    ({"driver": "590.2"}, "is 590.2 now and was 580.1 when run run-1 began"),
])
def test_a_card_that_is_not_as_at_the_runs_start_is_refused(keep, card, changed, says):
    keep()
    card.say(**changed)
    later = keep()  # a worker that was started anew, or a resumed run
    reason, said = raised(later.gate, quiet)
    assert (reason, says in said) == (Reason.CARD_CHANGED, True), said
    keep("run-2").gate(quiet)  # a new run begins with the card as it is


def test_a_fact_that_the_card_does_not_tell_now_is_no_change(keep, card):
    made = keep()
    card.say(power_limit_w=None, driver=None)
    made.gate(quiet)


def test_a_lost_card_ends_every_question(keep, card):
    made = keep()
    card.say(lost=True)
    assert raised(made.gate, quiet)[0] is Reason.CARD_LOST
    assert made.power_limit_w() is None
    assert raised(keep)[0] is Reason.CARD_LOST


# --- memory after a boot ----------------------------------------------------------------------


def test_memory_that_comes_back_is_waited_for(keep, card):
    made = keep()
    before = made.gate(quiet)
    card.say(memory_used_bytes=20 * GIB)
    threading.Timer(0.5, lambda: card.say(memory_used_bytes=GIB // 2 + keeper.SLACK_BYTES)).start()
    made.wait_memory_back(before, deadline_s=60)


def test_memory_that_stays_is_the_cards_own_making_unless_somebody_has_come(keep, card, stranger):
    made = keep()
    before = made.gate(quiet)
    card.say(memory_used_bytes=9 * GIB)
    reason, said = raised(made.wait_memory_back, before, 0.0)
    assert reason is Reason.MEMORY_HELD and "8704 MiB are still held" in said
    card.say(clients=[stranger])
    reason, said = raised(made.wait_memory_back, before, 0.0)
    assert reason is Reason.CARD_BUSY and f"process {stranger} (sleep of" in said


# --- health -----------------------------------------------------------------------------------


def test_a_card_is_probed_at_its_first_use_and_not_again(keep, card, monkeypatch):
    made, told = keep(), []
    made.ready(PYTHON, told.append)
    made.ready(PYTHON, told.append)
    assert told == ["probing the card"]
    keep("run-2").ready(PYTHON, told.append)
    assert told == ["probing the card"] * 2


def test_a_busy_card_is_not_probed(keep, card):
    card.say(memory_used_bytes=20 * GIB, probe="failed")
    assert raised(keep().ready, PYTHON, quiet)[0] is Reason.CARD_BUSY


PASS = Outcome(Verdict.PASS, Reason.AS_EXPECTED, "fine")
LOST = Outcome(Verdict.ERROR, Reason.SERVER_LOST, "the server died")
FAIL = Outcome(Verdict.FAIL, Reason.CHANGED, "wrong tokens")
HELD = Outcome(Verdict.ERROR, Reason.MEMORY_HELD, "900 MiB")
BUSY = Outcome(Verdict.ERROR, Reason.CARD_BUSY, "somebody")


@pytest.mark.parametrize(("outcome", "facts", "reason", "counted"), [
    (PASS, {"probe": "failed"}, Reason.AS_EXPECTED, 0),
    (LOST, {}, Reason.SERVER_LOST, 0),
    (LOST, {"probe": "failed"}, Reason.CARD_UNHEALTHY, 1),
    (LOST, {"probe": "unknown"}, Reason.SERVER_LOST, 0),
    (LOST, {"lost": True}, Reason.CARD_LOST, 1),
    (LOST, {"uncorrected_errors": 2}, Reason.CARD_UNHEALTHY, 1),
    (LOST, {"probe": "failed", "memory_used_bytes": 20 * GIB}, Reason.SERVER_LOST, 0),
    (FAIL, {}, Reason.CHANGED, 0),
    (FAIL, {"probe": "failed"}, Reason.CARD_UNHEALTHY, 1),
    (HELD, {}, Reason.MEMORY_HELD, 1),
    (BUSY, {"probe": "failed"}, Reason.CARD_BUSY, 0),
], ids=["pass", "error-and-healthy", "error-and-not", "error-and-unknown", "error-and-lost", "error-and-ecc", "error-and-busy",
        "fail-and-healthy", "fail-and-not", "memory-held", "busy"])
def test_what_an_outcome_is_worth(keep, card, monkeypatch, outcome, facts, reason, counted):
    monkeypatch.setattr(keeper, "SETTLES_S", 0.3)
    made = keep(quarantine_after=9)
    made.ready(PYTHON, quiet)
    card.say(**facts)
    judged = made.judged(outcome, "c")
    assert judged.outcome.reason is reason
    assert len(made._journal.history().errors) == counted
    if reason is not outcome.reason:
        assert judged.outcome.verdict is Verdict.ERROR
        assert f"ended {outcome.verdict.value} {outcome.reason.value}: {outcome.detail}" in judged.outcome.detail


def test_memory_on_its_way_back_does_not_keep_a_probe_away(keep, card):
    made = keep()
    made.ready(PYTHON, quiet)
    card.say(memory_used_bytes=20 * GIB, probe="failed")
    threading.Timer(0.5, lambda: card.say(memory_used_bytes=GIB // 2)).start()
    assert made.judged(LOST, "c").outcome.reason is Reason.CARD_UNHEALTHY


def test_an_attempt_that_never_used_the_card_does_not_ask_it(keep, card):
    card.say(probe="failed")
    assert keep().judged(LOST, "c").outcome == LOST


def test_after_an_error_of_its_own_making_it_is_probed_again(keep, card):
    made, told = keep(quarantine_after=9), []
    made.ready(PYTHON, quiet)
    made.judged(HELD, "c")
    made.ready(PYTHON, told.append)
    assert told == ["probing the card"]


# --- quarantine -------------------------------------------------------------------------------


def test_two_errors_put_it_out_for_every_run_of_the_host(keep):
    first, other = keep(quarantine_s=3600), keep("run-2")
    assert first.judged(HELD, "c").quarantine is None
    found = first.judged(HELD, "c").quarantine
    assert (found.reason, len(found.errors)) == (Reason.MEMORY_HELD, 2)
    assert other.standing() == found == keep("run-3").standing()


@pytest.mark.parametrize(("probe", "returns"), [("passed", True), ("failed", False), ("unknown", False)])
def test_when_it_is_over_a_probe_decides(keep, card, probe, returns):
    first = keep(quarantine_after=1, quarantine_s=0.0)
    first.judged(HELD, "c")
    later, told = keep("run-2", quarantine_after=5, quarantine_s=60.0), []
    assert later.standing() is None  # it may be tried
    card.say(probe=probe)
    if returns:
        later.ready(PYTHON, told.append)
        assert told == ["probing the card", "its quarantine is over: the probe passed"]
        assert later._journal.history().quarantine is None
        assert later.judged(HELD, "c").quarantine is None  # it counts anew
    else:
        reason, said = raised(later.ready, PYTHON, told.append)
        assert reason is Reason.CARD_UNHEALTHY and "still in no state to be used" in said
        again = later.judged(Outcome(Verdict.ERROR, reason, said), "c").quarantine
        assert not again.over and keep("run-3").standing() == again
