"""What only a real GPU can show of farm.isolation: that a sandbox with a card computes, and with that card alone.

    python -m pytest -m gpu tests/gpu/test_sandbox_on_gpu.py -s -rs

Takes two minutes; run by hand.  Needs bubblewrap.  FARM_TORCH_PYTHON names an interpreter with a CUDA torch where this one
has none.  The card must be idle.  What is run as root is also run as a user without rights, whose sandboxes are made by a
user namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from farm import cards, isolation
from farm.bench import Card
from farm.childenv import child_environment
from farm.health import SCRIPTS, Interpreter, examine
from farm.isolation import Sandbox
from farm.lifeline import Supervised
from farm.supervisor import started

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PYTHON = Path(os.environ.get("FARM_TORCH_PYTHON", sys.executable))
LIMIT_S = 240.0
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
# NVLink multicast would put the other cards of a shared host at risk (see the machine's notes); one card needs none.
QUIET_LINKS = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

DEVICES = """
import glob, json
print(json.dumps(sorted(glob.glob("/dev/nvidia*"))))
"""

COMPUTES = """
import ctypes, json, mmap, os, torch
card = torch.device("cuda:0")
a = torch.arange(2**20, dtype=torch.float64, device=card)
said = {"count": torch.cuda.device_count(), "uuid": str(torch.cuda.get_device_properties(0).uuid), "sum": float(a.sum())}
pinned = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
said["pinned"] = pinned.is_pinned()
# As vLLM's tier for offloaded blocks: a file of /dev/shm, mapped, and registered with the card.
with open("/dev/shm/tier", "w+b") as file:
    file.truncate(64 * 2**20)
    held = mmap.mmap(file.fileno(), 64 * 2**20)
    tier = torch.frombuffer(held, dtype=torch.uint8)
    said["registered"] = int(torch.cuda.cudart().cudaHostRegister(tier.data_ptr(), tier.numel(), 0))
    tier.fill_(7)
    said["copied"] = int(tier.to(card, non_blocking=True).sum())
    torch.cuda.synchronize()
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "29511"
torch.distributed.init_process_group("nccl", rank=0, world_size=1)
one = torch.ones(4, device=card)
torch.distributed.all_reduce(one)
said["reduced"] = float(one.sum())
torch.distributed.destroy_process_group()
print(json.dumps(said))
"""

COMPILES = """
import json, os, torch, triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)

x = torch.arange(1000, device="cuda")
out = torch.empty_like(x)
add[(8,)](x, x, out, 1000, BLOCK=128)
compiled = torch.compile(lambda t: torch.sin(t) * 2 + 1)(torch.zeros(1024, device="cuda"))
cache = sum(len(files) for _, _, files in os.walk(os.environ["TRITON_CACHE_DIR"]))
print(json.dumps({"added": int(out.sum()), "compiled": float(compiled.sum()), "cached": cache}))
"""

REACHES = """
import json, os, socket, stat
def attempt(what):
    try:
        what()
        return "done"
    except OSError as error:
        return f"refused: {error.strerror}"
def call():
    socket.create_connection(("127.0.0.1", PORT), timeout=5).close()
def make_device():
    os.mknod("/tmp/card", stat.S_IFCHR | 0o666, os.makedev(195, 0))
    open("/tmp/card", "r+b").close()
def write_sys():
    open("/sys/kernel/uevent_helper", "w").close()
print(json.dumps({"interfaces": [name for _, name in socket.if_nameindex()], "call": attempt(call),
                  "device": attempt(make_device), "sys": attempt(write_sys)}))
"""

BLIND = """
import json, torch
print(json.dumps({"available": torch.cuda.is_available()}))
"""

HOLDS = """
import time, torch
held = torch.ones(2**29, device="cuda")
torch.cuda.synchronize()
print("there", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Inside:
    """Runs code in a sandbox as the farm does."""

    sandbox: Sandbox
    folder: Path
    before: tuple[str, ...]

    @contextlib.contextmanager
    def begun(self, card: Card, code: str) -> Iterator[Supervised]:
        script = self.folder / "tree" / "script.py"
        script.write_text(code)  # Triton reads the source of its kernels
        base = {**os.environ, "CUDA_VISIBLE_DEVICES": card.uuid}
        env, _ = child_environment({**isolation.VARIABLES, **QUIET_LINKS}, tree=self.folder / "tree", site=None,
                                   caches=self.folder / "caches", card=card, base=base)
        within = self.sandbox.for_tree(PYTHON, [self.folder / "tree"], [self.folder / "out"], env,
                                       card=card, cwd=self.folder / "out")
        with Supervised.start((str(PYTHON), str(script)), env=env, cwd="/", stdout_path=self.said,
                              stderr_path=self.folder / "err", within=(*self.before, *within)) as child:
            yield child

    @property
    def said(self) -> Path:
        return self.folder / "said"

    def told(self, card: Card, code: str) -> Mapping:
        with self.begun(card, code) as child:
            status = child.wait(LIMIT_S)
        errors = (self.folder / "err").read_text(errors="replace")[-3000:]
        assert status == 0, f"status {status}: {errors}"
        return json.loads(self.said.read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def card() -> Card:
    """Probed outside first, as the farm does: the first CUDA program of a machine makes /dev/nvidia-uvm, by a setuid helper."""
    found = cards.visible_gpu()
    env = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "HOME") if name in os.environ}
    probed = examine(found, Interpreter(PYTHON, {**env, **QUIET_LINKS, "CUDA_VISIBLE_DEVICES": found.uuid}))
    assert probed.passed, probed.detail
    return found


