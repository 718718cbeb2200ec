"""What command lines and cells take of a host's memory."""

from types import SimpleNamespace

import pytest

from farm.config import PROJECT
from farm.plan import ArmSpec
from farm.profilefile import ProfileConfig, read
from farm.tiers import GIB, NOTHING, Claim, claim, tier

IN_SHM = [
    ("--kv-offloading-size=4", 4 * GIB),
    ("--kv-offloading-size 12", 12 * GIB),
    ("--kv_offloading_size 0.5", GIB // 2),
    ("--kv-offloading-size=4 --kv-offloading-size=1", GIB),
    ("--kv-offloading-size=4 --kv-offloading-backend=native", 4 * GIB),
    ('--kv-transfer-config {"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"cpu_bytes_to_use":1000}}', 1000),
    ('--kv-transfer-config={"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"cpu_bytes_to_use":1000}} '
     "--kv-offloading-size=2", 2 * GIB),
]


@pytest.mark.parametrize(("line", "size"), IN_SHM)
def test_a_tier_in_shm_counts_as_memory_too(line, size):
    assert tier(line.split(), {}) == Claim(size, size)


@pytest.mark.parametrize("line", [
    "", "--max-model-len=24000", "--kv-offloading-size=4 --kv-offloading-backend=lmcache", "--kv-offloading-size",
    "--kv-offloading-size=big",
    '--kv-transfer-config={"kv_connector":"NixlConnector"}', "--kv-transfer-config={broken", "--kv-transfer-config=[1]",
    '--kv-transfer-config={"kv_connector":"OffloadingConnector","kv_connector_extra_config":[]}', "--kv-offloading-size=inf"])
def test_no_tier(line):
    assert tier(line.split(), {}) == NOTHING


@pytest.mark.parametrize(("line", "env", "size"), [
    ("--kv-offloading-size=4", {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}, 4 * GIB),
    ('--kv-transfer-config={"kv_connector":"SimpleCPUOffloadConnector"}', {}, 8 * GIB),
    ('--kv-transfer-config={"kv_connector":"SimpleCPUOffloadConnector","kv_connector_extra_config":{"cpu_bytes_to_use":7}}',
     {}, 7),
])
def test_pinned_memory_is_not_in_shm(line, env, size):
    assert tier(line.split(), env) == Claim(size, 0)


def cell(profile, *arms, serves=True):
    made = tuple(ArmSpec(f"arm-{n}", (), args=args) for n, args in enumerate(arms))
    return SimpleNamespace(job=SimpleNamespace(serves=serves), profile_config=profile, arms=made)


def profile(*args, **more):
    return ProfileConfig(model={"tiny": "qwen3_5-gpu"}, args=args, **more)


LAUNCHED = ProfileConfig(model={"vocab_size": 9}, expect={"args": ["--kv-offloading-size=3"]},
                         launcher={"script": "start.sh", "args_env": "MORE", "env": {"MORE": "--kv-offloading-size=5"}})


@pytest.mark.parametrize(("made", "sandboxed", "size"), [
    (cell(profile("--kv-offloading-size=4"), (), ()), False, Claim(4 * GIB, 4 * GIB)),
    (cell(profile("--kv-offloading-size=4"), (), ("--kv-offloading-size=6",)), False, Claim(6 * GIB, 6 * GIB)),
    (cell(profile("--kv-offloading-size=4"), ()), True, Claim(4 * GIB, 0)),
    (cell(profile("--kv-offloading-size=4"), (), serves=False), False, NOTHING),
    (cell(profile("--kv-offloading-size=4")), False, NOTHING),
    (cell(None, ()), False, NOTHING),
    (cell(LAUNCHED, ()), False, Claim(5 * GIB, 5 * GIB)),
    (cell(LAUNCHED, ("--kv-offloading-size=7",)), False, Claim(7 * GIB, 7 * GIB)),
], ids=["two-arms-take-one-at-a-time", "the-larger-arm", "sandboxed", "serves-nothing", "no-arms", "no-profile", "launcher",
        "launcher-and-arm"])
def test_of_a_cell(made, sandboxed, size):
    assert claim(made, sandboxed=sandboxed) == size


@pytest.mark.parametrize(("name", "gib"), [("offload", 12), ("tiny/offload", 4), ("tiny/mtp-long", 0)])
def test_of_our_profiles(name, gib, monkeypatch):
    monkeypatch.setenv("FARM_MODEL", "/m")
    made = cell(read(PROJECT / f"configs/profiles/{name}.yaml", PROJECT), ())
    assert claim(made, sandboxed=False) == Claim(gib * GIB, gib * GIB)
