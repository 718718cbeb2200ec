"""Start scripts as users have them: a played vLLM behind each kind, and the real one once."""

import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import played
import psutil
import pytest
from played import boot_fails, quiet

from farm import endings, launch, lifeline, models, ports, server
from farm.bench import Card, Prompt
from farm.bootcheck import ExpectedFacts
from farm.errors import BootFailure, InvalidMeasurement, RefusedConfig, ServerLost
from farm.records import Reason
from farm.serverspec import Launcher, ServerSpec

PROMPT = Prompt(tuple(range(40, 70)), "sha")
SERVE = 'vllm serve "${MODEL:-/m/27b}" --host "${HOST:-127.0.0.1}" --port "$PORT" --max-model-len="${MAX_LEN:-5}" $EXTRA_ARGS'
PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def tree(tmp_path) -> Path:
    return played.write_tree(tmp_path / "tree")


@pytest.fixture
def spec(tree, tmp_path, monkeypatch):
    """What to boot by a script of these lines; nothing of it may be left after the test."""
    run = f"run-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setattr(endings, "LOST_WITHIN_S", 0.5)
    monkeypatch.setattr(server, "GRACE_S", 1.0)

    def make(script: str, mode: str = "healthy", env=None, args=(), **changes) -> ServerSpec:
        told = {name: changes.pop(name) for name in ("port_env", "host_env", "model_env", "args_env") if name in changes}
        folder = tmp_path / "club" / "single-user"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "start.sh").write_text(f"set -euo pipefail\n: ${{EXTRA_ARGS:=}}\n{script}\n")
        made = played.spec_of(tree, tmp_path, run, mode)
        return dataclasses.replace(
            made, model=changes.pop("model", None), args=args, env={**made.env, "MAX_LEN": "65536", **(env or {})},
            launcher=Launcher.find("single-user/start.sh", [tmp_path / "club"], **told), **changes)

    yield make
    assert lifeline.processes_of_run(run) == []


# --- a script that serves -------------------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        f"exec {SERVE}",
        SERVE,
        f"{SERVE} &\nwait",
        f"nohup {SERVE} &\nwait",
        f"setsid {SERVE} &\nwait",
        f"(setsid nohup {SERVE} &)\nwhile true; do sleep 0.1; done",
        f"cd /\n{SERVE} 2>&1 | tee /dev/null",
        f"exec python -m {SERVE.replace('vllm', 'vllm.entrypoints.cli.main', 1)}",
        f"exec python3 -m {SERVE.replace('vllm', 'vllm.entrypoints.cli.main', 1)}",
        f"trap '' TERM\n{SERVE}",
        f"unset PYTHONPATH\nexec {SERVE}",
        f"export PYTHONPATH=/opt/overlay:/opt/other\nexec {SERVE}",
        pytest.param(f"mkdir -p vllm; touch vllm/__init__.py  # in the working directory\nexec {SERVE}",
                     marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of 3.11")),
    ],
    ids=["exec", "child", "background", "nohup", "setsid", "orphan", "pipe", "python", "python3", "deaf", "no-path", "own-path",
         "shadow"],
)
def test_scripts_that_serve_the_tree(spec, script):
    with server.boot(spec(script, args_env="EXTRA_ARGS", args=("--seed=7",)), quiet) as running:
        facts = running.facts
        reply = running.complete(PROMPT, max_tokens=8, deadline_s=10.0)
        counters = running.counters()
        assert len(running._child.processes()) >= 1
    assert (facts.pool_tokens, facts.block_size, facts.gaps) == (72_247, 640, ())
    assert (reply.prompt_tokens, reply.text) == (30, "ab")
    assert counters["vllm:prompt_tokens_total"] == 3.0
    assert facts.argv[-6:] == ("--host", "127.0.0.1", "--port", facts.argv[-3], "--max-model-len=65536", "--seed=7")


