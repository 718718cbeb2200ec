"""CPU slots, and GPU facts from a played NVML."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
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


def test_slots_of_two_nodes_on_one_machine_are_two_cards(monkeypatch):
    monkeypatch.delenv("FARM_NODE", raising=False)
    uuids = [cards.cpu_slot(0, 1).uuid]
    for node in ("a", "b", "a"):
        monkeypatch.setenv("FARM_NODE", node)
        uuids.append(cards.cpu_slot(0, 1).uuid)
    assert len(set(uuids)) == 3 and uuids[1] == uuids[3]


def test_more_slots_than_cores_share_all_cores(monkeypatch):
    monkeypatch.setattr(cards.os, "sched_getaffinity", lambda _: {0})
    assert [cards.cpu_slot(i, 2).cores for i in range(2)] == [(0,), (0,)]


def test_a_cpu_slot_has_no_fact_that_only_a_gpu_has():
    row = cards.conditions(cards.cpu_slot(0, 1))
    assert set(row) <= set(SCHEMAS["cells"].names)
    assert row["driver"] is None and "power_limit_before_w" not in row
    assert row["cpu_cores"] >= 1 and row["platform"] in ("native", "WSL2")


def not_supported(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def nvml(monkeypatch):
    """Two cards; the second answers neither power nor throttle questions."""
    played = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda i: f"GPU-{i}", "nvmlDeviceGetHandleByUUID": lambda u: u.decode(),
        "nvmlDeviceGetIndex": lambda h: int(h[-1]), "nvmlDeviceGetUUID": lambda h: h, "nvmlDeviceGetName": lambda h: "RTX 3090",
        "nvmlDeviceGetMemoryInfo": lambda h: type("M", (), {"total": 24 * 2**30, "used": 2**30}),
        "nvmlDeviceGetCudaComputeCapability": lambda h: (8, 6), "nvmlSystemGetDriverVersion": lambda: b"580.1",
        "nvmlDeviceGetPowerManagementLimit": lambda h: 250_000 if h == "GPU-0" else not_supported(),
        "nvmlDeviceGetCurrentClocksEventReasons":
            lambda h: pynvml.nvmlClocksEventReasonSwPowerCap if h == "GPU-0" else not_supported(),
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


@pytest.mark.parametrize(("limit", "ecc", "pids"), [(250.0, 3, (4194200, 4194201)), (None, None, ())], ids=["all", "little"])
def test_a_reading_is_what_the_card_says_and_null_for_the_rest(nvml, monkeypatch, limit, ecc, pids):
    say = {"nvmlDeviceGetComputeRunningProcesses": lambda h: [SimpleNamespace(pid=p, usedGpuMemory=2**64 - 1) for p in pids]}
    if ecc is not None:
        say["nvmlDeviceGetTotalEccErrors"] = lambda h, kind, counter: ecc
    else:
        say["nvmlDeviceGetTotalEccErrors"] = say["nvmlDeviceGetComputeRunningProcesses"] = not_supported
    for name, function in say.items():
        monkeypatch.setattr(pynvml, name, function)
    found = cards.reading(cards.gpu("GPU-0" if limit else "GPU-1"))
    assert found == cards.Reading(2**30, limit, "580.1", tuple(cards.Client(p) for p in pids), ecc)


def test_of_a_cpu_slot_nothing_moves():
    assert cards.reading(cards.cpu_slot(0, 1)) == cards.Reading()


@pytest.mark.parametrize(("question", "error", "reason"), [
    ("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_NOT_FOUND, Reason.CARD_LOST),
    ("nvmlDeviceGetHandleByUUID", pynvml.NVML_ERROR_UNKNOWN, Reason.CARD_LOST),
    ("nvmlDeviceGetMemoryInfo", pynvml.NVML_ERROR_GPU_IS_LOST, Reason.CARD_LOST),
    ("nvmlDeviceGetPowerManagementLimit", pynvml.NVML_ERROR_GPU_IS_LOST, Reason.CARD_LOST),
    ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED, Reason.NO_CARD),
])
def test_a_card_that_is_gone_is_lost_whatever_was_asked(nvml, monkeypatch, question, error, reason):
    card = cards.gpu("GPU-0")

    def fails(*_):
        raise pynvml.NVMLError(error)

    monkeypatch.setattr(pynvml, question, fails)
    for ask in (cards.reading, cards.conditions):
        if ask is cards.conditions and question == "nvmlDeviceGetMemoryInfo":
            continue  # it does not ask that
        with pytest.raises(FarmError) as caught:
            ask(card)
        assert caught.value.reason is reason


def test_a_client_is_named_by_process_user_and_command_alone():
    child = subprocess.Popen([sys.executable, "-c", "input()", "--token=secret"], stdin=subprocess.PIPE)
    try:
        said = str(cards.Client.of(child.pid, 512 * 2**20))
        assert said.startswith(f"process {child.pid} (python") and ", 512 MiB)" in said
        assert psutil.Process().username() in said and "secret" not in said
    finally:
        child.communicate(b"\n")
    assert "which cannot be seen from here" in str(cards.Client.of(child.pid))
