"""What to boot, in plain values: a tree and how it is served, by us or by a user's start script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm.bench import Card
from farm.bootcheck import ExpectedFacts
from farm.errors import FarmError
from farm.isolation import Sandbox
from farm.records import Reason


@dataclass(frozen=True)
class Launcher:
    """A start script on this machine, run as `bash SCRIPT ARGS…` in `directory`.

    It is given the port in the variable `port_env`; where they are named, the address in `host_env`, the
    model's path in `model_env`, and in `args_env`, behind what the profile says there, what an arm adds to
    `vllm serve`, with blanks between.
    """

    script: Path
    directory: Path
    args: tuple[str, ...] = ()
    port_env: str = "PORT"
    host_env: str | None = None
    model_env: str | None = None
    args_env: str | None = None

    @classmethod
    def find(cls, script: str, directories: Sequence[Path], **options: Any) -> Launcher:
        """A launcher whose script lies below the first of `directories` that has it.  Raises FarmError (bad-config)."""
        for directory in directories:
            if (directory / script).is_file():
                return cls((directory / script).absolute(), directory.absolute(), **options)
        raise FarmError(f"launcher script {script} is not on this machine (looked in {', '.join(map(str, directories))}); "
                        "correct launcher.script, or say where it is run: launcher.directory", reason=Reason.BAD_CONFIG)


def untold(args: Sequence[str], args_env: str | None) -> str | None:
    """Why an arm's arguments cannot reach a start script through the variable `args_env`; None: they can."""
    if not args:
        return None
    if args_env is None:
        return ("the arm has arguments for `vllm serve`, and the profile's launcher names no variable to take them; name "
                "the one that the script appends last: launcher.args_env: EXTRA_ARGS")
    if (blank := next((word for word in args if not word or any(c.isspace() for c in word)), None)) is not None:
        return (f"argument {blank!r} has blanks or is empty, and a shell splits the value of {args_env} at each blank; write "
                "it without (JSON needs none), or use a variable of the script's own")
    return None


@dataclass(frozen=True)
class ServerSpec:
    """What to boot.  `tree` holds the `vllm` package; `site`, where given, what else it needs.

    Without a launcher `model` is served; with one it may be None.  `args` are of `vllm serve`: later ones win, ours
    (socket, model name) come last; with a launcher they are what an arm adds.
    """

    python: Path
    tree: Path
    model: Path | None
    args: tuple[str, ...]
    env: Mapping[str, str]  # of profile and arm
    caches: Path  # of this tree alone: compile caches, home
    log: Path  # appended to
    card: Card
    site: Path | None = None
    compiled: Path | None = None  # caches of the unpatched tree, whose kernels a first boot may take (farm.kernels)
    launcher: Launcher | None = None
    expected: ExpectedFacts = ExpectedFacts()
    carried: Path | None = None  # the probe's directory, on its path (farm.probing.install)
    attest: Path | None = None  # where its processes say which vLLM they loaded; None: they are not asked
    probe: Path | None = None  # where the probe in the engine writes; None: booted without it
    sandbox: Sandbox | None = None  # what it runs in; None: as this user, with all that this user may do
    records: Path | None = None  # where its supervisor leaves word for a later farm (farm.sweep.records)
    stall_s: float = 240.0  # no new byte in the log for so long: stopped
    deadline_s: float = 900.0  # of the whole boot, canary included
    canary_s: float = 120.0