def test_the_record_is_of_the_process_that_serves(spec, tree):
    script = f"export KNOB=long HF_TOKEN=theirs\nexec {SERVE} --api-key sk-1"
    with server.boot(spec(script, env={"KNOB": "fast"}), quiet) as running:
        facts = running.facts
    assert facts.argv[:5] == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/m/27b")
    assert facts.argv[-2:] == ("--api-key", "set")
    assert (facts.env["KNOB"], facts.env["HF_TOKEN"], facts.env["PYTHONPATH"]) == ("long", "set", str(tree))
    assert not {lifeline.MARK, "SHLVL", "_"} & set(facts.env)


def test_nothing_of_ours_reaches_a_script(spec, tmp_path, monkeypatch):
    for name in ("AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "GITHUB_TOKEN", "VLLM_LEFT_OVER", "PYTHONHOME"):
        monkeypatch.setenv(name, "ours")
    with server.boot(spec(f"env > {tmp_path}/env\nexec {SERVE}", env={"RAY_ADDRESS": "auto"}), quiet) as running:
        port = running.facts.env["PORT"]
    found = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    assert not [name for name, value in found.items() if name.startswith("RAY_") or value == "ours"]
    assert found["PORT"] == port
    assert found["PATH"].split(":")[0].endswith("/bin") and found["PATH"].split(":")[1:] == os.environ["PATH"].split(":")


def test_the_model_and_the_address_are_told_where_they_are_asked_for(spec, tmp_path):
    (tmp_path / "m").mkdir()
    told = spec(f"HOST=$ADDRESS\nexec {SERVE}", model=tmp_path / "m", model_env="MODEL", host_env="ADDRESS", port_env="PORT")
    with server.boot(told, quiet) as running:
        assert running.facts.argv[4:7] == (str(tmp_path / "m"), "--host", "127.0.0.1")


def test_requests_name_the_model_that_the_server_lists(spec):
    with server.boot(spec(f"exec {SERVE} --served-model-name qwen-27b"), quiet) as running:
        assert running.complete(PROMPT, max_tokens=8, deadline_s=10.0).completion_tokens == 8


def test_an_arms_arguments_come_behind_the_profiles_own(spec):
    made = spec(f"exec {SERVE}", env={"EXTRA_ARGS": "--seed=1 --x"}, args=("--seed=2", '--c={"a":1}'), args_env="EXTRA_ARGS")
    with server.boot(made, quiet) as running:
        assert running.facts.argv[-4:] == ("--seed=1", "--x", "--seed=2", '--c={"a":1}')


def test_two_boots_at_once_have_two_ports(spec, tmp_path):
    one = spec(f"exec {SERVE}")
    with server.boot(one, quiet) as first, \
            server.boot(dataclasses.replace(one, log=tmp_path / "other.log"), quiet) as second:
        assert first.facts.env["PORT"] != second.facts.env["PORT"]


def test_a_real_torch_is_the_pins(spec, tmp_path):
    site = played.write_torch(tmp_path / "site")
    with server.boot(spec(f"exec {SERVE}", site=site), quiet) as running:
        assert running.facts.env["PYTHONPATH"].endswith(f":{site}")


# --- a script that serves something else ------------------------------------------------------


@pytest.mark.parametrize(
    "script",
    [
        "source {other}/bin/activate\nexec " + SERVE,
        "exec {other}/bin/" + SERVE,
        "export PYTHONPATH={other}\nexec " + PYTHON + " -m " + SERVE.replace("vllm", "vllm.entrypoints.cli.main", 1),
    ],
    ids=["activates", "by-path", "resets-path"],
)
def test_a_script_that_serves_another_vllm_is_no_evidence(spec, tree, tmp_path, script):
    other = played.write_tree(tmp_path / "other")
    (other / "bin").mkdir()
    (other / "bin" / "activate").write_text(f"PATH={other}/bin:$PATH\n")
    (other / "bin" / "vllm").write_text(f'#!/bin/sh\nPYTHONPATH={other} exec {PYTHON} -m vllm.entrypoints.cli.main "$@"\n')
    (other / "bin" / "vllm").chmod(0o755)
    error = boot_fails(spec(script.replace("{other}", str(other))))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.WRONG_TREE
    assert f"does not run the tree {tree}: it maps {other}" in str(error)
    assert "let the start script call `vllm` or `python` as its PATH has them" in str(error)


def test_a_script_that_runs_the_tree_in_another_environment_is_no_evidence(spec, tmp_path):
    pins, theirs = played.write_torch(tmp_path / "pins"), played.write_torch(tmp_path / "theirs")
    script = f"PYTHONPATH=${{PYTHONPATH%%:*}}:{theirs} exec {PYTHON} -m {SERVE.replace('vllm', 'vllm.entrypoints.cli.main', 1)}"
    error = boot_fails(spec(script, site=pins))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.WRONG_TREE
    assert f"whose torch is in {pins}/torch: it maps {theirs}/torch" in str(error)


@pytest.mark.parametrize("change", ["export CUDA_VISIBLE_DEVICES=0", "export VLLM_CACHE_ROOT=/tmp/x", "unset TRITON_CACHE_DIR"])
def test_a_script_that_takes_another_card_or_shared_caches_is_no_evidence(spec, change):
    error = boot_fails(spec(f"{change}\nexec {SERVE}"))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.BAD_CONFIG
    assert change.replace("=", " ").split()[1] in str(error)


def test_a_script_that_serves_another_model_is_no_evidence(spec, tmp_path):
    for name in ("asked", "served"):
        (tmp_path / name).mkdir()
    error = boot_fails(spec(f"MODEL={tmp_path}/served\nexec {SERVE}", model=tmp_path / "asked"))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.FACTS_DIFFER
    assert f"model: expected {tmp_path}/asked, found that the start script serves {tmp_path}/served" in str(error)


@pytest.mark.parametrize(
    ("script", "says"),
    [(SERVE.replace("$EXTRA_ARGS", ""), "argument --kv-cache-memory-bytes 5: expected by the arm, found not in what runs"),
     (f"{SERVE} --kv-cache-memory-bytes=7", "argument --kv-cache-memory-bytes 5: expected by the arm")],
    ids=["forgotten", "taken-back"],
)
def test_an_argument_that_was_asked_for_and_ignored_is_no_evidence(spec, script, says):
    error = boot_fails(spec(f"exec {script}", args=("--kv-cache-memory-bytes=5",), args_env="EXTRA_ARGS"))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.FACTS_DIFFER
    assert says in str(error) and "look for EXTRA_ARGS in" in str(error)


def test_a_knob_that_has_not_become_what_it_should_is_no_evidence(spec):
    made = spec(f"unset MAX_LEN\nexec {SERVE}", expected=ExpectedFacts(args=("--max-model-len=65536",)))
    error = boot_fails(made)
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.FACTS_DIFFER
    assert "argument --max-model-len 65536: expected" in str(error) and "--max-model-len=5" in str(error)


def test_a_script_that_sends_the_log_elsewhere_is_no_evidence(spec):
    error = boot_fails(spec(f"echo starting\nexec {SERVE} > /dev/null 2>&1"))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.BAD_CONFIG
    assert "no line of vLLM's is in its log" in str(error)


# --- a port that is not as it should be -------------------------------------------------------


def test_a_server_that_others_can_reach_is_refused(spec):
    error = boot_fails(spec(f"HOST=0.0.0.0\nexec {SERVE}"))
    assert isinstance(error, InvalidMeasurement) and error.reason is Reason.BAD_CONFIG
    assert "listens on every address (0.0.0.0:" in str(error)


def test_a_stranger_on_the_port_is_named_never_asked_and_never_ended(spec, tmp_path, monkeypatch):
    """It answers like a healthy server, before the script's own has begun to listen."""
    stranger_log = tmp_path / "stranger.log"
    code = ("import http.server as h, sys\nclass H(h.BaseHTTPRequestHandler):\n def do_GET(self):\n  self.send_response(200)\n"
            "  self.end_headers()\nh.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()")
    strangers = []
    held = ports.held

    @contextmanager
    def held_and_lost():
        with held() as port, stranger_log.open("wb") as log:
            strangers.append(subprocess.Popen([sys.executable, "-c", code, str(port)], stderr=log))
            yield port

    monkeypatch.setattr(ports, "held", held_and_lost)
    try:
        error = boot_fails(spec("echo booting; sleep 30"))
        assert isinstance(error, BootFailure) and error.reason is Reason.PORT_TAKEN
        assert f"is taken by process {strangers[0].pid} ({sys.executable}" in str(error)
        assert "booting" in error.log_tail
        assert strangers[0].poll() is None
    finally:
        strangers[0].terminate()
        strangers[0].wait()
    assert stranger_log.read_text() == ""  # it logs each request


def test_a_script_that_ignores_its_port_is_told_where_it_listens(spec):
    error = boot_fails(spec(f"PORT=0\nexec {SERVE}", deadline_s=4.0))
    assert isinstance(error, BootFailure) and error.reason is Reason.BOOT_STALLED
    assert "was not healthy within 4 s" in str(error)
    assert "it does not listen on port" in str(error) and ", but on 127.0.0.1:" in str(error)


# --- boots that fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "mode", "reason", "says"),
    [
        (f"exec {SERVE}", "never-listens", Reason.BOOT_STALLED, r"within 3 s; .*it does not listen on port \d+"),
        (f"exec {SERVE}", "stalls", Reason.BOOT_STALLED, "wrote nothing to its log for 2 s"),
        (f"exec {SERVE}", "dies", Reason.BOOT_DIED, "exit status 1 while it booted: ImportError: cannot import name 'x'"),
        (f"{SERVE} &\nwait $!", "killed", Reason.BOOT_DIED, "exit status 137 while it booted"),
        (f"exec {SERVE}", "no-models", Reason.CANARY_FAILED, "/v1/models names no model"),
        (f"{SERVE} &", "healthy", Reason.BOOT_DIED, "exit status 0 while it booted: .*must `wait` for it"),
        ("source venv/bin/activate", "healthy", Reason.BOOT_DIED, "exit status 1 .*venv/bin/activate: No such file"),
    ],
    ids=["never-listens", "stalls", "dies", "killed", "no-models", "leaves", "no-venv"],
)
def test_a_script_whose_boot_fails(spec, script, mode, reason, says):
    limits = {"never-listens": {"deadline_s": 3.0}, "stalls": {"stall_s": 2.0}}
    error = boot_fails(spec(script, mode, **limits.get(mode, {})))
    assert isinstance(error, BootFailure) and not isinstance(error, RefusedConfig)
    assert error.reason is reason
    with pytest.raises(BootFailure, match=says):
        raise error


