"""replay: what a prefill keeps of the KV pool, from the tree's own scheduler and KV-cache manager.  No card needed.

`jobs/inside/replay_driver.py` runs inside each arm's tree and drives its
scheduler through one prompt at a time.  Recorded per prompt, in blocks:
`retained_states_before` and `retained_states_after` (the most state blocks that
the request held just before and just after a retirement; `n` retirements) and
`peak_blocks` (the most blocks of the pool in use).  The first arm is the
reference.  `expect` holds exact values or bounds per scenario and arm; a
scenario without any must not be worse than the reference in another arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from farm.bench import Bench, Event, Needs
from farm.records import Measurement, Outcome, Reason, Tagged, Verdict
from jobs.armwise import each

AT_ONCE = 2  # arms: a scheduler takes one core and 1 GiB, most of its time to import vLLM
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
UNPROVEN = ("block accounting only: no kernel ran and no server's gauge was read",)
METRICS = {"retained_before": "retained_states_before", "retained_after": "retained_states_after",
           "peak_blocks": "peak_blocks"}  # field of Row: metric of its measurement


@dataclass(frozen=True)
class Scenario:
    """One serving geometry: tokens a block, draft tokens k, tokens a step, steps in flight while the next is
    scheduled (`lag`: 0 synchronous, 1 async scheduling), Mamba groups beside the attention group, prompt lengths.

    `mamba_groups` scales the peak alone: 3 where three layers of four are GDN, 2 for the tiny model, whose MTP
    layer makes three attention layers beside six.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    block_size: Positive
    speculative_blocks: Count
    prompts: tuple[Positive, ...]
    chunk_budget: Positive = 2048
    lag: Annotated[int, Field(ge=0, le=8)] = 1
    method: Literal["mtp", "dflash"] = "mtp"
    mamba_groups: Positive = 3

    def __post_init__(self) -> None:
        if not self.prompts or len(set(self.prompts)) != len(self.prompts):
            raise ValueError(f"scenario {self.name!r}: prompts must be different lengths, at least one")
        if self.chunk_budget <= self.speculative_blocks + 1:
            raise ValueError(f"scenario {self.name!r}: chunk_budget {self.chunk_budget} has no room for a token beside "
                             f"{self.speculative_blocks} drafts")

    @property
    def note(self) -> str:
        return (f"{self.name}: block={self.block_size} k={self.speculative_blocks} budget={self.chunk_budget} "
                f"lag={self.lag} method={self.method} mamba_groups={self.mamba_groups}")


@dataclass(frozen=True)
class Bounds:
    """What one arm must show in one scenario: a list holds the exact value per prompt, `_max` the most at any."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    retained_before: tuple[Count, ...] | None = None
    retained_before_max: Count | None = None
    retained_after: tuple[Count, ...] | None = None
    retained_after_max: Count | None = None
    peak_blocks: tuple[Count, ...] | None = None
    peak_blocks_max: Count | None = None

    def exact(self) -> dict[str, tuple[int, ...]]:
        return {name: value for name in METRICS if (value := getattr(self, name)) is not None}

    def most(self) -> dict[str, int]:
        return {name: value for name in METRICS if (value := getattr(self, f"{name}_max")) is not None}


@dataclass(frozen=True)
class Expect:
    """The rule of one scenario: bounds per arm, and whether every arm must show the reference's very values."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    arms: Mapping[str, Bounds] = field(default_factory=dict)
    arms_equal: bool = False


@dataclass(frozen=True)
class Row:
    """One prompt on one arm: greatest counts over its retirements, in blocks."""

    retained_before: int
    retained_after: int
    peak_blocks: int
    steps: int

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Row:
        return cls(max(event["before"]), max(event["after"]), event["peak_blocks"], len(event["before"]))


Rows = dict[tuple[str, str, int], Row]  # by arm, scenario and prompt length


