"""gpu-probe, gpu-provoked, gpu-tiny and an A/A of one of its cells, as one H200 ran them one after another: what they show."""

import pytest

from farm.config import PROJECT
from farm.report.markdown import markdown
from farm.store import Store

ROOT = PROJECT / "tests/data/runs/h200-gpu"
SYNC_K15 = "tiny/dflash2-fast-k15"


@pytest.fixture(scope="module")
def store():
    return Store.at(ROOT)


@pytest.fixture(scope="module")
def runs(store):
    """Run id by how its name begins; the A/A is the second run of gpu-tiny."""
    names = ("gpu-probe", "gpu-provoked", "gpu-tiny-20261202T0944", "gpu-tiny-20261202T0959")
    return {name.removesuffix("-20261202T0944").replace("gpu-tiny-20261202T0959", "a/a"): run
            for name in names for (run,) in store.sql(f"select run from runs where run like '{name}%'").rows}


def test_every_server_saw_its_card_alone_and_nvml_saw_the_server_there(store):
    seen = store.sql("select card, cards_seen, card_processes, count(*) from boots where ok group by all").rows
    ((card, inside, outside, boots),) = seen
    assert inside == [card] and outside == 1 and boots == 33


def test_a_patched_trees_first_boot_compiled_next_to_nothing(store):
    found = dict(store.sql("select caches, boot_s from boots where ok and caches <> 'warm'").rows)
    assert sorted(found) == ["cold", "seeded"]
    assert found["seeded"] < found["cold"] / 2  # of the same kernels; 100 s of it were compiling


def test_every_control_ended_as_it_must(store, runs):
    rows = store.sql(f"select control, verdict, reason from cells where run = '{runs['gpu-provoked']}'").rows
    assert sorted(rows) == [(control, "PASS", "control-held") for control in (
        "cold-jit", "no-store", "not-evicted", "refused-config", "tier-overflow", "tier-overflow")]


def test_the_probe_costs_nothing_that_can_be_seen(store, runs):
    rows = list(store.sql("select probe, count(*), min(value), max(value) from measurements where metric = 'kv_peak' "
                     f"and run = '{runs['gpu-probe']}' group by 1 order by 1").rows)
    peak = rows[0][2]
    assert rows == [(False, 10, peak, peak), (True, 10, peak, peak)]
    assert store.sql(f"select verdict, reason from cells where run = '{runs['gpu-probe']}'").rows == (("PASS", "as-expected"),)


def test_what_replay_predicts_is_what_the_card_retains(store, runs):
    """The one difference: 56,000 tokens fill 125 blocks of 448, so the first decoded token takes one more; replay ends with
    the prefill."""
    rows = store.sql(f"""
        with told as (select arm, prompt_tokens, value, split_part(note, ':', 1) as cell from measurements
                      where job = 'replay' and metric = 'retained_states_before' and run = '{runs['gpu-tiny']}'),
             seen as (select arm, prompt_tokens, value, cell as of from measurements
                      where job = 'prefill' and probe and metric = 'retained_states_before' and not cached_tokens > 0
                      and run = '{runs['gpu-tiny']}')
        select cell, arm, prompt_tokens, told.value, seen.value from told join seen using (arm, prompt_tokens)
        where starts_with(of, concat('prefill-', cell, '-')) order by 1, 2, 3""").rows
    assert len(rows) == 18
    assert [row for row in rows if row[3] != row[4]] == [("dflash2-fast-k7", "baseline", 56000, 39.0, 40.0)]


def test_the_sampled_peak_is_the_exact_one_but_for_two_blocks_once(store):
    """Where no request leaks, both arms are alike to every digit; the sampler missed the top once in 32, and in an A/A too."""
    rows = store.sql(f"select arm, prompt_tokens, value, count(*) from measurements where metric = 'kv_peak' "
                     f"and profile = '{SYNC_K15}' group by all").rows
    top = {tokens: max(value for _, at, value, _ in rows if at == tokens) for _, tokens, _, _ in rows}
    below = [(arm, tokens, n) for arm, tokens, value, n in rows if value != top[tokens]]
    assert sum(row[3] for row in rows) == 32
    assert below == [("patched", 56000, 2)]
    missed = store.sql(f"select distinct value from measurements where metric = 'kv_peak' and profile = '{SYNC_K15}' "
                       "and prompt_tokens = 56000 order by 1").rows
    assert round((missed[1][0] - missed[0][0]) * 1525) == 2


def test_an_a_a_tells_a_spread_and_no_effect(store, runs):
    text = markdown(store, runs["a/a"])
    assert "spread" in text and "patched-again" in text and "lower on" not in text
