"""What only a real GPU can show of farm.cards, farm.health and farm.keeper.  Takes a minute; run by hand:

    python -m pytest -m gpu tests/gpu/test_card_on_gpu.py -s

FARM_TORCH_PYTHON names an interpreter with a CUDA torch where this one has none.  The card must be idle.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from farm import cards, keeper
from farm.cardprobe import RealCard
from farm.errors import FarmError
from farm.evidence import Policy
from farm.health import Interpreter
from farm.keeper import Keeper
from farm.records import Reason
from farm.schemas import SCHEMAS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PYTHON = os.environ.get("FARM_TORCH_PYTHON", sys.executable)
TAKES = "import torch; kept = torch.ones(2**29, device='cuda'); torch.cuda.synchronize(); print('there', flush=True); input()"


@pytest.fixture(scope="module")
def card():
    return cards.visible_gpu()


@pytest.fixture
def keep(card, tmp_path):
    return Keeper(RealCard(card), tmp_path, Policy(busy_wait_s=0.0), "run-gpu")


@pytest.fixture
def interpreter(card):
    names = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return Interpreter(PYTHON, {**kept, "CUDA_VISIBLE_DEVICES": card.uuid})


def quiet(text):
    pass


@pytest.fixture
def stranger(tmp_path):
    """A process that is not below ours and has 2 GiB of the card, by its pid."""
    said, pipe = tmp_path / "said", tmp_path / "pipe"
    os.mkfifo(pipe)
    shell = subprocess.run(["sh", "-c", f'"$0" -c "$1" <>{pipe} >{said} 2>&1 & echo $!', PYTHON, TAKES],
                           capture_output=True, text=True, check=True)
    pid, deadline = int(shell.stdout), time.monotonic() + 180
    while "there" not in (said.read_text() if said.exists() else "") and time.monotonic() < deadline:
        time.sleep(0.2)
    assert "there" in said.read_text()
    yield pid
    if os.path.exists(f"/proc/{pid}"):
        os.kill(pid, signal.SIGKILL)


def test_the_facts(card, capsys):
    row, now = cards.conditions(card), cards.reading(card)
    with capsys.disabled():
        print(f"\n  {card}\n  {now}")
    assert set(row) <= set(SCHEMAS["boots"].names)
    assert now.driver == card.driver and 0 < now.memory_used_bytes < card.memory_bytes and now.power_limit_w > 0


def test_an_idle_card_lets_a_boot_begin_and_passes_its_probe(card, keep, interpreter, capsys):
    keep.gate(quiet)
    found = RealCard(card).examine(interpreter)
    with capsys.disabled():
        print(f"\n  {found}")
    assert found.passed, found.detail
    keep.wait_memory_back(keep.gate(quiet))  # and leaves nothing


def test_a_foreign_process_is_seen_named_and_left_alone(keep, stranger, capsys):
    with pytest.raises(FarmError) as caught:
        keep.gate(quiet)
    with capsys.disabled():
        print(f"\n  {caught.value}")
    assert caught.value.reason is Reason.CARD_BUSY and f"process {stranger}" in str(caught.value)
    assert os.path.exists(f"/proc/{stranger}")


def test_memory_of_a_process_that_is_killed_comes_back(card, keep, stranger, capsys):
    held = cards.reading(card).memory_used_bytes
    os.kill(stranger, signal.SIGKILL)
    killed = time.monotonic()
    keep.wait_memory_back(cards.Reading(memory_used_bytes=held - 2**31 + keeper.SLACK_BYTES))
    with capsys.disabled():
        print(f"\n  2 GiB are back {time.monotonic() - killed:.2f} s after kill -9")
