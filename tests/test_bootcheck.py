"""Facts of a boot against what its profile expects."""

import pytest

from farm.bench import BootFacts
from farm.bootcheck import ExpectedFacts
from farm.errors import InvalidMeasurement
from farm.records import Reason

FACTS = BootFacts(pool_tokens=114_297, block_size=416, backend="TRITON_ATTN", argv=("vllm", "serve", "/m", "--max-model-len=9"),
                  gaps=("connector",))


@pytest.mark.parametrize("expected", [
    ExpectedFacts(), ExpectedFacts(block_size=416, pool_tokens=114_297, backend="TRITON_ATTN", args=("--max-model-len", "9"))])
def test_a_boot_as_expected(expected):
    expected.check(FACTS)


@pytest.mark.parametrize(
    ("expected", "says"),
    [
        (ExpectedFacts(block_size=832), "block_size: expected 832, found 416"),
        (ExpectedFacts(pool_tokens=176_020), "pool_tokens: expected 176020, found 114297"),
        (ExpectedFacts(backend="FLASH_ATTN"), "backend: expected FLASH_ATTN, found TRITON_ATTN"),
        (ExpectedFacts(connector="OffloadingConnector"),
         "connector: expected OffloadingConnector, found said in words that farm/bootlog.py does not know"),
        (ExpectedFacts(args=("--max-model-len=9", "--kv-mem=5")),
         "argument --kv-mem 5: expected, found not in what runs (vllm serve /m --max-model-len=9)"),
    ],
    ids=["block", "pool", "backend", "unread", "argument"],
)
def test_a_boot_that_differs_is_no_evidence(expected, says):
    with pytest.raises(InvalidMeasurement) as caught:
        expected.check(FACTS)
    assert says in str(caught.value)
    assert caught.value.reason is Reason.FACTS_DIFFER


def test_every_fact_that_differs_is_named_and_silence_is_a_difference():
    with pytest.raises(InvalidMeasurement, match="block_size: expected 1, found 416; pool_tokens: expected 2, found not said"):
        ExpectedFacts(block_size=1, pool_tokens=2).check(BootFacts(block_size=416))
