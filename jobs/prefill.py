"""prefill: the long-prefill A/B.  What a long prompt takes of the KV pool, and for how long.

Each arm is booted in balanced order; each boot serves the same prompts, which
are fresh (cached == 0, asserted) and identical by hash in all arms and boots.
While a prompt is prefilled the pool gauge is sampled.  Recorded per request:
`kv_peak` and `kv_settle` (ratio of the pool, 0 to 1), `ttft` (s),
`prefill_tokens_per_s`, and the gauge's samples.  The rule that decides is
`expect`, written in the matrix before the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict

from farm.bench import Bench, BootFacts, BootSlot, Event, GaugeTrace, Needs, Prompt, Reply, Server
from farm.errors import InvalidMeasurement
from farm.records import Measurement, Outcome, Reason, Sample, Tagged, Verdict
from farm.stats import Comparison, Pair, Rule, compare, noise_floor

Peaks = dict[tuple[str, int], dict[str, list[float]]]


@dataclass(frozen=True)
class Expect:
    """One rule: at these prompt lengths (default all) the metric of the second arm against the first."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    metric: Literal["kv_peak", "ttft"]
    direction: Literal["lower", "higher", "unchanged"]
    margin: float = 0.01  # relative
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin {self.margin} must be a number, 0 or more")


