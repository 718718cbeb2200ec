"""How a server is started and where it then listens: by us on a Unix socket, or by a user's start script on a port.

A start script gets what it needs by environment: its own knobs, the port, and on request the address, the model's
path and an arm's arguments.  `python`, `python3` and `vllm` are found first on its PATH and run the pin's interpreter
with the tree first on its path; whatever it calls instead, the process that serves is looked at, not what was ordered.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from farm import attest, cmdline, isolation, ports, probing
from farm.childenv import child_environment, redact_argv
from farm.client import Address
from farm.errors import FarmError, InvalidMeasurement, RequestFailed, ServerLost
from farm.lifeline import MARK
from farm.records import Reason
from farm.serverspec import Launcher, ServerSpec, untold

MODEL_NAME = "farm"  # --served-model-name of servers that we start
SOCKET_PATH_LIMIT = 107  # bytes, sun_path of unix(7) less its end
FIND_S = 60.0  # an interpreter's answer to where a package is; it takes 0.05 s on a warm disk
_SHELLS_OWN = ("_", "SHLVL", "PWD", "OLDPWD", "SPT_NOENV", MARK)  # of no meaning to vLLM, or another in each boot
_FIND = "import importlib.util as u; s = u.find_spec('torch'); print((s and s.submodule_search_locations or [''])[0])"

Processes = Callable[[], Sequence[int]]  # ids of the started process and all below it now, parents before children


@dataclass(frozen=True)
class Served:
    """The process that serves, its command line, and its environment; neither is redacted."""

    pid: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


class Start(Protocol):
    """One way to start a server: this command, with exactly this environment, in this directory."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path
    within: tuple[str, ...]  # the command of the sandbox that `argv` runs in; empty: in none
    trusted: bool  # whether it may gain privileges (sudo), as a user's own script may, and a patch may not
    advice: str  # what to do where another tree runs

    def listening(self, processes: Processes) -> Address | None:
        """Where it listens, None: not yet.  Raises BootFailure for a stranger there, InvalidMeasurement."""

    def model(self, http: httpx.Client) -> str:
        """The model's name in requests.  Raises RequestFailed, InvalidMeasurement for another model."""

    def proved(self, pid: int, processes: Processes) -> Served:
        """Who serves, once it does; `pid` is of the command that we started.

        Raises InvalidMeasurement where that is not what was asked for, ServerLost where nobody serves any more.
        """

    def hint(self, status: int | None, processes: Processes) -> str:
        """What may be the matter with a boot that ended with `status`, or hangs (None); empty: nothing to add."""


@contextmanager
def prepared(spec: ServerSpec, folder: Path) -> Iterator[Start]:
    """The way to start this server, with what it needs in the private `folder`; a port is held until the end.

    Raises InvalidMeasurement (bad-config) for a start script that is to run in a sandbox.
    """
    if spec.launcher is None:
        yield OnSocket(spec, folder)
        return
    if spec.sandbox is not None:
        raise InvalidMeasurement(
            f"{spec.launcher.script} serves on a port, and isolation: bwrap leaves its server no network to be reached by; use "
            "a profile without a launcher, whose server listens on a Unix socket, or isolation: none", reason=Reason.BAD_CONFIG)
    with ports.held() as port:
        yield OnPort(spec, spec.launcher, port, folder)


