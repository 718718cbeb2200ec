"""The one field of a patch's preamble that counts."""

import pytest

from farm.dep3 import applied_upstream, carried
from farm.series import PatchFile

DIFF = b"--- a/v1/one.py\n+++ b/v1/one.py\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(("preamble", "version"), [
    pytest.param(b"Words.\n\nApplied-Upstream: 0.30.0, vllm-project/vllm#55450\n\n", "0.30.0", id="release"),
    pytest.param(b"applied-upstream:\tv0.30.0rc1\n", "0.30.0rc1", id="any-case-and-v"),
    pytest.param(b"Applied-Upstream: commit:deadbeef\nApplied-Upstream: 0.31.0\n", "0.31.0", id="the-one-that-names-a-release"),
    pytest.param(b"Applied-Upstream: https://github.com/vllm-project/vllm/commit/1\n", None, id="url"),
    pytest.param(b"It says Applied-Upstream: 0.30.0 in a sentence.\n", None, id="prose"),
    pytest.param(b"Applied-Upstream:\n0.30.0\n", None, id="empty"),
    pytest.param(b"", None, id="no-preamble"),
])
def test_first_release(preamble, version):
    found = applied_upstream(PatchFile("a.patch", preamble + DIFF))
    assert (found and str(found)) == version


def test_a_line_of_the_diff_is_no_field():
    assert applied_upstream(PatchFile("a.patch", DIFF + b"Applied-Upstream: 0.30.0\n")) is None


@pytest.mark.parametrize(("version", "expected"), [("0.29.0", False), ("0.30.0rc2", False), ("0.30.0", True), ("0.31.0", True)])
def test_carried_from_that_release_on(version, expected):
    assert carried(PatchFile("a.patch", b"Applied-Upstream: 0.30.0\n" + DIFF), version) is expected
