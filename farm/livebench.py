"""The bench that a worker hands to a job: real trees, real servers, real test processes on one card."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from farm import childenv, folders, geometry, isolation, lifeline, models, places, probing, server, sweep, testrun
from farm.bench import Arm, BootFacts, BootSlot, Card, PatchTriage, Prompt, Server, Suite, TestRun, balanced_order
from farm.endings import is_the_trees_fault
from farm.environment import Environment
from farm.errors import BootFailure, FarmError, InvalidMeasurement, TreeFailure
from farm.evidence import BuiltArm, Evidence, Policy, Span
from farm.keeper import Keeper
from farm.pins import Pin, PinStore
from farm.plan import Cell, PinSpec
from farm.pristine import Pristine
from farm.profilefile import DrafterConfig, ModelConfig, script_sha256
from farm.prompts import make_prompt
from farm.records import BootRow, Reason, Tagged, utc_now
from farm.serverspec import ServerSpec
from farm.trees import Tree, TreeStore, identity
from farm.triage import TriagePin, of_pin, triage

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Workshop:
    """A node's stores: pins and their environments, trees, models, and where boots keep their logs."""

    pins: PinStore
    trees: TreeStore
    root: Path

    @classmethod
    def at(cls, cache: Path) -> Workshop:
        cache.mkdir(parents=True, exist_ok=True)
        return cls(PinStore(cache), TreeStore(cache), cache)


