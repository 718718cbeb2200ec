"""A run that ended in every way."""

import shutil

import pytest
from sample_run import EVIL, Author, prefill_records, replay_records, unit_records

from farm.records import Outcome, Reason, Verdict
from farm.store import Store


@pytest.fixture
def author(tmp_path):
    return Author(Store.open(tmp_path / "results"))


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """For reading alone.  Seven cells promised, six with a row: PASS twice (one at its second attempt), and FAIL,
    INVALID, ERROR, SKIP."""
    author = Author(Store.open(tmp_path_factory.mktemp("shared") / "results"))
    author.cell("replay-0.29.0", "replay", Outcome(Verdict.PASS, Reason.AS_EXPECTED, "at most 6 states retained"),
                replay_records())
    author.cell("prefill-tiny-0.29.0", "prefill", Outcome(Verdict.ERROR, Reason.ACTOR_DIED, "the actor died"),
                prefill_records(peaks=((0.99, 0.99),)), final=False, conditions={"profile": "tiny"})
    lower = Outcome(Verdict.PASS, Reason.AS_EXPECTED, "30.7 % lower", ("only prompt lengths 2048 were run",))
    author.cell("prefill-tiny-0.29.0", "prefill", lower, prefill_records(), attempt=2, conditions={"profile": "tiny"})
    author.cell("unit-0.29.0", "unit", Outcome(Verdict.FAIL, Reason.TESTS_BROKEN, f"1 test broken: test_new {EVIL}"),
                unit_records(), wall_s=30.5)
    author.cell("prefill-pools", "prefill", Outcome(
        Verdict.INVALID, Reason.POOL_MISMATCH, "pools differ: 4,096 and 2,048 tokens. Pin the pool."),
        prefill_records(pools=(4096, 2048)), conditions={"profile": "tiny"})
    tail = "\n".join(f"(EngineCore pid=1) line {i} \x1b[31m{EVIL}" for i in range(20))
    author.cell("prefill-dead", "prefill", Outcome(Verdict.ERROR, Reason.BOOT_DIED, f"the server died\n{tail}"))
    author.cell("offload-0.29.0", "offload", Outcome(Verdict.SKIP, Reason.NEEDS_UNMET, "needs CUDA"))
    author.run()
    return author.store


@pytest.fixture
def own_store(store, tmp_path):
    """A copy of that run, to be damaged."""
    return Store.open(shutil.copytree(store.root, tmp_path / "copy"))
