"""Profiles as files say them: `configs/profiles/NAME.yaml`.

With serve arguments of our own:

    model: {tiny: qwen3_5-gpu}
    args: [--max-model-len=65536, …]

or with a start script as users have them, for `SPEC=mtp CTX=long … bash single-user/start_qwen.sh`:

    model: {vocab_size: 248320}        # the script knows its model; prompts need the vocabulary (or say path: DIR)
    launcher:
      script: single-user/start_qwen.sh
      directory: ${CLUB}               # where it is run; unless told, the working directory or this profile's project
      env: {SPEC: mtp, CTX: long, PREFIX_CACHE: 1, MAX_LEN: 65536}
      port_env: PORT                   # gets the port of 127.0.0.1 that it must serve on
      host_env: HOST                   # gets 127.0.0.1; for scripts that listen on every address unless told
      args_env: EXTRA_ARGS             # gets what arms add to `vllm serve`; the script appends it last
    expect:
      args: [--max-model-len=65536]    # what the knobs must have become, in the command line that really runs
      block_size: 832

`drafter: {tiny: dflash2-drafter}` (or `{path: DIR}`) names a speculative model; its folder on the card's machine
stands for `${DRAFTER}`.  Any other `${NAME}` is the variable NAME of the driver's environment.  The script gets an
environment of its own (farm.childenv) with a HOME that is the tree's: name what lies in yours as ${HOME}/…
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from farm import models, yamlfile
from farm.bench import Needs
from farm.bootcheck import ExpectedFacts
from farm.errors import FarmError
from farm.pinfile import PROJECT
from farm.records import Reason
from farm.serverspec import Launcher
from farm.yamlfile import Frozen, YamlFile

_DRAFTER = "${DRAFTER}"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _plain_words(args: Any) -> Any:
    """YAML reads `7` as a number; arguments are words."""
    return [str(a) for a in args] if isinstance(args, list) else args


def _environment_words(env: Any) -> Any:
    """YAML reads `1` and `true` as numbers and booleans; an environment holds words."""
    if not isinstance(env, dict):
        return env
    if odd := next((k for k, v in env.items() if isinstance(v, (list, dict))), None):
        raise ValueError(f"environment variable {odd!r} has a list or mapping for a value; write one word")
    words = {str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in env.items() if v is not None}
    for name, value in words.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"environment variable {name!r}: a name is not empty and has no `=`, and neither holds a NUL")
    return words


Words = Annotated[tuple[str, ...], BeforeValidator(_plain_words)]
Environment = Annotated[Mapping[str, str], BeforeValidator(_environment_words)]


class NeedsConfig(Frozen):
    """What a profile needs of a card."""

    cuda: bool = False
    min_capability: tuple[int, int] | None = None
    min_memory_gib: float | None = Field(default=None, gt=0)

    def needs(self) -> Needs:
        memory = None if self.min_memory_gib is None else int(self.min_memory_gib * 2**30)
        return Needs(cuda=self.cuda, min_capability=self.min_capability, min_memory_bytes=memory)


class ModelConfig(Frozen):
    """Which model a profile serves: a tiny stand-in (farm.models) or a path on the card's machine.

    With a launcher that knows its model, `vocab_size` alone is enough.
    """

    tiny: models.Kind | None = None
    path: str | None = None
    vocab_size: int | None = Field(default=None, gt=0)  # of a model by path, when its config.json does not say

    @model_validator(mode="after")
    def _not_both(self) -> ModelConfig:
        if self.path is not None and self.tiny is not None:
            raise ValueError("give exactly one of tiny and path")
        return self


class DrafterConfig(Frozen):
    """A speculative model, as `model` names its target."""

    tiny: models.Kind | None = None
    path: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> DrafterConfig:
        if (self.path is None) == (self.tiny is None):
            raise ValueError("drafter: give exactly one of tiny and path")
        return self


class LauncherConfig(Frozen):
    """A start script and what it is told; see farm.serverspec.Launcher."""

    script: str = Field(min_length=1)
    directory: str | None = None
    env: Environment = Field(default_factory=dict)
    args: Words = ()  # of the script
    port_env: _Variable = "PORT"
    host_env: _Variable | None = None
    model_env: _Variable | None = None
    args_env: _Variable | None = None
    sha256: str | None = None  # of the script where the profile was read; what runs must be the same

    @field_validator("env", mode="before")
    @classmethod
    def _no_booleans(cls, env: Any) -> Any:
        """`SPEC: off` would come out as SPEC=false, which a script takes for something else or for nothing."""
        if isinstance(env, dict) and (knob := next((k for k, v in env.items() if isinstance(v, bool)), None)) is not None:
            raise ValueError(f"launcher.env: YAML reads the value of {knob!r} as true or false; put the word in quotes: 'off'")
        return env

    def found(self) -> Launcher:
        """The script where this machine has it: relative to the working directory, or else to this project.

        Raises FarmError (bad-config).
        """
        bases = dict.fromkeys(base / (self.directory or "") for base in (Path.cwd(), PROJECT))
        launcher = Launcher.find(self.script, list(bases), args=self.args, port_env=self.port_env, host_env=self.host_env,
                                 model_env=self.model_env, args_env=self.args_env)
        if self.sha256 is not None and (there := script_sha256(launcher.script)) != self.sha256:
            raise FarmError(f"the start script {launcher.script} is not the one that the run began with (sha256 {there[:16]}, "
                            f"it was {self.sha256[:16]}): bring both machines to one state, or start a new run",
                            reason=Reason.BAD_CONFIG)
        return launcher


def script_sha256(script: Path) -> str:
    """Of a start script's own bytes; what it sources is not in it."""
    return hashlib.sha256(script.read_bytes()).hexdigest()


