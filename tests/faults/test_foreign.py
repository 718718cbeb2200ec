"""What is somebody else's is named and left alone: a listener on the port, a file in /dev/shm, a folder, a process."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import played
import pytest
from played import boot_fails
from playedcard import FILE, PlayedWorker

from farm import ports, sweep
from farm.evidence import Policy, RunInfo
from farm.lifeline import processes_of_run
from farm.records import Reason, Verdict
from farm.serverspec import Launcher
from farm.supervisor import started
from farm.worker import Seat

pytestmark = pytest.mark.faults
LISTENER = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy)
print("up", flush=True)
server.serve_forever()
"""


def test_a_listener_on_the_port_is_named_and_left_alone(tmp_path, monkeypatch):
    run, held, strangers = f"run-{os.getpid()}-{time.monotonic_ns()}", ports.held, []

    @contextmanager
    def taken():
        with held() as port, (tmp_path / "asked").open("wb") as log:
            strangers.append(subprocess.Popen([sys.executable, "-c", LISTENER, str(port)], stderr=log, stdout=subprocess.PIPE))
            strangers[0].stdout.readline()
            yield port

    monkeypatch.setattr(ports, "held", taken)
    (tmp_path / "start.sh").write_text("sleep 60\n")
    spec = played.spec_of(played.write_tree(tmp_path / "tree"), tmp_path, run, "healthy")
    spec = dataclasses.replace(spec, launcher=Launcher.find("start.sh", [tmp_path]), args=())
    begun = time.monotonic()
    try:
        error = boot_fails(spec)
        print(f"foreign listener: {error.reason.value} after {time.monotonic() - begun:.1f} s: {error}")
        assert (error.verdict, error.reason) == (Verdict.ERROR, Reason.PORT_TAKEN)
        assert f"process {strangers[0].pid} (" in str(error)
        assert strangers[0].poll() is None and (tmp_path / "asked").read_text() == ""  # it logs each request
    finally:
        strangers[0].kill()
        strangers[0].communicate()
    assert processes_of_run(run) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_an_actor_that_starts_names_what_others_left_and_touches_nothing(tmp_path, monkeypatch):
    region = Path(f"/dev/shm/vllm_offload_farm-test-{os.getpid()}.mmap")
    folder = tmp_path / "t" / "farm-theirs"
    folder.mkdir(parents=True)
    os.chown(folder, 65534, 65534)
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    monkeypatch.setenv("FARM_HOST_STATE", str(tmp_path))
    monkeypatch.setenv(FILE, str(tmp_path))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"],
                             env={"FARM_RUN": "run-x", "FARM_CELL": "c", "FARM_LIFELINE": "0" * 32})
    try:
        region.write_bytes(b"\0" * 4096)
        os.chown(region, 65534, 65534)
        made = PlayedWorker(Seat("node", "cpu", 0, 1), RunInfo("run-1", None, None), str(tmp_path), Policy())
        told = str(made._swept)
        print(told)
        assert f"{region} (0 MiB) of user nobody is mapped by no process" in told
        assert f"{folder}, a folder of user nobody: left alone" in told
        assert region.exists() and folder.exists() and started(other.pid) is not None
        assert str(sweep.sweep(tmp_path, [folder.parent])).startswith(str(region))  # and so it stays
    finally:
        region.unlink(missing_ok=True)
        other.send_signal(signal.SIGKILL)
        other.wait()