def test_a_refusal_is_told_in_vllms_words(spec):
    error = boot_fails(spec(SERVE, "refuses"))
    assert isinstance(error, RefusedConfig)
    assert str(error).startswith("To serve at least one request with the model's max seq len (65536)")


def test_a_script_that_starts_its_server_anew_has_lost_it(spec):
    with server.boot(spec(f"while true; do {SERVE} || true; done", "dies-in-request"), quiet) as running, \
            pytest.raises(ServerLost, match="which served, is gone"):
        running.complete(PROMPT, max_tokens=8, deadline_s=10.0)


@pytest.mark.parametrize("how", ["asked", "killed"])
def test_teardown_ends_the_whole_tree(spec, how, monkeypatch):
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    script = f"{SERVE} &\n(trap '' TERM; setsid sleep 99) &\nwait"
    with server.boot(spec(script, "healthy" if how == "asked" else "deaf-engine"), quiet) as running:
        pids = running._child.processes()
        assert len(pids) >= 3
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_the_kill_of_the_script_is_the_end_of_the_server(spec):
    with pytest.raises(ServerLost, match="ended with signal SIGKILL"), \
            server.boot(spec(f"{SERVE} &\nwait"), quiet) as running:
        os.kill(running.pid, signal.SIGKILL)
        for _ in range(2):  # what still ends may answer once more
            running.complete(PROMPT, max_tokens=8, deadline_s=10.0)