class ExpectConfig(Frozen):
    """What every boot of a profile must say of itself; see farm.bootcheck.

    `predicted` is the block size that the model's config and the serve arguments lead to (farm.geometry).
    """

    block_size: Annotated[int, Field(gt=0)] | Literal["predicted"] | None = None
    pool_tokens: int | None = Field(default=None, gt=0)
    backend: str | None = None
    connector: str | None = None
    args: Words = ()

    def facts(self, arm_args: Sequence[str], predicted: int | None = None) -> ExpectedFacts:
        """Exact values of a boot with these further arguments, which win over those that are expected of every boot.

        `predicted` (tokens) stands for that word; None: not judged.
        """
        block_size = predicted if self.block_size == "predicted" else self.block_size
        return ExpectedFacts(block_size, self.pool_tokens, self.backend, self.connector, (*self.args, *arm_args))


class ProfileConfig(Frozen):
    """How vLLM is served.  Later arguments win over earlier ones."""

    model: ModelConfig = ModelConfig()
    drafter: DrafterConfig | None = None
    args: Words = ()
    launcher: LauncherConfig | None = None
    env: Environment = Field(default_factory=dict)
    expect: ExpectConfig = ExpectConfig()
    needs: NeedsConfig = NeedsConfig()
    gauge: str = "vllm:kv_cache_usage_perc"
    stall_s: float = Field(default=240, gt=0)  # a boot with no new log line for so long is stopped
    boot_deadline_s: float = Field(default=900, gt=0)

    @model_validator(mode="after")
    def _one_way_to_serve(self) -> ProfileConfig:
        model, launcher = self.model, self.launcher
        if launcher is None:
            if model.tiny is None and model.path is None:
                raise ValueError("model: give exactly one of tiny and path (or a launcher that knows its model)")
            return self
        if self.args:
            raise ValueError("give args or launcher, not both: what the script's server must say goes under expect.args, what "
                             "is appended to it into launcher.env")
        if model.tiny is None and model.path is None and model.vocab_size is None:
            raise ValueError("prompts are made of token ids: give model.vocab_size, or model.path, of what the launcher serves")
        if model.tiny is not None and launcher.model_env is None:
            raise ValueError("the farm writes model.tiny itself: name the variable in which the script takes its path, "
                             "launcher.model_env")
        return self

    def drafting_with(self, drafter: Path) -> ProfileConfig:
        """The profile where the drafter lies in this folder."""
        return ProfileConfig.model_validate(
            _reworded(self.model_dump(), lambda word, _: word.replace(_DRAFTER, str(drafter)), ()))

    @property
    def served_args(self) -> tuple[str, ...]:
        """Arguments of `vllm serve` as far as the profile knows them: its own, or those that it expects of a script."""
        return self.args if self.launcher is None else self.expect.args

    @property
    def served_env(self) -> Mapping[str, str]:
        """The environment with a launcher's knobs, which win."""
        return {**self.env, **(self.launcher.env if self.launcher is not None else {})}


def read(file: Path, project: Path) -> ProfileConfig:
    """A profile, whose start script is looked for in the working directory, then in `project`.  Raises UsageError."""
    profile = yamlfile.validate(_expand(yamlfile.read(file)), ProfileConfig)
    launcher = profile.launcher
    if launcher is None:
        return profile
    if launcher.directory is None and not (Path.cwd() / launcher.script).is_file() and (project / launcher.script).is_file():
        launcher = launcher.model_copy(update={"directory": str(project)})
    try:
        known = launcher.model_copy(update={"sha256": script_sha256(launcher.found().script)})
    except FarmError:
        known = launcher  # where it is found is up to the card's machine
    return profile.model_copy(update={"launcher": known})


def _expand(profile: YamlFile) -> YamlFile:
    """`${NAME}` in a profile is the variable NAME of the driver's environment.  Raises UsageError where it is unset.

    `${DRAFTER}` of a profile with a drafter stays: only the card's machine knows its folder.
    """
    kept = (_DRAFTER,) if "drafter" in profile.data else ()

    def expanded(word: str, loc: yamlfile.Loc) -> str:
        names = {match[1] for match in _VARIABLE.finditer(word) if match[0] not in kept}
        if unset := sorted(names - set(os.environ)):
            raise profile.error(f"the environment variable {unset[0]} is not set; for instance: export {unset[0]}=/path", loc)
        return _VARIABLE.sub(lambda match: os.environ[match[1]] if match[1] in names else match[0], word)

    return YamlFile(profile.path, _reworded(profile.data, expanded, ()), profile.lines)


def _reworded(node: Any, change: Callable[[str, yamlfile.Loc], str], loc: yamlfile.Loc) -> Any:
    """Plain data with every string value changed."""
    if isinstance(node, dict):
        return {key: _reworded(value, change, (*loc, key)) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_reworded(item, change, (*loc, index)) for index, item in enumerate(node)]
    return change(node, loc) if isinstance(node, str) else node
