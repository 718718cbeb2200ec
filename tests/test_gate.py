"""The bench asks the keeper before each boot and after it; the server and the card are played."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from playedcard import CARD, PlayedCard

from farm import livebench
from farm.bench import BootFacts, BootSlot
from farm.errors import BootFailure, FarmError
from farm.evidence import Policy
from farm.keeper import CARD_MARK, Keeper
from farm.records import Reason

GIB = 2**30


@pytest.fixture
def card(tmp_path):
    played = PlayedCard(CARD, tmp_path / "card.json")
    played.say(memory_used_bytes=GIB // 2, power_limit_w=350.0)
    return played


@pytest.fixture
def bench(card, tmp_path, monkeypatch):
    """A bench with one arm; `bench.specs` is what was booted, `bench.rows` what it emitted."""
    specs, rows = [], []

    @contextmanager
    def boot(spec, progress):
        specs.append(spec)
        card.say(memory_used_bytes=20 * GIB)
        yield SimpleNamespace(facts=BootFacts(), last_request=None, processes=list)
        card.say(memory_used_bytes=made.left)

    monkeypatch.setattr(livebench.server, "boot", boot)
    profile = SimpleNamespace(drafter=None, args=(), served_args=(), served_env={}, launcher=None, stall_s=1.0,
                              boot_deadline_s=1.0, expect=SimpleNamespace(facts=lambda *_: None))
    arm = SimpleNamespace(name="patched", args=(), patches=(), env={CARD_MARK: "forged"})
    made = livebench.LiveBench(
        CARD, "p", "0.29.0", "tiny", {"patched": arm}, random.Random(1), "cell-1", lambda text: None,
        lambda tagged: rows.append(tagged), SimpleNamespace(profile_config=profile, arms=(arm,)),
        SimpleNamespace(root=tmp_path), SimpleNamespace(python=tmp_path / "python", site=None),
        {"patched": SimpleNamespace(root=tmp_path, id="t1")},
        SimpleNamespace(card={}, info=SimpleNamespace(run="run-1"), attempt=1), [], None,
        _keeper=Keeper(card, tmp_path, Policy(busy_wait_s=0.0), "run-1"), _sandbox=None, _records=tmp_path)
    made.specs, made.rows, made.left = specs, rows, GIB // 2
    return made


SLOT = BootSlot("patched", 0, 0, 0)


def test_a_boot_on_an_idle_card_carries_its_mark_and_gives_the_memory_back(bench):
    with bench.serve(SLOT):
        pass
    (spec,), (row,) = bench.specs, bench.rows
    assert spec.env[CARD_MARK].startswith(f"{CARD.uuid} /")  # whatever the arm said
    assert row.record.ok and bench._evidence.card["power_limit_after_w"] == 350.0


@pytest.mark.parametrize(("facts", "reason"), [
    ({"clients": [1]}, Reason.CARD_BUSY),
    ({"memory_used_bytes": 20 * GIB}, Reason.CARD_BUSY),
    ({"power_limit_w": 200.0}, Reason.CARD_CHANGED),
    ({"lost": True}, Reason.CARD_LOST),
], ids=["foreign-process", "memory", "power-limit", "lost"])
def test_a_second_boot_does_not_begin_where_the_card_has_changed(bench, card, facts, reason):
    with bench.serve(SLOT):
        pass
    card.say(**facts)
    with pytest.raises(FarmError) as caught, bench.serve(SLOT):
        pytest.fail("it booted")
    assert caught.value.reason is reason
    assert len(bench.specs) == 1


def test_a_boot_that_leaves_memory_behind_is_an_error_of_the_cards_making(bench, monkeypatch):
    bench.left = 9 * GIB
    monkeypatch.setattr(Keeper.wait_memory_back, "__defaults__", (0.3,))
    with pytest.raises(FarmError) as caught, bench.serve(SLOT):
        pass
    assert caught.value.reason is Reason.MEMORY_HELD


def test_a_card_that_is_lost_while_it_serves_does_not_hide_what_the_server_said(bench, card):
    with pytest.raises(BootFailure, match="the engine died"), bench.serve(SLOT):
        card.say(lost=True)
        raise BootFailure("the engine died", log_tail="its last words")
    (row,) = bench.rows
    assert (row.record.ok, row.record.log_tail) == (False, "its last words")
    assert bench._evidence.card["power_limit_after_w"] is None
