"""The scheduler as a table of what can happen; and a simulation at the size of a large room."""

import random
from dataclasses import replace

import pytest

from farm.bench import Card, Needs
from farm.records import Reason, Verdict
from farm.scheduler import Assignment, Gone, Scheduler, Task, Unplaced, unmet

CPU = Card("CPU-0", "cpu slot 1/1", "cpu", "a", memory_bytes=16 * 2**30)
AMPERE = Card("GPU-3090", "RTX 3090", "cuda", "a", capability=(8, 6), memory_bytes=24 * 2**30)
ADA = Card("GPU-4090", "RTX 4090", "cuda", "b", capability=(8, 9), memory_bytes=24 * 2**30)


@pytest.mark.parametrize(
    ("needs", "card", "reason"),
    [
        (Needs(), CPU, None),
        (Needs(cuda=True), CPU, "needs a CUDA card"),
        (Needs(cuda=True), AMPERE, None),
        (Needs(min_capability=(8, 9)), AMPERE, "needs compute capability 8.9, RTX 3090 has 8.6"),
        (Needs(min_capability=(8, 9)), ADA, None),
        (Needs(min_capability=(8, 9)), CPU, "needs compute capability 8.9"),
        (Needs(min_memory_bytes=48 * 2**30), ADA, "needs 48.0 GiB of memory, RTX 4090 has 24.0 GiB"),
    ],
    ids=["any", "cuda-on-cpu", "cuda", "sm89-on-sm86", "sm89", "sm-on-cpu", "memory"],
)
def test_unmet_says_why(needs, card, reason):
    assert unmet(needs, card) == reason


def scheduler(*needs, attempts=2, cards=(AMPERE,)):
    made = Scheduler([Task(f"c{i}", n) for i, n in enumerate(needs)], attempts)
    for card in cards:
        made.add_card(card)
    return made


def test_cells_are_taken_in_the_matrix_order_past_those_that_do_not_fit():
    made = scheduler(Needs(min_capability=(8, 9)), Needs(), Needs())
    assert made.next(AMPERE.uuid) == Assignment("c1", AMPERE.uuid, 1)
    assert made.next(AMPERE.uuid) == Assignment("c2", AMPERE.uuid, 1)
    assert made.next(AMPERE.uuid) is None


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL, Verdict.INVALID, Verdict.SKIP])
def test_only_error_is_tried_again(verdict):
    made = scheduler(Needs())
    made.next(AMPERE.uuid)
    assert made.finished("c0", verdict) is True
    assert made.done
    assert made.next(AMPERE.uuid) is None


def test_error_goes_to_another_card_first():
    made = scheduler(Needs(), cards=(AMPERE, ADA))
    made.next(AMPERE.uuid)
    assert made.finished("c0", Verdict.ERROR) is False
    assert made.next(AMPERE.uuid) is None
    assert made.next(ADA.uuid) == Assignment("c0", ADA.uuid, 2)
    assert made.finished("c0", Verdict.ERROR) is True


def test_error_returns_to_the_only_card_that_fits():
    made = scheduler(Needs(min_capability=(8, 9)), cards=(AMPERE, ADA))
    made.next(ADA.uuid)
    made.finished("c0", Verdict.ERROR)
    assert made.next(AMPERE.uuid) is None
    assert made.next(ADA.uuid) == Assignment("c0", ADA.uuid, 2)


LEFT = Gone("RTX 4090 abc", "node b died")


def test_cells_that_no_card_ever_could_run_are_skipped_with_every_reason_once():
    made = scheduler(Needs(cuda=True, min_capability=(9, 0)), Needs(), cards=(AMPERE, ADA, CPU))
    assert made.unplaced() == [Unplaced(
        "c0", 1, Verdict.SKIP, Reason.NEEDS_UNMET,
        "needs a CUDA card; needs compute capability 9.0, RTX 3090 has 8.6; needs compute capability 9.0, RTX 4090 has 8.9")]
    assert made.unplaced() == [] and not made.done


