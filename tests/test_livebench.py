"""What the bench decides by itself; the rest of it is proved by tests/test_demo.py on a real vLLM."""

import pytest

from farm.bench import Arm, balanced_order
from farm.errors import BootFailure, InvalidMeasurement
from farm.livebench import _check_attested, is_the_trees_fault, make_prompt
from farm.records import Reason
from farm.trees import Tree

PATCHED, BASELINE = Arm("patched", "t1", ("a.patch",)), Arm("baseline", "t0", ())


def died(cause, reason=Reason.BOOT_DIED):
    return BootFailure(f"the server ended with status 1 while it booted: {cause}", reason=reason)


@pytest.mark.parametrize(
    ("error", "arm", "booted", "blamed"),
    [
        (died("SyntaxError: invalid syntax"), PATCHED, {"baseline"}, True),
        (died("ModuleNotFoundError: No module named 'vllm.nowhere'"), PATCHED, {"baseline"}, True),
        (died("AttributeError: no attribute x"), PATCHED, {"baseline", "patched"}, True),
        (died("SyntaxError: invalid syntax"), PATCHED, set(), False),
        (died("SyntaxError: invalid syntax"), PATCHED, {"patched"}, False),
        (died("SyntaxError: invalid syntax"), BASELINE, {"patched"}, False),
        (died("torch.OutOfMemoryError: CUDA out of memory"), PATCHED, {"baseline"}, False),
        (died("RuntimeError: CUDA error: an illegal memory access"), PATCHED, {"baseline"}, False),
        (died("SyntaxError", Reason.BOOT_STALLED), PATCHED, {"baseline"}, False),
    ],
    ids=["syntax", "import", "attribute", "first-boot", "only-itself", "baseline", "memory", "card", "stalled"],
)
def test_a_boot_that_dies_counts_against_the_tree_only_where_nothing_else_can_be_at_fault(error, arm, booted, blamed):
    assert is_the_trees_fault(error, arm, booted) is blamed


def test_prompts_are_the_same_for_the_same_salt_and_share_no_block_with_another():
    one, again, other = make_prompt(500, "a", 320), make_prompt(500, "a", 320), make_prompt(500, "b", 320)
    assert one == again and one.tokens == 500 and one.sha256 != other.sha256
    assert one.token_ids[:16] != other.token_ids[:16]
    assert make_prompt(400, "a", 320).token_ids[:16] != one.token_ids[:16]


@pytest.mark.parametrize(("vocab", "low", "high"), [(320, 32, 126), (150_000, 1000, 135_000)], ids=["bytes", "real"])
def test_prompts_stay_away_from_special_tokens(vocab, low, high):
    ids = make_prompt(5000, "a", vocab).token_ids
    assert low <= min(ids) and max(ids) <= high


def test_boots_are_balanced():
    assert [s.arm for s in balanced_order(["a", "b"], 3)] == ["a", "b", "b", "a", "a", "b"]
    assert [(s.boot, s.pair, s.order) for s in balanced_order(["a", "b"], 2)] == [(0, 0, 0), (0, 0, 1), (1, 1, 2), (1, 1, 3)]


@pytest.mark.parametrize("lines", [[], [{"event": "attest", "vllm_path": "/elsewhere/vllm/__init__.py"}]],
                         ids=["silent", "elsewhere"])
def test_a_script_that_ran_another_vllm_is_no_evidence(tmp_path, lines):
    tree = Tree("t1", tmp_path, tmp_path / "vllm", (), "p", "5e")
    with pytest.raises(InvalidMeasurement) as caught:
        _check_attested(lines, tree, "patched")
    assert caught.value.reason is Reason.WRONG_TREE
    _check_attested([{"event": "attest", "vllm_path": str(tmp_path / "vllm/__init__.py")}], tree, "patched")