def test_a_script_that_is_gone_is_an_error_before_the_boot(spec):
    made = spec("true")
    made.launcher.script.unlink()
    error = boot_fails(made)
    assert error.reason is Reason.BAD_CONFIG and str(made.launcher.script) in str(error)
    assert not made.log.exists()


@pytest.mark.parametrize(("args", "args_env", "says"), [(("--x",), None, "launcher.args_env"),
                                                        (("--x", "a b"), "EXTRA_ARGS", "'a b' has blanks")])
def test_arguments_that_cannot_reach_the_script_are_an_error_before_the_boot(spec, args, args_env, says):
    error = boot_fails(spec("true", args=args, args_env=args_env))
    assert error.reason is Reason.BAD_CONFIG and says in str(error)


def test_a_server_of_ours_needs_a_model(spec):
    assert boot_fails(dataclasses.replace(spec("true"), launcher=None)).reason is Reason.BAD_CONFIG


# --- who serves -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listener", "serving"),
    [(40, 20), (20, 20), (30, 20), (50, 60), (10, 60), (99, 60)],
    ids=["titled-grandchild", "itself", "titled-child", "proxy-beside", "shell-above", "unknown"],
)
def test_the_process_with_a_servers_command_line(monkeypatch, listener, serving):
    serve = ("/v/bin/vllm", "serve", "/m")
    commands = {10: ("bash", "start.sh"), 15: ("timeout", "9h", *serve), 20: ("python", *serve), 30: ("VLLM::APIServer_0",),
                40: ("VLLM::EngineCore",), 50: ("nginx",), 60: ("python", *serve)}
    monkeypatch.setattr(launch.attest, "parents", lambda pids: {10: 1, 15: 10, 20: 15, 30: 20, 40: 30, 50: 10, 60: 10})
    monkeypatch.setattr(launch.attest, "command", lambda pid: commands.get(pid, ()))
    assert launch._server_of(listener, list(commands)) == serving