@pytest.mark.parametrize(
    ("happens", "ends"),
    [
        pytest.param(lambda made: None, {}, id="all-there"),
        pytest.param(lambda made: made.remove_card(ADA, LEFT), {"c1": "RTX 4090 abc: node b died"}, id="the-only-fit-left"),
        pytest.param(lambda made: (made.remove_card(ADA, LEFT), made.add_card(ADA)), {}, id="and-came-back"),
        pytest.param(lambda made: (made.remove_card(ADA, LEFT), made.remove_card(AMPERE, Gone("RTX 3090 def", "node b died"))),
                     {"c0": "RTX 4090 abc, RTX 3090 def: node b died", "c1": "RTX 4090 abc: node b died"}, id="all-left"),
    ],
)
def test_cells_whose_cards_have_left_end_as_errors_never_as_skips(happens, ends):
    made = scheduler(Needs(), Needs(min_capability=(8, 9)), cards=(AMPERE, ADA))
    happens(made)
    assert {u.cell: (u.verdict, u.why) for u in made.unplaced()} == {
        cell: (Verdict.ERROR, f"no card is left that can run it: {why}") for cell, why in ends.items()}


@pytest.mark.parametrize(("cuda", "verdicts"), [(True, ["ERROR", "ERROR"]), (False, ["SKIP", "SKIP"])], ids=["gpu", "cpu-slot"])
def test_a_card_that_never_answered_may_have_been_the_one(cuda, verdicts):
    made = scheduler(Needs(cuda=True), Needs(min_capability=(9, 0)), Needs(), cards=(CPU,))
    made.miss_card(Gone("cuda seat 1/1", "did not start"), cuda=cuda)
    assert [u.verdict.value for u in made.unplaced()] == verdicts
    assert made.next(CPU.uuid).cell == "c2"


def test_without_any_card_cells_end_as_errors():
    made = scheduler(Needs(cuda=True), cards=())
    assert made.unplaced() == [
        Unplaced("c0", 1, Verdict.ERROR, Reason.NO_CARD, "no card is left that can run it: there was none")]
    assert made.done


BARE = replace(CPU, uuid="CPU-1", host="b", unsafe="bubblewrap is not installed on b")


def test_a_machine_without_a_sandbox_runs_only_what_needs_none():
    made = scheduler(Needs(sandbox=True), Needs(), Needs(sandbox=True), cards=(BARE, CPU))
    assert made.next(BARE.uuid).cell == "c1" and made.next(BARE.uuid) is None
    assert made.unplaced() == []
    assert made.next(CPU.uuid).cell == "c0" and made.next(CPU.uuid).cell == "c2"


def test_where_no_machine_can_make_a_sandbox_cells_end_as_errors_that_say_what_to_do():
    made = scheduler(Needs(sandbox=True), Needs(sandbox=True, cuda=True), Needs(), cards=(BARE,))
    assert made.unplaced() == [
        Unplaced("c0", 1, Verdict.ERROR, Reason.ISOLATION_MISSING, "cpu slot 1/1: bubblewrap is not installed on b"),
        Unplaced("c1", 1, Verdict.SKIP, Reason.NEEDS_UNMET, "bubblewrap is not installed on b")]
    assert made.next(BARE.uuid).cell == "c2"


@pytest.mark.parametrize(
    ("tried", "attempts", "ends"),
    [((ADA.uuid,), 2, [True]), ((ADA.uuid,), 3, [False, True]), ((ADA.uuid, ADA.uuid), 2, [True])],
    ids=["one-left", "two-left", "one-at-least"])
def test_attempts_of_an_earlier_life_count_and_their_cards_come_last(tried, attempts, ends):
    made = Scheduler([Task("c0", Needs(), tried)], attempts)
    made.add_card(ADA)
    made.add_card(AMPERE)
    assert made.next(ADA.uuid) is None
    given = []
    for number in range(len(ends)):
        given.append(made.next(AMPERE.uuid) or made.next(ADA.uuid))
        assert made.finished("c0", Verdict.ERROR) is ends[number]
    assert [a.attempt for a in given] == list(range(len(tried) + 1, len(tried) + 1 + len(ends)))
    assert given[0].card == AMPERE.uuid and made.done


