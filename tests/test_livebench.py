"""What the bench decides by itself; the rest of it is proved by tests/test_demo.py on a real vLLM."""

import pytest

from farm.bench import balanced_order
from farm.errors import InvalidMeasurement
from farm.livebench import _check_attested
from farm.records import Reason
from farm.trees import Tree


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
