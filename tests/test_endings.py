"""Whose fault a boot's end is.  What else becomes of a server is in tests/test_server.py and tests/faults/test_processes.py."""

import pytest

from farm.bench import Arm
from farm.endings import is_the_trees_fault
from farm.errors import BootFailure
from farm.records import Reason

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
