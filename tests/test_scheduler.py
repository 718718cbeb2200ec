"""The scheduler as a table of what can happen; and a simulation at the size of a large room."""

import random

import pytest

from farm.bench import Card, Needs
from farm.records import Verdict
from farm.scheduler import Assignment, Scheduler, Task, unmet

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


def test_unrunnable_cells_are_skipped_with_every_reason_once():
    made = scheduler(Needs(cuda=True, min_capability=(9, 0)), Needs(), cards=(AMPERE, ADA, CPU))
    assert made.unrunnable() == [(
        "c0",
        "needs a CUDA card; needs compute capability 9.0, RTX 3090 has 8.6; needs compute capability 9.0, RTX 4090 has 8.9",
    )]
    assert made.unrunnable() == []


def test_without_any_card_cells_are_stranded_not_skipped():
    made = scheduler(Needs(), cards=())
    assert made.unrunnable() == []
    assert made.stranded() == ["c0"]


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