@dataclass(frozen=True)
class Prefill:
    """Options: `prompts` (tokens), `boots` per arm, sampler `interval_s`, `settle_s` after a reply,
    `max_tokens` of each reply, `warmup_tokens` (a request before the first, so that JIT is in none)."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    prompts: tuple[int, ...]
    boots: int = 2
    interval_s: float = 0.05
    settle_s: float = 1.0
    max_tokens: int = 8
    warmup_tokens: int = 64
    deadline_s: float = 600.0
    gauge: str = "vllm:kv_cache_usage_perc"
    expect: tuple[Expect, ...] = ()

    name: ClassVar[str] = "prefill"
    needs: ClassVar[Needs] = Needs()
    serves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.prompts or min(self.prompts) < 1:
            raise ValueError("prompts must list at least one length of one token or more")
        if len(set(self.prompts)) != len(self.prompts):
            raise ValueError("prompts lists a length twice: the second would be cached")
        finite = all(map(math.isfinite, (self.interval_s, self.deadline_s, self.settle_s)))
        if not finite or self.boots < 1 or self.interval_s <= 0 or self.deadline_s <= 0 or self.settle_s < 0:
            raise ValueError("boots, interval_s, deadline_s must be positive and settle_s not negative, none infinite")
        if self.max_tokens < 1 or self.warmup_tokens < 0:
            raise ValueError("max_tokens must be positive and warmup_tokens not negative")
        for rule in self.expect:
            if missing := sorted(set(rule.at) - set(self.prompts)):
                raise ValueError(f"expect.at names lengths that prompts does not list: {missing}")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and reply."""
        return max(self.prompts) + self.max_tokens

    def run(self, bench: Bench) -> Iterator[Event]:
        arms = list(bench.arms)
        prompts = {n: bench.prompt(n, salt=f"fresh-{n}") for n in self.prompts}
        values: Peaks = defaultdict(lambda: defaultdict(list))
        first: tuple[BootSlot, BootFacts] | None = None
        for slot in bench.order(arms, self.boots):
            with bench.serve(slot) as server:
                if first is None:
                    first = (slot, server.facts)
                self._check_boot(first, slot, server)
                self._warm_up(bench, server)
                for tokens, prompt in prompts.items():
                    bench.progress(f"{slot.arm} boot {slot.boot}: prefill of {tokens} tokens")
                    reply, trace, settle = self._measure(server, prompt)
                    yield from self._rows(slot, server, prompt, reply, trace, settle)
                    self._check_reply(slot, prompt, reply, trace)
                    values["kv_peak", tokens][slot.arm].append(trace.peak)
                    values["ttft", tokens][slot.arm].append(reply.ttft_s)
        yield self._judge(arms, values)

    def _check_boot(self, first: tuple[BootSlot, BootFacts], slot: BootSlot, server: Server) -> None:
        """Pools must be equal: a ratio of two different pools compares nothing."""
        reference, facts = first[1], server.facts
        differs = [
            f"{what} {getattr(reference, what)} on {first[0].arm} boot {first[0].boot}, "
            f"{getattr(facts, what)} on {slot.arm} boot {slot.boot}"
            for what in ("pool_tokens", "block_size") if getattr(reference, what) != getattr(facts, what)
        ]
        if facts.pool_tokens is None:
            raise InvalidMeasurement(
                f"{slot.arm} boot {slot.boot} did not say its pool's size, so pools cannot be compared; see the boot's gaps",
                reason=Reason.POOL_MISMATCH)
        if differs:
            raise InvalidMeasurement(
                f"pools differ: {'; '.join(differs)}. Pin the pool in bytes (--kv-cache-memory-bytes) alike on all arms",
                reason=Reason.POOL_MISMATCH)

    def _warm_up(self, bench: Bench, server: Server) -> None:
        if self.warmup_tokens:
            server.complete(bench.prompt(self.warmup_tokens, salt="warm-up"), max_tokens=self.max_tokens,
                            deadline_s=self.deadline_s)

    def _measure(self, server: Server, prompt: Prompt) -> tuple[Reply, GaugeTrace, GaugeTrace]:
        with server.sampled(self.gauge, self.interval_s) as sampling:
            reply = server.complete(prompt, max_tokens=self.max_tokens, deadline_s=self.deadline_s)
        with server.sampled(self.gauge, self.interval_s) as settling:
            settling.wait(self.settle_s)
        return reply, sampling.trace(), settling.trace()

    def _rows(self, slot: BootSlot, server: Server, prompt: Prompt, reply: Reply, trace: GaugeTrace,
              settle: GaugeTrace) -> Iterator[Event]:
        conditions = {
            "arm": slot.arm, "boot": slot.boot, "pair": slot.pair, "order": slot.order, "prompt_sha256": prompt.sha256,
            "prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens,
            "completion_tokens": reply.completion_tokens, "temperature": 0.0, **server.facts.conditions(),
        }
        note = f"{trace.missed} scrapes missed" if trace.missed else None
        for measured in (
            Measurement("kv_peak", trace.peak, "ratio", len(trace.points), trace.interval_s, note),
            Measurement("kv_settle", settle.points[-1][1] if settle.points else None, "ratio", len(settle.points),
                        settle.interval_s),
            Measurement("ttft", reply.ttft_s, "s", 1),
            Measurement("prefill_tokens_per_s", reply.prompt_tokens / reply.ttft_s if reply.ttft_s > 0 else None,
                        "tokens/s", 1),
        ):
            yield Tagged(measured, conditions)
        for t_s, value in trace.points:
            yield Tagged(Sample(self.gauge, t_s, value), conditions)

    def _check_reply(self, slot: BootSlot, prompt: Prompt, reply: Reply, trace: GaugeTrace) -> None:
        where = f"{slot.arm} boot {slot.boot}, {prompt.tokens} tokens"
        if reply.prompt_tokens != prompt.tokens:
            raise InvalidMeasurement(
                f"{where}: the server counted {reply.prompt_tokens} prompt tokens", reason=Reason.PROMPT_DIFFERS)
        if reply.cached_tokens is None:
            raise InvalidMeasurement(
                f"{where}: the server does not report cached tokens; serve with --enable-prompt-tokens-details",
                reason=Reason.PROMPT_CACHED)
        if reply.cached_tokens:
            raise InvalidMeasurement(
                f"{where}: {reply.cached_tokens} prompt tokens came from the prefix cache; a fresh row needs 0",
                reason=Reason.PROMPT_CACHED)
        if trace.peak is None:
            raise InvalidMeasurement(
                f"{where}: no sample of {self.gauge} came back in {reply.total_s:.1f} s ({trace.missed} missed)",
                reason=Reason.NO_SAMPLES)

    def _judge(self, arms: list[str], values: Peaks) -> Outcome:
        unproven = _unproven(arms, self.boots, self.prompts)
        if len(arms) < 2:
            return Outcome(Verdict.PASS, Reason.NO_REGRESSION, f"one arm ({arms[0]}): measured, nothing to compare", unproven)
        if not self.expect:
            return Outcome(Verdict.PASS, Reason.NO_REGRESSION,
                           "measured; the matrix has no expect for this cell, so nothing was decided", unproven)
        said: list[tuple[str, Comparison]] = []
        for rule in self.expect:
            for tokens in rule.at or self.prompts:
                by_arm = values[rule.metric, tokens]
                pairs = [Pair(b, p) for b, p in zip(by_arm[arms[0]], by_arm[arms[1]], strict=True)]
                verdict = compare(pairs, Rule(rule.metric, rule.direction, rule.margin), noise_floor(list(by_arm.values())))
                said.append((f"{tokens} tokens: ", verdict))
        worst = next((c for wanted in (Verdict.FAIL, Verdict.INVALID) for _, c in said if c.verdict is wanted), said[0][1])
        return Outcome(worst.verdict, worst.reason, " ".join(prefix + c.detail for prefix, c in said), unproven)


def _unproven(arms: list[str], boots: int, prompts: tuple[int, ...]) -> tuple[str, ...]:
    """What this cell did not show, in words, for the report."""
    lines = [f"only prompt lengths {', '.join(map(str, prompts))} were run"]
    if boots < 2 and len(arms) > 1:
        lines.append("one boot per arm: no noise floor")
    return tuple(lines)
