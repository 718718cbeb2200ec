"""What a card is: facts by NVML for a GPU, and the CPU slot that plays a card where there is none.

A card is known by its UUID.  Facts that a card cannot have stay None.
"""

from __future__ import annotations

import os
import platform
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pynvml

from farm.bench import Card
from farm.errors import FarmError
from farm.records import Reason

SLACK_BYTES = 64 * 2**20  # what a driver may keep of a process that has ended
_THROTTLE = {
    "nvmlClocksEventReasonSwPowerCap": "sw-power-cap",
    "nvmlClocksEventReasonHwSlowdown": "hw-slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "sw-thermal",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hw-thermal",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "hw-power-brake",
}


def cpu_slot(index: int, slots: int) -> Card:
    """The card that slot `index` of `slots` plays: an equal share of this process's cores.

    Its UUID is the same for the same slot of the same machine.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = [core for position, core in enumerate(cores) if position % slots == index] or cores
    name = uuid.uuid5(uuid.NAMESPACE_DNS, f"{_machine_id()}/cpu/{slots}/{index}")
    return Card(
        uuid=f"CPU-{name}", name=f"cpu slot {index + 1}/{slots}", kind="cpu", host=socket.gethostname(), index=index,
        memory_bytes=psutil.virtual_memory().total, cores=tuple(share), facts=_host_facts(),
    )


def visible_gpu() -> Card:
    """The one GPU that this process was given (CUDA_VISIBLE_DEVICES).  Raises FarmError (no-card)."""
    return gpu(os.environ.get("CUDA_VISIBLE_DEVICES", "0"))


def gpu(visible: str) -> Card:
    """The GPU that an entry of CUDA_VISIBLE_DEVICES names: an index in PCI order, or a UUID.

    Raises FarmError (no-card) where NVML or the device is not there.
    """
    with _nvml():
        handle, index = _handle(visible)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return Card(
            uuid=_text(pynvml.nvmlDeviceGetUUID(handle)), name=_text(pynvml.nvmlDeviceGetName(handle)), kind="cuda",
            host=socket.gethostname(), index=index,
            capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            memory_bytes=int(memory.total), driver=_text(pynvml.nvmlSystemGetDriverVersion()),
            cores=tuple(sorted(os.sched_getaffinity(0))), facts=_host_facts(),
        )


def conditions(card: Card) -> dict[str, Any]:
    """The columns of schemas.CARD for a card as it is now, its moving facts read afresh."""
    row: dict[str, Any] = {
        "card": card.uuid, "card_name": card.name, "host": card.host, "card_memory_bytes": card.memory_bytes,
        "driver": card.driver,
        "compute_capability": None if card.capability is None else ".".join(map(str, card.capability)), **card.facts,
    }
    if card.kind == "cuda":
        with _nvml():
            row |= _moving_facts(pynvml.nvmlDeviceGetHandleByUUID(card.uuid.encode()))
    return row


def power_limit_w(card: Card) -> float | None:
    """The power limit in watts; None on a CPU slot or where the card does not say."""
    if card.kind != "cuda":
        return None
    with _nvml():
        return _moving_facts(pynvml.nvmlDeviceGetHandleByUUID(card.uuid.encode()))["power_limit_before_w"]


def memory_used_bytes(card: Card) -> int | None:
    """Memory in use on a GPU by anyone; None on a CPU slot."""
    if card.kind != "cuda":
        return None
    with _nvml():
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(card.uuid.encode())).used)


def wait_memory_back(card: Card, before: int | None, deadline_s: float = 30.0) -> None:
    """Wait until a GPU's memory in use is back at what it was `before` a boot, give or take SLACK_BYTES.

    A next boot beside memory that is still held would get a smaller pool.  Raises FarmError (memory-held).
    """
    if before is None:
        return
    until = time.monotonic() + deadline_s
    while (used := memory_used_bytes(card)) is not None and used > before + SLACK_BYTES:
        if time.monotonic() > until:
            raise FarmError(
                f"{card.name}: {(used - before) / 2**20:.0f} MiB are still held {deadline_s:.0f} s after the server ended; "
                "look for their holder with nvidia-smi", reason=Reason.MEMORY_HELD)
        time.sleep(0.2)


def _moving_facts(handle: Any) -> dict[str, Any]:
    def ask(question: Any, *args: Any) -> Any:
        try:
            return question(handle, *args)
        except pynvml.NVMLError:  # not every card answers every question: null is the honest answer
            return None

    limit = ask(pynvml.nvmlDeviceGetPowerManagementLimit)
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
    clients = ask(pynvml.nvmlDeviceGetComputeRunningProcesses)
    return {
        "power_limit_before_w": None if limit is None else limit / 1000,
        "clock_sm_mhz": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
        "clock_memory_mhz": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
        "temperature_c": ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None if reasons is None else [
            word for name, word in _THROTTLE.items() if reasons & getattr(pynvml, name, 0)],
        "other_clients": None if clients is None else len(clients),
    }


def _handle(visible: str) -> tuple[Any, int]:
    first = visible.split(",")[0].strip()
    try:
        if first.startswith("GPU-"):
            handle = pynvml.nvmlDeviceGetHandleByUUID(first.encode())
        else:
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(first or 0))
        return handle, int(pynvml.nvmlDeviceGetIndex(handle))
    except (pynvml.NVMLError, ValueError) as error:
        raise FarmError(f"no GPU answers to CUDA_VISIBLE_DEVICES={visible!r} ({error}); compare nvidia-smi -L",
                        reason=Reason.NO_CARD) from error


@contextmanager
def _nvml() -> Iterator[None]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise FarmError(f"NVML does not answer ({error}); is the NVIDIA driver loaded? Try nvidia-smi",
                        reason=Reason.NO_CARD) from error
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _host_facts() -> Mapping[str, Any]:
    wsl = "microsoft" in platform.release().lower()
    return {"platform": "WSL2" if wsl else "native", "cpu": _cpu_model(), "cpu_cores": os.cpu_count()}


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.lower().startswith("model name")), None)


def _machine_id() -> str:
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        if path.is_file() and (text := path.read_text(encoding="utf-8").strip()):
            return text
    return f"{socket.gethostname()}-{uuid.getnode()}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def local_cards() -> list[Card]:
    """Every card of this machine: its GPUs by NVML, or the one CPU slot that plays a card."""
    try:
        with _nvml():
            uuids = [_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)))
                     for i in range(pynvml.nvmlDeviceGetCount())]
    except FarmError:
        uuids = []
    return [gpu(found) for found in uuids] or [cpu_slot(0, 1)]
