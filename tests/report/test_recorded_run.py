"""A run of a real card, recorded before some columns existed: it is read, queried and rendered as it was."""

import pytest

from farm.config import PROJECT
from farm.report.html import html
from farm.report.junit import junit
from farm.report.markdown import markdown
from farm.store import Store

ROOT = PROJECT / "tests/data/runs/h200-smoke"  # configs/matrix/smoke-gpu.yaml on one H200


@pytest.fixture(scope="module")
def store():
    return Store.at(ROOT)


def test_the_peaks_of_every_boot(store):
    rows = store.sql("select arm, prompt_tokens, min(value), max(value), count(*), min(pool_tokens), max(pool_tokens) "
                     "from measurements where metric = 'kv_peak' group by 1, 2 order by 2, 1").rows
    seen = [(arm, tokens, round(low, 4), low == high, n, pool, pool == other)
            for arm, tokens, low, high, n, pool, other in rows]
    assert seen == [
        ("baseline", 4000, 0.0753, True, 2, 114297, True), ("patched", 4000, 0.0753, True, 2, 114297, True),
        ("baseline", 32000, 0.4212, True, 2, 114297, True), ("patched", 32000, 0.3048, True, 2, 114297, True),
        ("baseline", 60000, 0.7705, True, 2, 114297, True), ("patched", 60000, 0.5377, True, 2, 114297, True)]


def test_replay_predicted_the_measured_peaks(store):
    blocks = 292  # of the pool, less the null block: 114,297 tokens, three groups of blocks of 416
    predicted = {(arm, tokens): value / blocks for arm, tokens, value in store.sql(
        "select arm, prompt_tokens, value from measurements where metric = 'peak_blocks'").rows}
    for arm, tokens, value in store.sql(
            "select arm, prompt_tokens, value from measurements where metric = 'kv_peak'").rows:
        assert value == pytest.approx(predicted[arm, tokens], abs=1e-12)


@pytest.mark.parametrize("render", [markdown, html, junit])
def test_it_is_rendered_with_card_and_verdicts(store, render):
    (run,) = store.runs()
    text = render(store, run)
    assert "mtp-long" in text and "3 PASS" in text or 'failures="0"' in text


def test_columns_that_came_later_are_null(store):
    assert store.read("cells").column("series").null_count == 3
