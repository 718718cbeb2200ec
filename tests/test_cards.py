"""CPU slots, and GPU facts from a played NVML."""

import pynvml
import pytest

from farm import cards
from farm.errors import FarmError
from farm.records import Reason
from farm.schemas import SCHEMAS


def test_slots_share_the_cores_and_keep_their_names(monkeypatch):
    monkeypatch.setattr(cards.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    slots = [cards.cpu_slot(i, 2) for i in range(2)]
    assert [s.cores for s in slots] == [(0, 2, 4), (1, 3)]
    assert slots[0].uuid != slots[1].uuid
    assert slots[0].uuid == cards.cpu_slot(0, 2).uuid


def test_more_slots_than_cores_share_all_cores(monkeypatch):
    monkeypatch.setattr(cards.os, "sched_getaffinity", lambda _: {0})
    assert [cards.cpu_slot(i, 2).cores for i in range(2)] == [(0,), (0,)]


def test_a_cpu_slot_has_no_fact_that_only_a_gpu_has():
    row = cards.conditions(cards.cpu_slot(0, 1))
    assert set(row) <= set(SCHEMAS["cells"].names)
    assert row["driver"] is None and "power_limit_before_w" not in row
    assert row["cpu_cores"] >= 1 and row["platform"] in ("native", "WSL2")


@pytest.fixture
def nvml(monkeypatch):
    """Two cards; the second answers neither power nor throttle questions."""
    def unsupported(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    played = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: f"GPU-{i}", "nvmlDeviceGetHandleByUUID": lambda u: u.decode(),
        "nvmlDeviceGetIndex": lambda h: int(h[-1]), "nvmlDeviceGetUUID": lambda h: h, "nvmlDeviceGetName": lambda h: "RTX 3090",
        "nvmlDeviceGetMemoryInfo": lambda h: type("M", (), {"total": 24 * 2**30, "used": 2**30}),
        "nvmlDeviceGetCudaComputeCapability": lambda h: (8, 6), "nvmlSystemGetDriverVersion": lambda: b"580.1",
        "nvmlDeviceGetPowerManagementLimit": lambda h: 250_000 if h == "GPU-0" else unsupported(),
        "nvmlDeviceGetCurrentClocksEventReasons":
            lambda h: pynvml.nvmlClocksEventReasonSwPowerCap if h == "GPU-0" else unsupported(),
        "nvmlDeviceGetClockInfo": lambda h, kind: 1700 if kind == pynvml.NVML_CLOCK_SM else 9500,
        "nvmlDeviceGetTemperature": lambda h, kind: 61, "nvmlDeviceGetComputeRunningProcesses": lambda h: [object()],
    }
    for name, function in played.items():
        monkeypatch.setattr(pynvml, name, function)


@pytest.mark.parametrize(("visible", "uuid"), [("1", "GPU-1"), ("GPU-0", "GPU-0"), ("1,0", "GPU-1")])
def test_a_gpu_is_found_by_index_or_uuid(nvml, monkeypatch, visible, uuid):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    card = cards.visible_gpu()
    assert (card.uuid, card.name, card.capability, card.memory_bytes, card.driver) == (
        uuid, "RTX 3090", (8, 6), 24 * 2**30, "580.1")


def test_conditions_of_a_gpu_and_null_for_what_it_does_not_say(nvml):
    first, second = (cards.conditions(cards.gpu(u)) for u in ("GPU-0", "GPU-1"))
    assert (first["power_limit_before_w"], first["throttle_reasons"], first["clock_memory_mhz"], first["other_clients"]) == (
        250.0, ["sw-power-cap"], 9500, 1)
    assert (second["power_limit_before_w"], second["throttle_reasons"]) == (None, None)
    assert set(first) <= set(SCHEMAS["boots"].names)


def test_without_a_driver_the_error_says_what_to_try(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with pytest.raises(FarmError, match="Try nvidia-smi") as caught:
        cards.gpu("0")
    assert caught.value.reason is Reason.NO_CARD
    assert [c.kind for c in cards.local_cards()] == ["cpu"]


@pytest.mark.parametrize(("held", "ends"), [([9, 5, 1], "back"), ([9] * 1000, "held")], ids=["released", "held"])
def test_memory_must_come_back_after_a_boot(nvml, monkeypatch, held, ends):
    asked = iter(held)
    monkeypatch.setattr(cards, "memory_used_bytes", lambda card: next(asked) * 2**30)
    monkeypatch.setattr(cards.time, "sleep", lambda s: None)
    card = cards.gpu("0")
    if ends == "back":
        cards.wait_memory_back(card, 2**30)
        assert list(asked) == []
    else:
        with pytest.raises(FarmError, match="8192 MiB are still held") as caught:
            cards.wait_memory_back(card, 2**30, deadline_s=0.0)
        assert caught.value.reason is Reason.MEMORY_HELD
    cards.wait_memory_back(cards.cpu_slot(0, 1), None)