class OnSocket:
    """`vllm serve` of the tree on a Unix socket: nothing to collide on, nothing to reach from outside."""

    trusted = False
    advice = "look for another vllm on its PYTHONPATH or in its site-packages"

    def __init__(self, spec: ServerSpec, folder: Path) -> None:
        path = folder / "s"
        if spec.model is None:
            raise FarmError("a profile without a launcher needs a model to serve", reason=Reason.BAD_CONFIG)
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            raise FarmError(f"{path} is too long for a Unix socket ({SOCKET_PATH_LIMIT} bytes); set TMPDIR to a shorter folder")
        self.argv = (str(spec.python), "-m", "vllm.entrypoints.cli.main", "serve", str(spec.model), *spec.args,
                     "--served-model-name", MODEL_NAME, "--uds", str(path))
        self.environment: Mapping[str, str] = child_environment(
            {**spec.env, **_probe(spec), **({} if spec.sandbox is None else isolation.VARIABLES)}, tree=spec.tree,
            site=spec.site, caches=spec.caches, card=spec.card, carried=spec.carried)[0]
        self.cwd = folder / "cwd"  # first on the path of `python -m`: an empty one of ours
        self.cwd.mkdir()
        self.within = () if spec.sandbox is None else _sandboxed(spec, spec.sandbox, folder, self.cwd, self.environment)
        self._address = Address(socket=path)

    def listening(self, processes: Processes) -> Address | None:
        return self._address

    def model(self, http: httpx.Client) -> str:
        return MODEL_NAME

    def proved(self, pid: int, processes: Processes) -> Served:
        return Served(pid, self.argv, self.environment)

    def hint(self, status: int | None, processes: Processes) -> str:
        return ""


class OnPort:
    """A start script that serves on a loopback port of our choice."""

    within = ()
    trusted = True
    advice = ("let the start script call `vllm` or `python` as its PATH has them when it begins: without activating an "
              "environment, without naming one by its path, and with nothing put before the tree on PYTHONPATH")

    def __init__(self, spec: ServerSpec, launcher: Launcher, port: int, folder: Path) -> None:
        if not launcher.script.is_file():
            raise FarmError(f"launcher script {launcher.script} is not on this machine", reason=Reason.BAD_CONFIG)
        self.port = port
        self.argv = ("bash", str(launcher.script), *launcher.args)
        self.cwd = launcher.directory
        commands = folder / "bin"
        self.environment: Mapping[str, str] = child_environment(
            {**spec.env, **_told(spec, launcher, self.port), **_probe(spec)}, tree=spec.tree, site=spec.site,
            caches=spec.caches, card=spec.card, commands=commands, carried=spec.carried)[0]
        _write_commands(commands, spec.python, self.environment["PYTHONPATH"])
        self._spec, self._launcher = spec, launcher

    def listening(self, processes: Processes) -> Address | None:
        found = ports.reached(self.port, processes)
        return None if found is None else Address(f"http://{found}")

    def model(self, http: httpx.Client) -> str:
        """The first that the server lists; its directory, if it is one, must be that of the profile's model."""
        try:
            answer = http.get("/v1/models")
            answer.raise_for_status()
            first = answer.json()["data"][0]
            name, root = str(first["id"]), first.get("root")
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestFailed(f"/v1/models names no model: {type(error).__name__} {error}") from error
        asked, variable = self._spec.model, self._launcher.model_env
        if asked is not None and root and os.path.isdir(root) and os.path.realpath(root) != os.path.realpath(asked):
            to_do = f"let it serve what {variable} names" if variable else "correct model.path, or name launcher.model_env"
            raise InvalidMeasurement(f"model: expected {asked}, found that the start script serves {root}; {to_do}",
                                     reason=Reason.FACTS_DIFFER)
        return name

    def proved(self, pid: int, processes: Processes) -> Served:
        listener = ports.reached(self.port, processes)
        if listener is None or listener.pid is None:
            raise ServerLost(f"nobody listens on port {self.port} any more, where the server had answered")
        serving = _server_of(listener.pid, processes())
        argv, environment = attest.command(serving), attest.environment(serving)
        attest.attest_ties(environment, self.environment)
        torch = _torch(self._spec.python, self.environment)
        if torch is not None:
            attest.attest_torch(torch, processes(), self.advice)
        if missing := cmdline.ignored(self._spec.args, argv):
            raise InvalidMeasurement(
                f"argument {missing[0]}: expected by the arm, found not in what runs ({shlex.join(redact_argv(argv))}); look "
                f"for {self._launcher.args_env} in {self._launcher.script}: it belongs last on the line of `vllm serve`",
                reason=Reason.FACTS_DIFFER)
        return Served(serving, argv, {k: v for k, v in environment.items() if k not in _SHELLS_OWN})

    def hint(self, status: int | None, processes: Processes) -> str:
        if status is not None:
            return "; a start script that leaves its server in the background must `wait` for it" if status == 0 else ""
        own = set(processes())
        found = [listener for listener in ports.listeners() if listener.pid in own]
        if any(listener.port == self.port for listener in found):
            return ""
        elsewhere = f", but on {', '.join(sorted(map(str, found)))}" if found else ""
        return f"; it does not listen on port {self.port}, which it was given in {self._launcher.port_env}{elsewhere}"