@pytest.mark.parametrize(("cells", "cards"), [
    (300, 4), (5_000, 100), pytest.param(100_000, 1_000, marks=pytest.mark.slow)], ids=["box", "room", "hall"])
def test_every_cell_gets_exactly_one_final_verdict_under_random_ends(cells, cards):
    rng = random.Random(7)
    made = Scheduler([Task(f"c{i}", Needs(cuda=i % 3 == 0)) for i in range(cells)], attempts=3)
    idle = [f"g{i}" for i in range(cards)]
    for uuid in idle:
        made.add_card(Card(uuid, "RTX 3090", "cuda", "h"))
    final, busy, attempts = {}, [], {}
    while not made.done:
        asked = [(uuid, made.next(uuid)) for uuid in idle]
        busy += [got for _, got in asked if got]
        idle = [uuid for uuid, got in asked if not got]
        got = busy.pop(rng.randrange(len(busy)))
        idle.append(got.card)
        attempts[got.cell] = got.attempt
        verdict = rng.choices([Verdict.PASS, Verdict.FAIL, Verdict.ERROR], [60, 10, 30])[0]
        if made.finished(got.cell, verdict):
            assert got.cell not in final
            final[got.cell] = verdict
    assert len(final) == cells
    assert all(attempts[c] == 3 for c, v in final.items() if v is Verdict.ERROR)
    assert max(attempts.values()) == 3


@pytest.mark.parametrize("seed", range(20))
def test_cards_that_leave_and_join_at_random_lose_no_cell_and_turn_no_fail_into_a_pass(seed):
    """Cards die with what they run, come back, or stay away; in the end all may be gone."""
    rng = random.Random(seed)
    needs = [Needs(), Needs(cuda=True), Needs(min_capability=(8, 9)), Needs(min_capability=(9, 0))]
    made = Scheduler([Task(f"c{i}", rng.choice(needs)) for i in range(200)], attempts=3)
    cards = [Card(f"g{i}", f"card {i}", "cuda" if i % 4 else "cpu", "h", capability=(8, 6 + 3 * (i % 2)) if i % 4 else None)
             for i in range(12)]
    here = {card.uuid: card for card in cards[:8]}
    for card in here.values():
        made.add_card(card)
    busy, ends, history = {}, {}, {}

    def close(cell, verdict):
        assert cell not in ends
        ends[cell] = verdict

    for _ in range(20_000):
        if made.done:
            break
        for uuid in here:
            if uuid not in busy and (got := made.next(uuid)):
                busy[uuid] = got
        luck = rng.random()
        if luck < 0.03 and here:
            uuid = rng.choice(sorted(here))
            made.remove_card(here.pop(uuid), Gone(uuid, "its node died"))
            if got := busy.pop(uuid, None):
                history.setdefault(got.cell, []).append(Verdict.ERROR)
                if made.finished(got.cell, Verdict.ERROR, Reason.NODE_DIED):
                    close(got.cell, Verdict.ERROR)
        elif luck < 0.05 and (away := [c for c in cards if c.uuid not in here]):
            card = rng.choice(away)
            here[card.uuid] = card
            made.add_card(card)
        elif busy:
            got = busy.pop(rng.choice(sorted(busy)))
            verdict = rng.choices([Verdict.PASS, Verdict.FAIL, Verdict.INVALID, Verdict.ERROR], [60, 10, 5, 25])[0]
            history.setdefault(got.cell, []).append(verdict)
            if made.finished(got.cell, verdict):
                close(got.cell, verdict)
        for end in made.unplaced():
            assert end.attempt == len(history.get(end.cell, [])) + 1
            close(end.cell, end.verdict)
    assert made.done and len(ends) == 200
    for cell, verdicts in history.items():
        assert len(verdicts) <= 3
        assert all(v is Verdict.ERROR for v in verdicts[:-1]), cell  # what is evidence is never tried again
        assert verdicts[-1] is Verdict.ERROR or ends[cell] is verdicts[-1]
