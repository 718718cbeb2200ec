"""The matrices for a card, on cards that are played and on a machine that has none."""

import dataclasses

import pytest

from farm import config, plan
from farm.bench import Card
from farm.config import PROJECT
from farm.errors import UsageError
from farm.preflight import preflight, read_tests
from farm.records import Verdict
from farm.scheduler import Scheduler, Task, unmet
from farm.series import load_series, series_directory

GIB = 2**30
MATRICES = ("gpu-tiny", "gpu-provoked", "gpu-probe", "smoke-gpu", "premerge")
CPU = Card("c", "CPU slot", "cpu", "box", memory_bytes=64 * GIB)
T4 = Card("t", "Tesla T4", "cuda", "box", capability=(7, 5), memory_bytes=15 * GIB)
RTX3060 = Card("s", "RTX 3060", "cuda", "box", capability=(8, 6), memory_bytes=12 * GIB)
RTX3090 = Card("r", "RTX 3090", "cuda", "box", capability=(8, 6), memory_bytes=24 * GIB - 300 * 2**20)  # as NVML says
H200 = Card("h", "H200", "cuda", "box", capability=(9, 0), memory_bytes=140 * GIB)


@pytest.fixture(autouse=True)
def models(monkeypatch):
    for name in ("FARM_MODEL", "FARM_DRAFTER"):
        monkeypatch.setenv(name, f"/models/{name.lower()}")


def load(name):
    return config.load(PROJECT / f"configs/matrix/{name}.yaml")


def cells(name):
    loaded = load(name)
    (pin,) = loaded.matrix.pins
    series = load_series(series_directory(loaded.series_root, loaded.pins[pin].version))
    return plan.cells(loaded, {pin: series}, read_tests(loaded.series_root))


def refused(name, card):
    """Why a card cannot run a matrix's cells, by cell name or job; those that it can run are left out."""
    return {cell.name or cell.job.name: why for cell in cells(name) if (why := unmet(cell.needs, card))}


def names(name):
    return {cell.name or cell.job.name for cell in cells(name)}


@pytest.mark.parametrize("name", MATRICES)
def test_without_a_card_every_cell_is_skipped_and_says_so(name):
    """Tests and replay too: of a CUDA build even vLLM's own fixtures touch the device."""
    assert refused(name, CPU) == dict.fromkeys(names(name), "needs a CUDA card")


CARDLESS = {"regression", "upstream", "replay", "unit"}  # nothing is served


@pytest.mark.parametrize("name", ["gpu-tiny", "gpu-provoked", "gpu-probe", "smoke-gpu"])
def test_a_card_under_the_needed_capability_is_skipped_with_both_numbers(name):
    serving = names(name) - CARDLESS
    assert serving and refused(name, T4) == dict.fromkeys(serving, "needs compute capability 8.0, Tesla T4 has 7.5")
    assert refused(name, RTX3060) == refused(name, H200) == {}


def test_the_27b_model_needs_a_card_of_24_gb():
    serving = {"mtp-long", "dflash2-fast", "offload"}
    assert refused("premerge", RTX3090) == {}
    assert refused("premerge", RTX3060) == dict.fromkeys(serving, "needs 22.0 GiB of memory, RTX 3060 has 12.0 GiB")
    assert refused("premerge", T4) == dict.fromkeys(serving, "needs compute capability 8.6, Tesla T4 has 7.5")


def test_the_27b_models_offload_cell_expects_what_was_published():
    (cell,) = [cell for cell in cells("premerge") if cell.job.name == "offload"]
    assert cell.job.expect == {"baseline": "not-served", "patched": "served"}
    assert {"--language-model-only", "--mamba-ssm-cache-dtype=float16"} <= set(cell.profile_config.args)


# --- without a card and without the vLLM that the pin means -------------------------------------


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """gpu-tiny on a machine that its pin does not mean."""
    monkeypatch.setenv("FARM_CACHE", str(tmp_path))
    loaded = load("gpu-tiny")
    pin = loaded.pins["site-cuda"].model_copy(update={"site": "/nowhere/site"})
    return dataclasses.replace(loaded, pins={"site-cuda": pin})


def test_a_pin_that_no_card_here_can_serve_is_not_asked_for(elsewhere):
    planned = preflight(elsewhere, lambda text: None, [CPU])
    assert len(planned.cells) == 7 and not planned.decided
    tasks = Scheduler([Task(cell.id, cell.needs) for cell in planned.cells], 1)
    tasks.add_card(CPU)
    assert {(found.verdict, found.why) for found in tasks.unplaced()} == {(Verdict.SKIP, "needs a CUDA card")}


@pytest.mark.parametrize("here", [None, [H200], [CPU, H200]], ids=["a-cluster", "a-card", "a-card-beside-a-slot"])
def test_where_its_cells_might_run_a_pin_that_is_not_there_is_refused(elsewhere, here):
    with pytest.raises(UsageError, match="/nowhere/site holds no vllm package"):
        preflight(elsewhere, lambda text: None, here)
