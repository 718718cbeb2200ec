"""One long prompt: what is sent, what must come back of it, and what was seen meanwhile."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ConfigDict

from farm import geometry
from farm.bench import Bench, BootFacts, GaugeTrace, ProbeTrace, Prompt, Reply
from farm.errors import InvalidMeasurement
from farm.records import Measurement, Reason
from jobs.beside import Concurrent, Short


@dataclass(frozen=True)
class Request:
    """A measured request of `prompt` tokens, of which the first `prefix` were served just before (0: a fresh one).

    `cached` is what must come from the prefix cache then, where the boot's block size does not say: without a drafter,
    or with one whose blocks are longer than the target's (farm.geometry.cached_tokens).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    prompt: int
    prefix: int = 0
    cached: int | None = None

    def __str__(self) -> str:
        return f"{self.prompt} tokens" + (f" after a prefix of {self.prefix}" if self.prefix else "")

    def check(self) -> None:
        """Raise ValueError unless the prefix is the beginning of the prompt."""
        if not 0 < self.prefix < self.prompt:
            raise ValueError(f"a prefix of {self.prefix} tokens is not the beginning of a longer prompt ({self.prompt}); fresh "
                             "prompts go under prompts")
        if self.cached is not None and not 0 < self.cached <= self.prefix:
            raise ValueError(f"a prefix of {self.prefix} tokens cannot leave {self.cached} cached")

    def expected_cached(self, facts: BootFacts) -> int:
        """Tokens that must come from the prefix cache of this boot.  Raises InvalidMeasurement where none can be told."""
        if not self.prefix or self.cached is not None:
            return self.cached or 0
        if facts.block_size is None:
            raise InvalidMeasurement(f"{self}: the boot did not say its block size, so what must come from the cache is not "
                                     "known; give cached", reason=Reason.PROMPT_CACHED)
        tokens = geometry.cached_tokens(self.prefix, facts.block_size, geometry.serving(facts.argv))
        if tokens is None:
            raise InvalidMeasurement(f"{self}: what must come from the cache follows from the block size only with a drafter "
                                     "such as MTP, and this server has none; give cached", reason=Reason.PROMPT_CACHED)
        if not tokens:
            raise InvalidMeasurement(f"{self}: the prefix is too short to leave a block of {facts.block_size} tokens in the "
                                     "cache; take a longer one", reason=Reason.PROMPT_CACHED)
        return tokens


@dataclass(frozen=True)
class Workload:
    """The prompts of one request: its own, its prefix alone, the short ones beside it."""

    request: Request
    prompt: Prompt
    prefix: Prompt | None
    shorts: tuple[Prompt, ...]

    @classmethod
    def of(cls, request: Request, concurrent: Concurrent | None, bench: Bench, number: int = 0) -> Workload:
        """`number`: from 0, of those of one boot that are alike but for their tokens."""
        again = f"-{number}" if number else ""
        name = f"{request.prefix}-{request.prompt}{again}"
        shorts = () if concurrent is None else tuple(
            bench.prompt(concurrent.tokens, salt=f"short-{name}-{i}") for i in range(concurrent.count))
        if not request.prefix:
            return cls(request, bench.prompt(request.prompt, salt=f"fresh-{request.prompt}{again}"), None, shorts)
        prefix = bench.prompt(request.prefix, salt=f"prefix-{name}")
        rest = bench.prompt(request.prompt - request.prefix, salt=f"after-{name}")
        return cls(request, joined(prefix, rest), prefix, shorts)


def joined(first: Prompt, second: Prompt) -> Prompt:
    """One prompt after the other, hashed as a bench hashes its own."""
    ids = first.token_ids + second.token_ids
    return Prompt(ids, hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest())


@dataclass(frozen=True)
class Seen:
    """What one request showed.  `shorts` are those that were sent before its first token came."""

    began: datetime
    reply: Reply
    peak: GaugeTrace
    settle: GaugeTrace
    shorts: tuple[Short, ...] = ()
    probe: ProbeTrace | None = None

    @property
    def worst_short_s(self) -> float | None:
        return max((short.reply.ttft_s for short in self.shorts), default=None)

    def values(self) -> dict[str, float]:
        """One value a metric: those that a rule may name, and the exact peak where there is one."""
        found = {"kv_peak": self.peak.peak, "ttft": self.reply.ttft_s, "short_ttft_max": self.worst_short_s,
                 "kv_peak_exact": self.probe and self.probe.peak}
        return {metric: value for metric, value in found.items() if value is not None}

    def measurements(self, request: Request) -> Iterator[Measurement]:
        said = [f"{self.peak.missed} scrapes missed"] if self.peak.missed else []
        said += [f"after a prefix of {request.prefix} tokens"] if request.prefix else []
        yield Measurement("kv_peak", self.peak.peak, "ratio", len(self.peak.points), self.peak.interval_s,
                          "; ".join(said) or None)
        yield Measurement("kv_settle", self.settle.points[-1][1] if self.settle.points else None, "ratio",
                          len(self.settle.points), self.settle.interval_s)
        yield Measurement("ttft", self.reply.ttft_s, "s", 1)
        computed, took_s = self.reply.prompt_tokens - (self.reply.cached_tokens or 0), self.reply.ttft_s
        yield Measurement("prefill_tokens_per_s", computed / took_s if took_s > 0 else None, "tokens/s", 1)
        if self.shorts:
            yield Measurement("short_ttft_max", self.worst_short_s, "s", len(self.shorts))
        if (probe := self.probe) is not None:
            yield Measurement("kv_peak_exact", probe.peak, "ratio", probe.steps)
            yield Measurement("kv_peak_blocks", probe.peak_blocks, "blocks", probe.steps, note=f"of {probe.pool_blocks} blocks")
            yield Measurement("retained_states_before", probe.retained_before, "blocks", probe.steps)
            yield Measurement("retained_states_after", probe.retained_after, "blocks", probe.steps)


def conditions(prompt: Prompt, reply: Reply) -> dict[str, Any]:
    """The columns of records.WORKLOAD that a request and its reply fill."""
    return {"prompt_sha256": prompt.sha256, "prompt_tokens": reply.prompt_tokens, "cached_tokens": reply.cached_tokens,
            "completion_tokens": reply.completion_tokens, "temperature": 0.0}


def check_counts(where: str, prompt: Prompt, reply: Reply, cached: int) -> None:
    """Raise InvalidMeasurement unless the server counted the prompt's tokens, and so many of them as cached."""
    if reply.prompt_tokens != prompt.tokens:
        raise InvalidMeasurement(f"{where}: the server counted {reply.prompt_tokens} prompt tokens",
                                 reason=Reason.PROMPT_DIFFERS)
    if reply.cached_tokens is None:
        raise InvalidMeasurement(
            f"{where}: the server does not report cached tokens; serve with --enable-prompt-tokens-details",
            reason=Reason.PROMPT_CACHED)
    if reply.cached_tokens != cached:
        wanted = f"{cached} were expected, by the block size or as cached_prefix says" if cached else "a fresh row needs 0"
        raise InvalidMeasurement(f"{where}: {reply.cached_tokens} prompt tokens came from the prefix cache; {wanted}",
                                 reason=Reason.PROMPT_CACHED)