def _sandboxed(spec: ServerSpec, sandbox: isolation.Sandbox, folder: Path, cwd: Path,
               environment: Mapping[str, str]) -> tuple[str, ...]:
    """What a server sees: its interpreter, tree and model, whatever its profile names; it writes to its caches and `folder`."""
    told = [path for path in (spec.attest, spec.probe) if path is not None]
    for path in told:
        path.touch()  # shown alone: beside it lie logs of other boots
    return sandbox.for_tree(spec.python, (spec.tree, spec.site, spec.model, spec.carried), (spec.caches, folder, *told),
                            environment, card=spec.card, cwd=cwd, words=spec.args)


def _probe(spec: ServerSpec) -> dict[str, str]:
    return probing.variables(attest=spec.attest, probe=spec.probe)


def _told(spec: ServerSpec, launcher: Launcher, port: int) -> dict[str, str]:
    """The variables that the script is told things by.  Raises FarmError (bad-config)."""
    if problem := untold(spec.args, launcher.args_env):
        raise FarmError(problem, reason=Reason.BAD_CONFIG)
    told = {launcher.port_env: str(port)}
    if launcher.host_env is not None:
        told[launcher.host_env] = ports.LOOPBACK
    if launcher.model_env is not None and spec.model is not None:
        told[launcher.model_env] = str(spec.model)
    if launcher.args_env is not None and spec.args:
        told[launcher.args_env] = " ".join(filter(None, (spec.env.get(launcher.args_env), *spec.args)))
    return told


def _write_commands(folder: Path, python: Path, path: str) -> None:
    """Write `python`, `python3` and `vllm` that run this interpreter with `path` first on PYTHONPATH.

    Links would not do: an interpreter looks for its environment beside the name by which it was called.
    """
    first, python_word = shlex.quote(path), shlex.quote(str(python))
    before = (f'#!/bin/sh\ncase "${{PYTHONPATH-}}:" in {first}:*) ;; *) PYTHONPATH={first}"${{PYTHONPATH:+:$PYTHONPATH}}" ;; '
              "esac\nexport PYTHONPATH\n")
    # PYTHONSAFEPATH (from 3.11): with -m, the script's working directory would come before the tree.
    lines = dict.fromkeys(("python", "python3"), f'exec {python_word} "$@"\n')
    lines["vllm"] = f'PYTHONSAFEPATH=1 exec {python_word} -m vllm.entrypoints.cli.main "$@"\n'
    folder.mkdir()
    for name, line in lines.items():
        (folder / name).write_text(before + line, encoding="utf-8")
        (folder / name).chmod(0o755)


def _server_of(listener: int, processes: Sequence[int]) -> int:
    """The process with a server's command line: the one that listens, or whoever started it, or else the innermost of ours.

    `processes` has parents before their children.  vLLM gives its further processes titles of their own in place of a
    command line; what wraps a server (`timeout 9h vllm serve …`) has one that looks like the server's.
    """
    parents = attest.parents(processes)
    line = [listener]
    while (parent := parents.get(line[-1])) in parents:
        line.append(parent)
    servers = (pid for pid in (*line, *reversed(processes)) if cmdline.is_server(attest.command(pid)))
    return next(servers, listener)


def _torch(python: Path, environment: Mapping[str, str]) -> Path | None:
    """Where the pin's interpreter has torch; None: it has none.  Raises FarmError where it does not run."""
    try:
        done = subprocess.run([str(python), "-c", _FIND], env=dict(environment), cwd="/", capture_output=True, text=True,
                              timeout=FIND_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise FarmError(f"{python} cannot be asked for its torch: {error}") from error
    found = done.stdout.strip()
    return Path(found) if found else None