@dataclass
class LiveBench:
    """See farm.bench.Bench for the contract."""

    card: Card
    pin: str
    version: str
    profile: str | None
    arms: Mapping[str, Arm]
    rng: random.Random
    cell: str
    progress: Progress
    _emit: Callable[[Tagged], None]
    _spec: Cell
    _workshop: Workshop
    _environment: Environment | None
    _trees: Mapping[str, Tree]
    _evidence: Evidence
    _spans: list[Span]
    _pristine: Pristine
    _keeper: Keeper
    _sandbox: isolation.Sandbox | None  # for whatever runs a tree's code
    _records: Path  # see farm.sweep
    _model: models.ModelFiles | None = None
    _booted: set[str] = field(default_factory=set)  # arms that have been healthy in this cell
    _phase: datetime = field(default_factory=utc_now)  # when what is being done now began
    _server: server.ServerProcess | None = None

    @classmethod
    def prepare(cls, workshop: Workshop, cell: Cell, card: Card, evidence: Evidence, spans: list[Span], *,
                emit: Callable[[Tagged], None], progress: Progress, keeper: Keeper,
                policy: Policy = Policy()) -> LiveBench:
        """Build what the cell needs on this node: the pin's environment, a tree per arm, the model.

        Raises EnvironmentBuildError, PinError, SeriesError, FarmError (isolation-missing).
        """
        sandbox = isolation.Sandbox.find() if policy.isolation == "bwrap" and cell.arms else None
        pin = _pin(cell.pin)
        pristine = workshop.pins.pristine(pin, progress)
        environment = None  # of a cell without arms: nothing runs there
        evidence.versions = {"vllm": pristine.version}
        if cell.arms:
            environment = workshop.pins.environment(pin, progress)
            evidence.versions = {k: environment.versions.get(k) for k in ("vllm", "torch", "triton", "transformers", "python")}
        trees = {arm.name: workshop.trees.build(pristine, arm.patches) for arm in cell.arms}
        arms = {arm.name: Arm(arm.name, trees[arm.name].id, tuple(p.name for p in arm.patches), dict(arm.env))
                for arm in cell.arms}
        for name, tree in trees.items():
            evidence.arms[name] = BuiltArm(name, tree.id, tree.patches)
            for patch in tree.patches:
                emit(Tagged(patch, {"arm": name}))
        bench = cls(card, cell.pin.name, cell.pin.config.version, cell.profile, arms, random.Random(cell.seed), cell.id,
                    progress, emit, cell, workshop, environment, trees, evidence, spans, pristine, keeper, sandbox,
                    sweep.records(places.host_state()))
        if cell.profile_config is not None:
            bench._model = _model_files(cell.profile_config.model, workshop)
            evidence.model_sha256 = bench._model and bench._model.sha256
            drafter, launcher = cell.profile_config.drafter, cell.profile_config.launcher
            if drafter is not None and (drafts := _model_files(drafter, workshop)) is not None:
                evidence.drafter_sha256 = drafts.sha256
            if launcher is not None:
                evidence.launcher_sha256 = script_sha256(launcher.found().script)
        return bench

    @property
    def moment(self) -> datetime:
        """When what is measured now began: the last request of a server, else the phase."""
        return (self._server and self._server.last_request) or self._phase

    def prove_trees(self) -> None:
        """Raise InvalidMeasurement where an arm's tree is no longer as it was built (about 30 ms an arm)."""
        for arm in self._spec.arms:
            self._workshop.trees.prove(self._pristine, arm.patches)

    # --- serving ---------------------------------------------------------------------------------

    @contextmanager
    def serve(self, slot: BootSlot) -> Iterator[Server]:
        profile, arm = self._spec.profile_config, self._arm(slot.arm)
        if profile is None:
            raise FarmError(f"cell {self.cell} has no profile to serve", reason=Reason.BAD_CONFIG)
        if profile.drafter is not None and (drafter := _model_files(profile.drafter, self._workshop)) is not None:
            profile = profile.drafting_with(drafter.path)
        tree = self._trees[slot.arm]
        self.progress(f"{slot.arm} boot {slot.boot}: starting")
        idle = self._keeper.gate(self.progress)
        self._evidence.card = self._keeper.conditions()
        log = self._log_path(f"boot-{slot.order}-{slot.arm}.log")
        spec = ServerSpec(
            python=self._environment.python, tree=tree.root, site=self._environment.site,
            model=self._model and self._model.path, args=(*profile.args, *arm.args),
            env={**profile.served_env, **arm.env, **self._marks()},
            caches=self._workshop.root / "caches" / tree.id, log=log, card=self.card,
            compiled=self._workshop.root / "caches" / identity(self._pristine, ()) if arm.patches else None,
            launcher=profile.launcher and profile.launcher.found(),
            expected=profile.expect.facts(arm.args, self._predicted_block((*profile.served_args, *arm.args))),
            carried=probing.install(self._workshop.root), attest=log.with_suffix(".attest"),
            probe=log.with_suffix(".probe") if slot.probe else None,
            sandbox=self._sandbox, records=self._records,
            stall_s=profile.stall_s, deadline_s=profile.boot_deadline_s,
        )
        began, facts, log_tail, torn_down_from = utc_now(), None, None, None
        booted_at = self._phase = began
        try:
            with server.boot(spec, self.progress) as running:
                running.card_processes = self._keeper.placed(running.processes())
                facts = running.facts
                self._span("boot", slot.arm, began)
                self._booted.add(slot.arm)
                began, self._server = utc_now(), running
                yield running
                self._span("requests", slot.arm, began)
                began = torn_down_from = utc_now()
                facts = running.facts  # again: lines about compilation come while it serves
            self._keeper.wait_memory_back(idle)
        except BootFailure as error:
            log_tail = error.log_tail or str(error)
            if facts is None and is_the_trees_fault(error, self.arms[slot.arm], self._booted):
                raise TreeFailure(f"arm {slot.arm} does not boot, where {', '.join(sorted(self._booted))} did on this card "
                                  f"before: {error}\n{log_tail}") from error
            raise
        finally:
            ended, self._server = utc_now(), None
            self._span("boot" if facts is None else "teardown", slot.arm, began)
            self._evidence.card = {**self._evidence.card, "power_limit_after_w": self._keeper.power_limit_w()}
            served, facts = facts is not None and log_tail is None, facts or BootFacts()
            self._emit(Tagged(
                BootRow(served, log_tail, facts.gaps,
                        None if torn_down_from is None else (ended - torn_down_from).total_seconds()),
                {"started_utc": booted_at, "ended_utc": ended, "arm": slot.arm, "boot": slot.boot, "pair": slot.pair,
                 "order": slot.order, **facts.conditions()}))

    def _predicted_block(self, args: Sequence[str]) -> int | None:
        """Tokens a block by the model's config and these serve arguments; None where it cannot be told."""
        if self._model is None:
            return None
        found = geometry.predict(self._model.config, geometry.serving(args), self.card.kind)
        if found.block_size is None:
            self.progress(f"block size not predicted: {found.reason}")
        return found.block_size

    def order(self, arms: Sequence[str], boots: int) -> list[BootSlot]:
        return balanced_order(arms, boots)

    def prompt(self, tokens: int, *, salt: str) -> Prompt:
        return make_prompt(tokens, salt, self._vocab_size())

    def _vocab_size(self) -> int:
        config = self._spec.profile_config
        if config is not None and config.model.vocab_size is not None:
            return config.model.vocab_size
        assert self._model is not None
        data = self._model.config
        size = data.get("vocab_size") or data.get("text_config", {}).get("vocab_size")
        if size is None:
            raise FarmError(f"{self._model.path}/config.json names no vocab_size; give model.vocab_size in the profile",
                            reason=Reason.BAD_CONFIG)
        return int(size)

    # --- tests and scripts -----------------------------------------------------------------------

    def pytest(self, arm: str, suite: Suite) -> TestRun:
        pin = _pin(self._spec.pin)
        sdist = None if suite.source == "series" else self._workshop.pins.sdist(self.version, pin, self.progress)
        newer = self._workshop.pins.sdist(suite.version, pin, self.progress) if suite.source == "newer" else None
        with folders.private() as scratch, self._spanned("tests", arm):
            spec = testrun.TestRunSpec(
                python=self._environment.python, tree_root=self._trees[arm].root, site=self._environment.site,
                suite=suite, pin_tests=sdist, newer_tests=newer, series_tests=self._spec.tests,
                env=self._environment_of(arm), scratch=scratch, card=self.card, sandbox=self._sandbox,
                records=self._records,
            )
            return testrun.run_suite(spec, lambda text: self.progress(f"{arm}: {text}"))

    def python(self, arm: str, code: str, args: Mapping[str, Any], *, timeout_s: float) -> Iterator[Mapping[str, Any]]:
        tree = self._trees[arm]
        with folders.private() as private, self._spanned("script", arm):
            scratch = private / "scratch"  # what it prints lies beside, where it can lay no link or pipe for us to read
            scratch.mkdir()
            (scratch / "script.py").write_text(code, encoding="utf-8")
            (scratch / "args.json").write_text(json.dumps(args), encoding="utf-8")
            out, err = private / "out", private / "err"
            argv = [str(self._environment.python), str(scratch / "script.py")]
            env = self._environment_of(arm)
            within = () if self._sandbox is None else self._sandbox.for_tree(
                self._environment.python, [tree.root, self._environment.site], [scratch], env, card=self.card, cwd=scratch)
            with lifeline.Supervised.start(argv, env=env, cwd=scratch, stdout_path=out, stderr_path=err,
                                           stdin_path=scratch / "args.json", within=within, records=self._records) as child:
                status = child.wait(timeout_s)
            printed = out.read_text(encoding="utf-8", errors="replace").splitlines()
            tail = "\n".join(err.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        if status != 0:
            ended = f"ran past {timeout_s:.0f} s" if status is None else f"ended with status {status}"
            last = tail.rpartition("\n")[2]
            # Without a patch there is no patch to count it against.
            kind = TreeFailure if self.arms[arm].patches else FarmError
            raise kind(f"the script {ended} in arm {arm}: {last}\n{tail}")
        lines = [json.loads(line) for line in printed if line.startswith("{")]
        _check_attested(lines, tree, arm)
        yield from (line for line in lines if line.get("event") != "attest")

    # --- the series ------------------------------------------------------------------------------

    def triage(self) -> Sequence[PatchTriage]:
        pins = [TriagePin(r.pin.name, r.pin.config.version,
                          self._workshop.pins.pristine(_pin(r.pin), self.progress).package, r.series)
                for r in self._spec.releases]
        return of_pin(triage(pins), self.pin)

    # --- what these have in common ---------------------------------------------------------------

    def _arm(self, name: str):
        return next(a for a in self._spec.arms if a.name == name)

    def _marks(self) -> dict[str, str]:
        """What our processes carry in their environment, so that a sweep knows them for ours, and a gate for this card's."""
        return {"FARM_RUN": self._evidence.info.run, "FARM_CELL": self.cell, **self._keeper.marks}

    def _environment_of(self, arm: str) -> dict[str, str]:
        tree = self._trees[arm]
        env, _ = childenv.child_environment(
            {**self._arm(arm).env, **self._marks()}, tree=tree.root, site=self._environment.site,
            caches=self._workshop.root / "caches" / tree.id, card=self.card)
        return env if self._sandbox is None else {**env, **isolation.VARIABLES}

    def _log_path(self, name: str) -> Path:
        folder = self._workshop.root / "logs" / self._evidence.info.run / f"{self.cell}-{self._evidence.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / name

    def _span(self, kind: str, arm: str, began: Any) -> None:
        self._spans.append(Span(kind, arm, began, utc_now()))

    @contextmanager
    def _spanned(self, kind: str, arm: str) -> Iterator[None]:
        began = self._phase = utc_now()
        try:
            yield
        finally:
            self._span(kind, arm, began)


def _check_attested(lines: Sequence[Mapping[str, Any]], tree: Tree, arm: str) -> None:
    """A script says first which vllm it imported; it must be the tree's."""
    path = next((line.get("vllm_path") for line in lines if line.get("event") == "attest"), None)
    if path is None or not Path(path).is_relative_to(tree.root):
        raise InvalidMeasurement(f"arm {arm}: the script imported vllm from {path}, not from its tree {tree.root}",
                                 reason=Reason.WRONG_TREE)


def _pin(spec: PinSpec) -> Pin:
    return Pin.from_config(spec.name, spec.config)


def _model_files(config: ModelConfig | DrafterConfig, workshop: Workshop) -> models.ModelFiles | None:
    """None: the profile's start script knows its model."""
    if config.tiny is not None:
        return models.write_model(config.tiny, workshop.root / "models")
    return None if config.path is None else models.by_path(Path(config.path))
