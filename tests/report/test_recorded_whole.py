"""gpu-tiny whole and an A/A of its prefill cells, as an H200 ran them on 2026-12-02: the A/A first, on a fresh machine; it was
ended by SIGTERM after two cells to make room for the whole, and resumed.  tests/data/runs/h200-gpu is another H200."""

import pytest

from farm import oracle
from farm.config import PROJECT
from farm.oracle import Counts, Evidence, Timed
from farm.records import Reason
from farm.report.view import view
from farm.store import Store

RUNS = PROJECT / "tests/data/runs"
A_A, WHOLE = "gpu-tiny-20261202T201522-d7c4", "gpu-tiny-20261202T202516-3131"
EARLIER = "gpu-tiny-20261202T094418-2109"
PEAKS = ("select split_part(cell, '-tiny-', 1), arm, prompt_tokens, cached_tokens, list_sort(list(distinct value)) "
         "from measurements where metric = 'kv_peak' and run = '{}' and profile <> 'tiny/dflash2-fast-k15' "
         "group by all order by all")


@pytest.fixture(scope="module")
def store():
    return Store.at(RUNS / "h200-gpu-whole")


def test_the_card_was_serving_or_booting(store):
    """One boot of the 18 compiled its kernels: a patched tree's, which the A/A had left, are never given to another tree."""
    assert view(store, WHOLE).times.words == ("wall 834.9 s: vLLM 815.1 s, ours 19.8 s (2.4 %); "
                                              "servers booting or serving 774.8 s (92.8 %)")
    boots = store.sql(f"select caches, boot_s from boots where ok and run = '{WHOLE}' order by boot_s desc").rows
    assert len(boots) == 18
    assert boots[0][0] == "cold" and boots[0][1] > 150 and boots[1][1] < 50


def test_an_a_a_that_was_ended_and_resumed_tells_no_difference(store):
    """Every boot of both arms, with the probe and without; in k15 but for 2 blocks of 1,525 that the sampler missed."""
    assert store.sql(f"select verdict, count(*) from cells where run = '{A_A}' group by 1").rows == (("PASS", 3),)
    rows = store.sql("select profile, prompt_tokens, cached_tokens, count(*), max(value) - min(value) from measurements "
                     f"where metric = 'kv_peak' and run = '{A_A}' group by all").rows
    assert sorted(row[3] for row in rows) == [4] * 4 + [6] * 10
    assert [(profile, tokens, round(spread * 1525)) for profile, tokens, _, _, spread in rows if spread] == [
        ("tiny/dflash2-fast-k15", 56000, 2)]


def test_two_h200s_show_the_same_peaks_to_every_digit(store):
    ours = store.sql(PEAKS.format(WHOLE)).rows
    assert len(ours) == 20
    assert [row[:3] for row in ours if len(row[4]) > 1] == [("prefill-dflash2-fast-k7", "baseline", 56000)]
    assert ours == Store.at(RUNS / "h200-gpu").sql(PEAKS.format(EARLIER)).rows


def test_the_boot_that_a_hiccup_of_0_16_s_made_invalid_says_what_it_says(store):
    """No kernel was compiled, and the prompt came from the tier in a fifth of the evictors' time: it is evidence."""
    assert store.sql(f"select verdict, reason from cells where job = 'offload' and run = '{WHOLE}'").rows == (
        ("INVALID", "cold-jit"),)
    reasons = {}
    for arm in ("baseline", "patched"):
        of = dict(store.sql(f"select metric, value from measurements where job = 'offload' and run = '{WHOLE}' "
                            f"and arm = '{arm}'").rows)
        seen = Evidence(18_928, Timed(of["ttft_cold"], of["cached_tokens_cold"], int(of["jit_lines_cold"])),
                        Timed(of["ttft_again"], of["cached_tokens_again"]), of["ttft_evictors"], of["stored_bytes_cold"],
                        of["stored_bytes"], Counts(0, of["loaded_bytes"], of["external_hits"], of["gpu_hits"]), 4 * oracle.GIB)
        reasons[arm] = oracle.judge_boot(seen, 0.5).reason
    assert reasons == {"baseline": Reason.NOT_SERVED, "patched": Reason.SERVED}
