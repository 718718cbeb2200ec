"""Prompts: the same everywhere, and strangers to each other."""

import pytest

from farm.prompts import make_prompt


def test_prompts_are_the_same_for_the_same_salt_and_share_no_block_with_another():
    one, again, other = make_prompt(500, "a", 320), make_prompt(500, "a", 320), make_prompt(500, "b", 320)
    assert one == again and one.tokens == 500 and one.sha256 != other.sha256
    assert one.token_ids[:16] != other.token_ids[:16]
    assert make_prompt(400, "a", 320).token_ids[:16] != one.token_ids[:16]


@pytest.mark.parametrize(("vocab", "low", "high"), [(320, 32, 126), (150_000, 1000, 135_000)], ids=["bytes", "real"])
def test_prompts_stay_away_from_special_tokens(vocab, low, high):
    ids = make_prompt(5000, "a", vocab).token_ids
    assert low <= min(ids) and max(ids) <= high
