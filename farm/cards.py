"""What a card is: facts by NVML for a GPU, and the CPU slot that plays a card where there is none.

A card is known by its UUID.  Facts that a card cannot have stay None.
"""

from __future__ import annotations

import os
import platform
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from farm.bench import Card
from farm.errors import FarmError
from farm.records import Reason

_THROTTLE = {
    "nvmlClocksEventReasonSwPowerCap": "sw-power-cap",
    "nvmlClocksEventReasonHwSlowdown": "hw-slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "sw-thermal",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hw-thermal",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "hw-power-brake",
}
# What NVML says to a question of a card that no longer answers, whatever the question.
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_RESET_REQUIRED,
         pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_TIMEOUT)


@dataclass(frozen=True)
class Client:
    """A process that computes on a card.  User and command name are None where it cannot be seen from here."""

    pid: int
    user: str | None = None
    command: str | None = None  # its name alone: arguments may hold secrets
    memory_bytes: int | None = None

    @classmethod
    def of(cls, pid: int, memory_bytes: int | None = None) -> Client:
        try:
            process = psutil.Process(pid)
            return cls(pid, process.username(), process.name(), memory_bytes)
        except psutil.Error:
            return cls(pid, memory_bytes=memory_bytes)

    def __str__(self) -> str:
        if self.command is None:
            return f"process {self.pid}, which cannot be seen from here (another container's, or the host's)"
        held = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**20:.0f} MiB"
        return f"process {self.pid} ({self.command} of {self.user}{held})"


@dataclass(frozen=True)
class Reading:
    """What moves on a card, as it is at one moment; None: the card does not say."""

    memory_used_bytes: int | None = None
    power_limit_w: float | None = None
    driver: str | None = None
    clients: tuple[Client, ...] = ()
    uncorrected_errors: int | None = None  # of its memory (ECC), since the driver was loaded


def cpu_slot(index: int, slots: int) -> Card:
    """The card that slot `index` of `slots` plays: an equal share of this process's cores.

    Its UUID is the same for the same slot of the same machine, and of the same node where FARM_NODE names one: several
    nodes on one machine would otherwise be one card.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    share = [core for position, core in enumerate(cores) if position % slots == index] or cores
    machine = "/".join(filter(None, (_machine_id(), os.environ.get("FARM_NODE"))))
    name = uuid.uuid5(uuid.NAMESPACE_DNS, f"{machine}/cpu/{slots}/{index}")
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
    """The columns of schemas.CARD for a card as it is now, its moving facts read afresh.  Raises FarmError (card-lost)."""
    row: dict[str, Any] = {
        "card": card.uuid, "card_name": card.name, "host": card.host, "card_memory_bytes": card.memory_bytes,
        "driver": card.driver,
        "compute_capability": None if card.capability is None else ".".join(map(str, card.capability)), **card.facts,
    }
    if card.kind == "cuda":
        with _handle_of(card) as handle:
            row |= _moving_facts(handle)
    return row


def reading(card: Card) -> Reading:
    """A card as it is now; of a CPU slot nothing moves.  Raises FarmError (card-lost)."""
    if card.kind != "cuda":
        return Reading()
    with _handle_of(card) as handle:
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        limit = _ask(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
        clients = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        return Reading(
            None if memory is None else int(memory.used), None if limit is None else limit / 1000,
            _text(pynvml.nvmlSystemGetDriverVersion()),
            tuple(Client.of(int(c.pid), _size(c.usedGpuMemory)) for c in clients),
            _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                 pynvml.NVML_VOLATILE_ECC))


def placed() -> dict[str, frozenset[int]]:
    """Ids of the processes that compute, by the UUID of their card, as NVML lists them for every card of this host.

    A card that does not tell is left out: in some containers none does.
    """
    found = {}
    with _nvml():
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if (clients := _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)) is not None:
                found[_text(pynvml.nvmlDeviceGetUUID(handle))] = frozenset(int(client.pid) for client in clients)
    return found


@contextmanager
def _handle_of(card: Card) -> Iterator[Any]:
    with _nvml():
        try:
            yield pynvml.nvmlDeviceGetHandleByUUID(card.uuid.encode())
        except pynvml.NVMLError as error:
            if error.value not in _LOST:
                raise
            raise FarmError(f"{card.name} {card.uuid} no longer answers NVML ({error}); look for Xid lines in dmesg, then "
                            "reset the card or reboot the machine", reason=Reason.CARD_LOST) from error


def _moving_facts(handle: Any) -> dict[str, Any]:
    limit = _ask(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    clients = _ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return {
        "power_limit_before_w": None if limit is None else limit / 1000,
        "clock_sm_mhz": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "clock_memory_mhz": _ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        "temperature_c": _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": None if reasons is None else [
            word for name, word in _THROTTLE.items() if reasons & getattr(pynvml, name, 0)],
        "other_clients": None if clients is None else len(clients),
    }


def _ask(question: Any, handle: Any, *args: Any) -> Any:
    """The answer, or None: not every card answers every question.  A card that is lost raises."""
    try:
        return question(handle, *args)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return None


def _size(used: int | None) -> int | None:
    """Of a client; in a container or on WSL2 the driver does not say, and answers None or all ones."""
    return None if used is None or used >= 2**63 else int(used)


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
