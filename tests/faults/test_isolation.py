"""A patch under test that looks around: what it finds of the host, with and without a sandbox.

The patch is real code of a real tree: it runs where a server of that tree boots and where a test of the series runs.
It looks for everything that is planted here, tries to write and to call out, and reports what came of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import played
import pytest
from played import quiet

from farm import isolation, server, sweep
from farm.bench import Card, Prompt, Suite
from farm.childenv import child_environment
from farm.errors import InvalidMeasurement, ServerLost
from farm.isolation import Sandbox
from farm.lifeline import processes_of_run
from farm.records import Reason
from farm.serverspec import Launcher
from farm.supervisor import started
from farm.testrun import TestRunSpec, run_suite

pytestmark = pytest.mark.faults
SECRET = "s3cr3t"
TOKENS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "RAY_AUTH_TOKEN", "RAY_ADDRESS", "GITHUB_TOKEN",
          "SSH_AUTH_SOCK", "OPENAI_API_KEY")
PROMPT = Prompt(tuple(range(40, 70)), "sha")
CPU = Card("cpu-0", "CPU slot 0", "cpu", "h")

SPY = """
import glob, json, os, socket

def attempt(what, *args):
    try:
        return what(*args)
    except Exception as error:
        return f"refused: {type(error).__name__} {error}"

def read(path):
    with open(path, "rb") as file:
        return file.read().decode("utf-8", "replace")

def write(path):
    with open(path, "a") as file:
        file.write("spied")
    return "written"

