"""A tree whose vllm is played by data/fake-vllm, for tests that boot servers."""

import _ctypes
import shutil
import sys
from pathlib import Path

import pytest

from farm import server
from farm.bench import Card
from farm.errors import FarmError
from farm.serverspec import ServerSpec

DATA = Path(__file__).parent / "data"


def write_tree(root: Path) -> Path:
    """`root` with a vllm package that has one compiled extension."""
    cli = root / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    shutil.copy(DATA / "fake-vllm" / "main.py", cli)
    shutil.copy(DATA / "boot-logs" / "h200-0.29.0-refused-kv.log", cli / "refusal.log")
    shutil.copy(_ctypes.__file__, root / "vllm" / "_C.abi3.so")
    return root


def write_torch(site: Path) -> Path:
    """`site` with a torch package of one library, which the played vllm loads."""
    library = site / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    (site / "torch" / "__init__.py").touch()
    shutil.copy(_ctypes.__file__, library)
    return site


def spec_of(tree: Path, folder: Path, run: str, mode: str) -> ServerSpec:
    """What to boot, in a mode of the played vllm; its processes carry the mark of `run`."""
    return ServerSpec(
        python=Path(sys.executable), tree=tree, model=folder / "model", args=("--max-model-len=49152",),
        env={"FAKE": mode, "FARM_RUN": run, "HF_TOKEN": "hf_x"}, caches=folder / "caches", log=folder / "boot.log",
        card=Card("cpu-0", "CPU slot 0", "cpu", "h"), stall_s=20.0, deadline_s=30.0, canary_s=10.0)


def quiet(_text: str) -> None:
    pass


def boot_fails(spec: ServerSpec) -> FarmError:
    with pytest.raises(FarmError) as caught, server.boot(spec, quiet):
        pytest.fail("it counted as healthy")
    return caught.value