@dataclass(frozen=True)
class Replay:
    """Options: `scenarios`, and `deadline_s` for all of them in one arm (most of it is importing vLLM)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    scenarios: tuple[Scenario, ...]
    expect: Mapping[str, Expect] = field(default_factory=dict)
    deadline_s: Annotated[float, Field(gt=0)] = 300.0

    name: ClassVar[str] = "replay"
    needs: ClassVar[Needs] = Needs(own_card=False)

    def __post_init__(self) -> None:
        known = {s.name: s for s in self.scenarios}
        if not known or len(known) != len(self.scenarios):
            raise ValueError("give at least one scenario, each with a name of its own")
        for name, rule in self.expect.items():
            if name not in known:
                raise ValueError(f"expect names scenario {name!r}; there are: {', '.join(known)}")
            if not rule.arms and not rule.arms_equal:
                raise ValueError(f"expect of scenario {name!r} says nothing: give arms or arms_equal: true")
            for arm, bounds in rule.arms.items():
                if not bounds.exact() and not bounds.most():
                    raise ValueError(f"expect of {name!r}, arm {arm!r}, says nothing: give a list or a _max")
                for metric, values in bounds.exact().items():
                    if len(values) != len(known[name].prompts):
                        raise ValueError(f"expect of {name!r}, arm {arm!r}: {metric} has {len(values)} values "
                                         f"for {len(known[name].prompts)} prompts")

    @property
    def arms_named(self) -> set[str]:
        """Arms that `expect` names."""
        return {arm for rule in self.expect.values() for arm in rule.arms}

    def run(self, bench: Bench) -> Iterator[Event]:
        """Three measurements a prompt and arm as the driver reports them, then the outcome."""
        arms = tuple(bench.arms)
        if fault := self._cannot_judge(arms):
            yield Outcome(Verdict.INVALID, Reason.BAD_CONFIG, fault)
            return
        code = resources.files("jobs").joinpath("inside/replay_driver.py").read_text(encoding="utf-8")
        args = {"scenarios": [asdict(s) for s in self.scenarios]}
        by_name = {s.name: s for s in self.scenarios}
        rows: Rows = {}

        def on(arm: str) -> list[Mapping[str, Any]]:
            bench.progress(f"replay: {arm}, {sum(len(s.prompts) for s in self.scenarios)} prompts")
            return list(bench.python(arm, code, args, timeout_s=self.deadline_s))

        for arm, events in each(arms, on, at_once=AT_ONCE):
            for event in events:
                if event["event"] == "unknown-api":
                    yield _unknown_api(arm, arms[0], event["detail"])
                    return
                if event["event"] == "prompt":
                    scenario, tokens = by_name[event["scenario"]], event["prompt_tokens"]
                    row = rows[arm, scenario.name, tokens] = Row.of(event)
                    yield from _measurements(arm, scenario, tokens, row)
        yield judge(self.scenarios, self.expect, arms, rows)

    def _cannot_judge(self, arms: tuple[str, ...]) -> str | None:
        for name, rule in self.expect.items():
            if strangers := sorted(set(rule.arms) - set(arms)):
                return (f"expect of scenario {name!r} names arm {', '.join(strangers)}; this cell has "
                        f"{', '.join(arms)}: correct the arms of the cell or of expect")
        alone = [s.name for s in self.scenarios if s.name not in self.expect or not self.expect[s.name].arms]
        if len(arms) == 1 and alone:
            return (f"scenario {', '.join(alone)} has no bounds and the cell has one arm, so nothing can be judged: "
                    "add expect or a second arm")
        return None


def judge(scenarios: tuple[Scenario, ...], expect: Mapping[str, Expect], arms: tuple[str, ...], rows: Rows) -> Outcome:
    """The outcome of a cell from its rows; pure.  `arms[0]` is the reference."""
    promised = [(arm, s.name, p) for arm in arms for s in scenarios for p in s.prompts]
    missing = [" ".join(map(str, key)) for key in promised if key not in rows]
    if missing:
        shown = ", ".join(missing[:6]) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
        return Outcome(Verdict.INVALID, Reason.MISSING_ROWS,
                       f"{len(missing)} of {len(promised)} promised rows did not come: {shown}. Run the cell again; if "
                       "they stay away, see jobs/inside/replay_driver.py.")
    faults: list[tuple[Reason, str]] = []
    for scenario in scenarios:
        table = {arm: {m: tuple(getattr(rows[arm, scenario.name, p], m) for p in scenario.prompts) for m in METRICS}
                 for arm in arms}
        faults += _faults(scenario, expect.get(scenario.name), arms[0], table)
    if faults:
        reasons = {reason for reason, _ in faults}
        worst = next(r for r in (Reason.EFFECT_WRONG_WAY, Reason.EFFECT_ABSENT, Reason.CHANGED) if r in reasons)
        return Outcome(Verdict.FAIL, worst, "; ".join(text for _, text in faults) + ".", UNPROVEN)
    shown = "; ".join(_summary(s, arms, rows) for s in scenarios)
    reason = Reason.AS_EXPECTED if expect else Reason.NO_REGRESSION
    return Outcome(Verdict.PASS, reason, f"State blocks retained before, then after removal: {shown}.", UNPROVEN)


Table = Mapping[str, Mapping[str, tuple[int, ...]]]  # by arm and metric: a value per prompt


def _faults(scenario: Scenario, rule: Expect | None, reference: str, table: Table) -> Iterator[tuple[Reason, str]]:
    if rule is None or (rule.arms_equal and not rule.arms):
        for arm, metric in ((a, m) for a in table if a != reference for m in METRICS):
            mine, base = table[arm][metric], table[reference][metric]
            if _worse(mine, base):
                yield Reason.EFFECT_WRONG_WAY, (f"{_where(scenario, metric)}: {arm} {_slashed(mine)} is above "
                                                f"{reference} {_slashed(base)}")
            elif rule is not None and mine != base:
                yield Reason.CHANGED, (f"{_where(scenario, metric)}: {arm} {_slashed(mine)} differs from {reference} "
                                       f"{_slashed(base)}, and the arms were expected to be equal")
        return
    for arm, bounds in rule.arms.items():
        found, base = table[arm], table[reference]
        for metric, wanted in bounds.exact().items():
            if found[metric] != wanted:
                yield (_reason(arm == reference, found[metric], base[metric]),
                       f"{_where(scenario, metric)}: {arm} {_slashed(found[metric])}, expected {_slashed(wanted)}")
        for metric, most in bounds.most().items():
            if max(found[metric]) > most:
                yield (_reason(arm == reference, found[metric], base[metric]),
                       f"{_where(scenario, metric)}: {arm} {_slashed(found[metric])}, expected at most {most}")
    if rule.arms_equal:
        yield from _faults(scenario, Expect(arms_equal=True), reference, table)


def _reason(is_reference: bool, found: tuple[int, ...], base: tuple[int, ...]) -> Reason:
    """Why an expectation was missed, by how the arm stands to the reference."""
    if is_reference:
        return Reason.CHANGED
    if _worse(found, base):
        return Reason.EFFECT_WRONG_WAY
    return Reason.EFFECT_ABSENT if found == base else Reason.CHANGED


def _worse(found: tuple[int, ...], base: tuple[int, ...]) -> bool:
    return any(mine > theirs for mine, theirs in zip(found, base, strict=True))


def _measurements(arm: str, scenario: Scenario, tokens: int, row: Row) -> Iterator[Tagged]:
    conditions = {"arm": arm, "prompt_tokens": tokens, "block_size": scenario.block_size}
    for name, metric in METRICS.items():
        yield Tagged(Measurement(metric, getattr(row, name), "blocks", n=row.steps, note=scenario.note), conditions)


def _unknown_api(arm: str, reference: str, detail: str) -> Outcome:
    if arm == reference:
        return Outcome(Verdict.INVALID, Reason.MISSING_ROWS,
                       f"The replay driver does not know this pin ({detail}). Teach it: jobs/inside/replay_driver.py.")
    return Outcome(Verdict.FAIL, Reason.TREE_FAILED,
                   f"{arm} lacks what {reference} has and the replay driver uses ({detail}): look at the patches "
                   "that touch it.")


def _where(scenario: Scenario, metric: str) -> str:
    return f"{scenario.name} {METRICS[metric]} at {_slashed(scenario.prompts)} tokens"


def _summary(scenario: Scenario, arms: tuple[str, ...], rows: Rows) -> str:
    def of(arm: str, metric: str) -> str:
        return _slashed(tuple(getattr(rows[arm, scenario.name, p], metric) for p in scenario.prompts))

    shown = ", ".join(f"{arm} {of(arm, 'retained_before')} then {of(arm, 'retained_after')}"
                      for arm in arms)
    return f"{scenario.name} at {_slashed(scenario.prompts)} tokens: {shown}"


def _slashed(values: tuple[int, ...]) -> str:
    return "/".join(map(str, values))