def call(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.settimeout(2)
        made.connect(address)
    return "connected"

def look():
    home = os.environ["HOME"]
    below = [os.path.join(d, f) for d, _, files in os.walk(home) for f in files]
    report = {
        "environment": dict(os.environ), "home": home, "below_home": {p: attempt(read, p) for p in below},
        "expanded": os.path.expanduser("~"), "user": attempt(os.listdir, os.path.expanduser("~root")),
        "planted": {p: attempt(read, p) for p in PLANTED}, "written": {p: attempt(write, p) for p in WRITTEN},
        "environments": [attempt(read, p) for p in glob.glob("/proc/[0-9]*/environ")],
        "root": attempt(os.listdir, "/"), "etc": attempt(read, "/etc/shadow"),
        "loopback": attempt(call, socket.AF_INET, ("127.0.0.1", PORT)),
        "outside": attempt(call, socket.AF_INET, ("192.0.2.1", 80)),
        "abstract": attempt(call, socket.AF_UNIX, chr(0) + ABSTRACT),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
    }
    os.makedirs(home, exist_ok=True)
    with open(os.path.join(home, "report.json"), "w") as file:
        json.dump(report, file)

look()
"""


@dataclasses.dataclass(frozen=True)
class Host:
    """A host with something to lose."""

    root: Path
    planted: tuple[Path, ...]
    written: tuple[str, ...]
    spy: str

    def files(self) -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in (*self.planted, *self.root.glob("outside/**/*")) if p.is_file()}


@pytest.fixture
def host(tmp_path, monkeypatch) -> Iterator[Host]:
    home, results, state = tmp_path / "people" / "me", tmp_path / "results", tmp_path / "state"
    planted = (home / ".ssh/id_ed25519", home / ".cache/huggingface/token", home / ".aws/credentials", home / ".netrc",
               results / "table=cells/x.parquet", tmp_path / "outside/other-tree/vllm/__init__.py")
    for path in planted:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{SECRET}\n")
    state.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FARM_HOST_STATE", str(state))
    for name in TOKENS:
        monkeypatch.setenv(name, SECRET)
    written = (*map(str, planted), str(tmp_path / "outside/new"), str(home / "new"), str(tmp_path / "tree/vllm/new.py"),
               "/usr/lib/farm-spied", "/etc/farm-spied", f"/var/tmp/farm-spied-{os.getpid()}")
    abstract = f"farm-test-{os.getpid()}-{time.monotonic_ns()}"
    with _listening(socket.AF_INET, ("127.0.0.1", 0)) as port, _listening(socket.AF_UNIX, f"\0{abstract}"):
        said = {"PLANTED": [str(p) for p in planted], "WRITTEN": list(written), "PORT": port[1], "ABSTRACT": abstract}
        spy = "\n".join(f"{name} = {value!r}" for name, value in said.items()) + SPY
        yield Host(tmp_path, planted, written, spy)
    for path in written[-3:]:
        Path(path).unlink(missing_ok=True)  # where there was no sandbox, and we are root


@contextmanager
def _listening(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as made:
        made.bind(address)
        made.listen()
        yield made.getsockname()


def in_a_boot(host: Host, sandbox: Sandbox | None) -> dict:
    """What the patch reports that runs where its server boots."""
    tree = played.write_tree(host.root / "tree")
    main = tree / "vllm" / "entrypoints" / "cli" / "main.py"
    (main.parent / "spy.py").write_text(host.spy)
    main.write_text(main.read_text().replace("MODE = ", "import runpy; runpy.run_path(os.path.join(os.path.dirname("
                                             "__file__), 'spy.py'))\nMODE = ", 1))
    spec = played.spec_of(tree, host.root, f"run-{os.getpid()}-{time.monotonic_ns()}", "healthy")
    env = {name: value for name, value in spec.env.items() if name != "HF_TOKEN"}  # a profile may give one on purpose
    spec = dataclasses.replace(spec, sandbox=sandbox, records=sweep.records(host.root / "state"), env=env,
                               attest=host.root / "logs" / "a.attest")
    spec.attest.parent.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.probing, "check_attested", lambda *_: None)  # the played vLLM has no probe
        with server.boot(spec, quiet) as running:
            assert running.complete(PROMPT, max_tokens=8, deadline_s=30.0).text == "ab"
    assert processes_of_run(spec.env["FARM_RUN"]) == []
    return json.loads((spec.caches / "home" / "report.json").read_text())


def in_a_suite(host: Host, sandbox: Sandbox | None) -> dict:
    """What the patch reports that runs as a test of the series."""
    tree = host.root / "tree"
    (tree / "vllm").mkdir(parents=True)
    (tree / "vllm" / "__init__.py").write_text("N = 71\n")
    scratch = host.root / "s"
    scratch.mkdir()
    (scratch / "home").mkdir()
    env, _ = child_environment({}, tree=tree, site=None, caches=host.root / "caches", card=CPU)
    (host.root / "caches" / "home").mkdir(parents=True)
    test = f"def test_spy():\n    import vllm\n    exec({host.spy!r}, {{}})\n"
    spec = TestRunSpec(
        python=Path(sys.executable), tree_root=tree, suite=Suite("s", "series", workers=0), scratch=scratch,
        env=env, series_tests={"test_spy.py": test.encode()}, card=CPU, sandbox=sandbox)
    run = run_suite(spec, quiet)
    assert [(row.nodeid, row.outcome, row.message) for row in run.outcomes] == [("test_spy.py::test_spy", "passed", None)]
    return json.loads((host.root / "caches" / "home" / "report.json").read_text())


RUNS = pytest.mark.parametrize("run", [in_a_boot, in_a_suite], ids=["server", "test"])


@RUNS
def test_without_a_sandbox_no_secret_by_environment_and_home(host, run):
    report = run(host, None)
    assert not [name for name, value in report["environment"].items() if SECRET in value]
    assert not [name for name in report["environment"] if name.startswith("RAY_")]
    assert report["home"] == report["expanded"] == str(host.root / "caches" / "home")
    assert not [path for path, text in report["below_home"].items() if SECRET in text]
    # It runs as this user: without a sandbox nothing else is kept from it, and so what follows shows something.
    assert all(text == f"{SECRET}\n" for text in report["planted"].values())
    assert report["loopback"] == report["abstract"] == "connected"
    assert report["written"][host.written[0]] == "written"


@RUNS
def test_in_a_sandbox_neither_network_nor_files_nor_processes_of_the_host(host, sandbox, run):
    before = host.files()
    report = run(host, sandbox)
    assert SECRET not in json.dumps(report)
    assert report["home"] == str(host.root / "caches" / "home")
    assert {path: text.split(" ")[1] for path, text in report["planted"].items()} == dict.fromkeys(
        map(str, host.planted), "FileNotFoundError")
    assert not [path for path, text in report["written"].items() if text == "written" and not path.startswith("/var/tmp")]
    assert host.files() == before and not (host.root / "tree/vllm/new.py").exists()
    assert not any(Path(path).exists() for path in host.written[-3:])
    assert report["interfaces"] == ["lo"]
    assert all(report[way].startswith("refused") for way in ("loopback", "outside", "abstract", "etc"))
    assert len(report["environments"]) < 8  # its own processes alone
    needed = {path.parts[1] for path in isolation.interpreter(Path(sys.executable))}  # a checkout may lie anywhere
    hidden = {"home", "run", "srv", "mnt", "media", "boot", "work"} - needed
    assert not hidden & set(report["root"])


# --- what a sandbox must not break --------------------------------------------------------------


@pytest.fixture
def spec(tmp_path, sandbox):
    """A server in a sandbox; nothing of it may be left after the test."""
    run = f"run-{os.getpid()}-{time.monotonic_ns()}"
    tree = played.write_tree(tmp_path / "tree")

    def make(mode: str, **changes):
        return dataclasses.replace(played.spec_of(tree, tmp_path, run, mode), sandbox=sandbox, **changes)

    yield make
    assert processes_of_run(run) == []


@pytest.mark.parametrize(("whom", "reason"), [("api", Reason.SERVER_LOST), ("engine", Reason.ENGINE_DEAD),
                                              ("supervisor", Reason.SERVER_LOST), ("bwrap", Reason.SERVER_LOST)])
def test_processes_in_a_sandbox_are_known_and_ended_from_outside(spec, whom, reason):
    with server.boot(spec("engine"), quiet) as running:
        inside = running._child.processes()
        assert len(inside) == 2 and running.pid == inside[0]
        pid = {"api": inside[0], "engine": inside[1], "supervisor": running._child.supervisor_pid,
               "bwrap": running._child.pid}[whom]
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(ServerLost) as caught:
            running.complete(PROMPT, max_tokens=8, deadline_s=30.0)
        print(f"{whom} killed in a sandbox: {caught.value.reason.value} after {time.monotonic() - begun:.1f} s")
    assert caught.value.reason is reason
    assert [p for p in inside if started(p) is not None] == []


def test_a_server_in_a_sandbox_is_asked_to_end_before_it_is_killed(spec, tmp_path):
    made = spec("healthy")
    main = made.tree / "vllm/entrypoints/cli/main.py"
    main.write_text(main.read_text().replace("\nmain()\n", """
def leave(*_):
    say("asked to end")
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
main()
"""))
    with server.boot(made, quiet):
        pass
    assert "asked to end" in made.log.read_text()


def test_a_death_at_boot_in_a_sandbox_names_its_signal(spec):
    error = played.boot_fails(spec("killed"))
    assert error.reason is Reason.BOOT_DIED and "signal SIGKILL while it booted" in str(error)


def test_a_crash_of_a_test_in_a_sandbox_is_its_own(host, sandbox):
    (host.root / "tree/vllm").mkdir(parents=True)
    (host.root / "tree/vllm/__init__.py").touch()
    (host.root / "s").mkdir()
    env, _ = child_environment({}, tree=host.root / "tree", site=None, caches=host.root / "caches", card=CPU)
    test = b"import os, signal\nimport vllm\ndef test_a(): ...\ndef test_kill(): os.kill(os.getpid(), signal.SIGKILL)\n"
    run = run_suite(TestRunSpec(
        python=Path(sys.executable), tree_root=host.root / "tree", suite=Suite("s", "series", workers=0),
        scratch=host.root / "s", env=env, series_tests={"test_x.py": test}, card=CPU, sandbox=sandbox), quiet)
    assert [row.outcome for row in run.outcomes] == ["passed", "crashed"]
    assert run.note.startswith("pytest died of signal 9")


def test_a_start_script_cannot_serve_from_a_sandbox(spec, tmp_path):
    (tmp_path / "start.sh").write_text("exec vllm serve m --port $PORT\n")
    error = played.boot_fails(spec("healthy", launcher=Launcher.find("start.sh", [tmp_path])))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.BAD_CONFIG
    assert "start.sh serves on a port" in str(error) and "isolation: none" in str(error)


def test_requests_of_several_threads_are_served_from_a_sandbox(spec):
    """Requests of several threads at once, as the long-prefill job makes them."""
    with server.boot(spec("engine"), quiet) as running:
        texts: list[str] = []
        threads = [threading.Thread(target=lambda: texts.append(running.complete(PROMPT, max_tokens=8, deadline_s=30.0).text))
                   for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
    assert texts == ["ab"] * 3