# --- the real one ---------------------------------------------------------------------------


@pytest.mark.vllm
def test_a_real_server_behind_a_start_script(tmp_path, real_pin):
    import yaml

    pin = real_pin("0.29.0-cpu")
    profile = yaml.safe_load((Path(server.__file__).parent.parent / "configs/profiles/tiny-cpu.yaml").read_text())
    fixed = [word for word in profile["args"] if not word.startswith("--max-model-len")]
    (tmp_path / "start.sh").write_text("#!/usr/bin/env bash\nset -euo pipefail\n[ \"$PREFIX_CACHE\" = 1 ]\n"
                                       f"exec vllm serve \"$MODEL\" {shlex.join(fixed)} --max-model-len \"$MAX_LEN\" "
                                       "--host 127.0.0.1 --port \"$PORT\" $EXTRA_ARGS\n")
    spec = ServerSpec(
        python=pin.python, tree=pin.patched.root, model=models.write_model("qwen3next-cpu", tmp_path / "m").path,
        args=("--seed=7",), env={**{k: str(v) for k, v in profile["env"].items()}, "MAX_LEN": "32768", "PREFIX_CACHE": "1"},
        caches=tmp_path / "caches", log=tmp_path / "boot.log",
        card=Card("cpu-0", "CPU slot 0", "cpu", "h", cores=(min(os.sched_getaffinity(0)),)),
        launcher=Launcher.find("start.sh", [tmp_path], model_env="MODEL", args_env="EXTRA_ARGS"),
        expected=ExpectedFacts(block_size=640, args=("--max-model-len=32768", "--enable-prefix-caching")))
    with server.boot(spec, quiet) as running:
        facts = running.facts
        reply = running.complete(Prompt(tuple(32 + i % 90 for i in range(1920)), "sha"), max_tokens=1, deadline_s=120.0)
        counters = running.counters()
        pids = running._child.processes()
    assert (facts.pool_pinned, facts.block_size, facts.gaps, facts.caches) == (True, 640, (), "cold")
    assert facts.argv[:5] == (str(pin.python), "-m", "vllm.entrypoints.cli.main", "serve", str(spec.model))
    assert facts.argv[-1] == "--seed=7" and "--uds" not in facts.argv
    assert facts.env["PYTHONPATH"].split(":")[0] == str(pin.patched.root)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (1920, 1, 0)
    assert counters["vllm:prompt_tokens_total"] == 1920 + len(server.CANARY)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