@pytest.fixture(params=["self", "nobody"])
def inside(request, sandbox) -> Iterator[Inside]:
    before: tuple[str, ...] = ()
    folder = Path(tempfile.mkdtemp(prefix="sandbox-on-gpu-", dir="/var/tmp"))  # pytest's own is closed to other users
    try:
        for name in ("tree", "out", "caches"):
            (folder / name).mkdir()
        for name in isolation.CACHES.values():
            (folder / "caches" / name).mkdir(parents=True, exist_ok=True)
        if request.param == "nobody":
            if os.getuid() != 0 or shutil.which("setpriv") is None:
                pytest.skip("only root can become somebody else, by setpriv")
            before = AS_NOBODY
            for path in (folder, *folder.rglob("*")):
                os.chown(path, NOBODY, NOBODY)
        yield Inside(sandbox, folder, before)
    finally:
        shutil.rmtree(folder)


def shown(capsys, *said: object) -> None:
    with capsys.disabled():
        print("\n ", *said)


def _minor(card: Card) -> int:
    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetMinorNumber(pynvml.nvmlDeviceGetHandleByUUID(card.uuid.encode()))
    finally:
        pynvml.nvmlShutdown()


def _all_cards() -> list[Card]:
    pynvml.nvmlInit()
    try:
        uuids = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return [cards.gpu(uuid if isinstance(uuid, str) else uuid.decode()) for uuid in uuids]


def test_the_health_probe_passes(card, inside, capsys):
    begun = time.monotonic()
    found = inside.told(card, SCRIPTS["cuda"].read_text())
    shown(capsys, found, f"{time.monotonic() - begun:.1f} s")
    assert set(found) == {"passed"}


def test_what_vllm_asks_of_a_card_works(card, inside, capsys):
    found = inside.told(card, COMPUTES)
    shown(capsys, found)
    assert found["uuid"].removeprefix("GPU-") == card.uuid.removeprefix("GPU-")
    assert (found["count"], found["sum"], found["reduced"]) == (1, (2**20 - 1) * 2**19, 4.0)
    assert (found["pinned"], found["registered"], found["copied"]) == (True, 0, 7 * 64 * 2**20)


def test_kernels_are_compiled_and_cached(card, inside, capsys):
    found = inside.told(card, COMPILES)
    shown(capsys, found)
    assert (found["added"], found["compiled"]) == (999 * 1000, 1024.0)
    assert found["cached"] > 0 and any((inside.folder / "caches" / "triton").rglob("*"))


def test_each_cards_device_file_alone_is_there(card, inside, capsys):
    there = sorted(str(p) for p in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", p.name))
    for one in _all_cards():
        found = inside.told(one, DEVICES)
        shown(capsys, f"of {there} card {one.index} has {found}")
        assert set(found) - {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} == {f"/dev/nvidia{_minor(one)}"}


def test_without_the_device_file_there_is_no_card(card, inside):
    """What CUDA_VISIBLE_DEVICES hides a patch could unhide; this it cannot."""
    code = f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = {card.uuid!r}\n" + BLIND
    assert inside.told(cards.cpu_slot(0, 1), code) == {"available": False}
    assert inside.told(card, BLIND) == {"available": True}  # so the above is not for want of a torch


def test_neither_network_nor_device_files_of_its_own_making(card, inside):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found = inside.told(card, REACHES.replace("PORT", str(listening.getsockname()[1])))
    assert found["interfaces"] == ["lo"] and found["call"] == "refused: Connection refused"
    assert found["device"].startswith("refused") and found["sys"].startswith("refused")


def test_its_processes_on_the_card_are_known_and_its_memory_comes_back(card, inside, capsys):
    idle = cards.reading(card)
    with inside.begun(card, HOLDS) as child:
        _wait(lambda: "there" in inside.said.read_text() or child.poll() is not None, "2 GiB on the card", LIMIT_S)
        assert child.poll() is None, (inside.folder / "err").read_text()
        held, own = cards.reading(card), child.processes()
        assert held.memory_used_bytes - idle.memory_used_bytes >= 2**31
        began = time.monotonic()
    _wait(lambda: cards.reading(card).memory_used_bytes - idle.memory_used_bytes < 2**28, "its memory back", 30.0)
    shown(capsys, f"{[str(c) for c in held.clients]}, ours {own}; back {time.monotonic() - began:.2f} s after the order to end")
    assert not [pid for pid in own if started(pid) is not None]
    assert own and {c.pid for c in held.clients} - {c.pid for c in idle.clients} <= set(own)


def _wait(condition: Callable[[], bool], what: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:.0f} s"
        time.sleep(0.05)
