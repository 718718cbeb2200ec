"""offload: is a prompt that has left the GPU's pool served from the CPU tier?

In each boot, after a warm-up of the same length: a prompt, then evictors until the pool has
lost it, then the prompt again.  Recorded per boot: `ttft_cold`, `ttft_again` and the evictors'
median (s), `ttft_ratio`, `cached_tokens_cold` and `cached_tokens_again`, `stored_bytes` of the
whole boot and `stored_bytes_cold` of the prompt alone, and of the second request alone
`loaded_bytes`, `external_hits` and `gpu_hits` (tokens).  farm.oracle sizes and decides.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from farm import oracle
from farm.bench import Bench, BootFacts, BootSlot, Event, Needs, Prompt, Reply, Server
from farm.errors import InvalidMeasurement
from farm.oracle import Counts, Evidence, Finding, Timed
from farm.records import Measurement, Reason, Tagged

TICK_TOKENS = 16  # shorter than any block: neither cached nor stored
TICKS = 6


@dataclass(frozen=True)
class Offload:
    """Options: `boots` per arm; `ratio` of the second TTFT to the first, below which a prompt is served; `warmups`,
    requests of one other prompt before the first (the second meets the GPU's prefix cache).

    `prompt_tokens` and `evictors` default to what the boot's pool and the tier allow; `tier_gib` to --kv-offloading-size.
    `expect` says per arm whether it must be served; without it every arm must.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    evictors: Annotated[int, Field(ge=0)] | None = None
    boots: Annotated[int, Field(ge=1)] = 2
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    warmups: Annotated[int, Field(ge=0)] = 2
    tier_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] = 8
    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    expect: Mapping[str, Literal["served", "not-served"]] = field(default_factory=dict)

    name: ClassVar[str] = "offload"
    needs: ClassVar[Needs] = Needs(cuda=True)  # vLLM's CPU tier stands beside a GPU alone
    serves: ClassVar[bool] = True

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and reply, as far as the options say."""
        return (self.prompt_tokens or 1) + self.max_tokens

    @property
    def arms_named(self) -> Sequence[str]:
        return tuple(self.expect)

    def run(self, bench: Bench) -> Iterator[Event]:
        """Raises BootFailure, RefusedConfig, RequestFailed, InvalidMeasurement."""
        found: dict[str, list[Finding]] = defaultdict(list)
        frame: Frame | None = None
        count = self.evictors
        for slot in bench.order(list(bench.arms), self.boots):
            with bench.serve(slot) as server:
                if frame is None:
                    frame = self._frame(slot, server.facts)
                frame.check(slot, server.facts)
                boot = Running(bench, slot, server, frame.prompt_tokens, self.max_tokens, self.deadline_s)
                began = Counts.of(server.counters())
                warm = boot.warm_up(self.warmups) if self.warmups else began
                cost = warm.since(began).stored  # bytes that a prompt takes in the tier; 0 without a warm-up
                if count is None:  # in the first boot, for all: every boot serves the same prompts
                    count = oracle.evictors(frame.pool_tokens, frame.prompt_tokens, cost, frame.tier_bytes)
                if cost:
                    oracle.check_room(count, frame.prompt_tokens, cost, frame.pool_tokens, frame.tier_bytes)
                finding = yield from self._measure(boot, began, warm, count, frame.tier_bytes)
            found[slot.arm].append(finding)
            if not finding.valid:
                break
        assert frame is not None
        unproven = [f"only prompts of {frame.prompt_tokens:,} tokens in a tier of {frame.tier_bytes / oracle.GIB:g} GiB "
                    "were run"]
        if self.boots < 2:
            unproven.append("one boot per arm: not shown to repeat")
        yield oracle.judge(found, self.expect, tuple(unproven))

    def _measure(self, boot: Running, began: Counts, warm: Counts, count: int,
                 tier_bytes: int) -> Generator[Event, None, Finding]:
        """The prompt, `count` evictors, the prompt again: yields the rows, returns what they are evidence of.

        `began` and `warm` are the counters before and after the warm-up.
        """
        cold = boot.send("x", "the prompt, cold")
        after = boot.settled()
        stored_cold = after.since(warm).stored
        yield from boot.rows(
            cold, Measurement("ttft_cold", cold.reply.ttft_s, "s", 1),
            Measurement("cached_tokens_cold", cold.reply.cached_tokens, "tokens", 1),
            Measurement("stored_bytes_cold", stored_cold, "B", 1), Measurement("jit_lines_cold", cold.jit_lines, "count", 1))
        evicting = [boot.send(f"evictor-{i}", f"evictor {i + 1} of {count}") for i in range(count)]
        evictor_ttft = statistics.median(sent.reply.ttft_s for sent in evicting) if evicting else None
        evicted = boot.settled()
        again = boot.send("x", "the prompt again")
        ended = boot.settled()
        seen = Evidence(boot.tokens, cold.timed, again.timed, evictor_ttft, stored_cold, ended.since(began).stored,
                        ended.since(evicted), tier_bytes)
        finding = oracle.judge_boot(seen, self.ratio)
        yield from boot.rows(
            again, Measurement("ttft_again", again.reply.ttft_s, "s", 1),
            Measurement("cached_tokens_again", again.reply.cached_tokens, "tokens", 1),
            Measurement("loaded_bytes", seen.during_again.loaded, "B", 1),
            Measurement("external_hits", seen.during_again.external_hits, "tokens", 1),
            Measurement("gpu_hits", seen.during_again.gpu_hits, "tokens", 1),
            Measurement("ttft_ratio", seen.ratio if math.isfinite(seen.ratio) else None, "ratio", 2,
                        note=f"{finding.reason.value}: {finding.detail}"))
        yield from boot.rows(
            None, Measurement("ttft_evictors", evictor_ttft, "s", count, note="median"),
            Measurement("stored_bytes", seen.stored, "B", note=f"tier of {tier_bytes} B"))
        return finding

    def _frame(self, slot: BootSlot, facts: BootFacts) -> Frame:
        """What the first boot says of itself, which all others must repeat."""
        if facts.pool_tokens is None:
            raise InvalidMeasurement(
                f"{slot.arm} boot {slot.boot} did not say its pool's size, so no prompt can be sized and pools cannot be "
                "compared; see the boot's gaps", reason=Reason.POOL_MISMATCH)
        tier = self.tier_gib or _number(facts.argv, "--kv-offloading-size")
        if tier is None:
            raise InvalidMeasurement(
                "the tier's size is not known: the server was started without --kv-offloading-size; add it to the profile, "
                "or give tier_gib", reason=Reason.NO_METRICS)
        limit, budget = _number(facts.argv, "--max-model-len"), _number(facts.argv, "--max-num-batched-tokens")
        budget = None if budget is None else int(budget)
        tokens = self.prompt_tokens
        if tokens is None:
            if limit is None:
                raise InvalidMeasurement(
                    "no prompt can be sized: the server was started without a plain --max-model-len; add it to the profile, "
                    "or give prompt_tokens", reason=Reason.BAD_CONFIG)
            tokens = oracle.prompt_length(facts.pool_tokens, int(limit) - self.max_tokens, facts.block_size, budget)
        if "not-served" in self.expect.values() and facts.block_size and budget:
            _check_length(tokens, facts.block_size, budget)
        return Frame(slot, facts.pool_tokens, facts.block_size, tokens, int(tier * oracle.GIB))


@dataclass(frozen=True)
class Frame:
    """What is alike in all boots of a cell: the pool (tokens), its block, the prompts' length, the tier (bytes)."""

    slot: BootSlot
    pool_tokens: int
    block_size: int | None
    prompt_tokens: int
    tier_bytes: int

    def check(self, slot: BootSlot, facts: BootFacts) -> None:
        """Pools must be equal: evictors that fill one may not fill the other."""
        if differs := [f"{what} {getattr(self, what)} on {self.slot.arm} boot {self.slot.boot}, {getattr(facts, what)} on "
                       f"{slot.arm} boot {slot.boot}"
                       for what in ("pool_tokens", "block_size") if getattr(self, what) != getattr(facts, what)]:
            raise InvalidMeasurement(
                f"pools differ: {'; '.join(differs)}. Pin the pool in bytes (--kv-cache-memory-bytes) alike on all arms",
                reason=Reason.POOL_MISMATCH)


@dataclass(frozen=True)
class Sent:
    """A prompt that was answered, and the JIT lines that the server logged meanwhile."""

    prompt: Prompt
    reply: Reply
    jit_lines: int

    @property
    def timed(self) -> Timed:
        return Timed(self.reply.ttft_s, self.reply.cached_tokens, self.jit_lines)


@dataclass(frozen=True)
class Running:
    """One boot, and what is sent to it: prompts of `tokens` tokens, each known by its salt."""

    bench: Bench
    slot: BootSlot
    server: Server
    tokens: int
    max_tokens: int
    deadline_s: float
    ticks: Iterator[int] = field(default_factory=itertools.count)

    def warm_up(self, requests: int) -> Counts:
        """Send one other prompt `requests` times; the counters after it."""
        for i in range(requests):
            self.send("warm-up", f"warm-up {i + 1} of {requests}")
        return self.settled()

    def send(self, salt: str, what: str) -> Sent:
        self.bench.progress(f"{self.slot.arm} boot {self.slot.boot}: {what}, {self.tokens} tokens")
        prompt = self.bench.prompt(self.tokens, salt=f"offload-{salt}")
        compiled = self.server.facts.jit_lines
        reply = self.server.complete(prompt, max_tokens=self.max_tokens, deadline_s=self.deadline_s)
        if reply.prompt_tokens != prompt.tokens:
            raise InvalidMeasurement(f"{self.slot.arm} boot {self.slot.boot}, {prompt.tokens} tokens: the server counted "
                                     f"{reply.prompt_tokens} prompt tokens", reason=Reason.PROMPT_DIFFERS)
        return Sent(prompt, reply, self.server.facts.jit_lines - compiled)

    def settled(self) -> Counts:
        """Counters, once a further short request moves neither transfers nor hits: vLLM counts a transfer in an engine
        step after the one that ended it, and takes no step while it has no request."""
        counts = Counts.of(self.server.counters())
        for _ in range(TICKS):
            tick = self.bench.prompt(TICK_TOKENS, salt=f"offload-tick-{next(self.ticks)}")
            self.server.complete(tick, max_tokens=self.max_tokens, deadline_s=self.deadline_s)
            previous, counts = counts, Counts.of(self.server.counters())
            if counts == previous:
                return counts
        raise InvalidMeasurement(f"{self.slot.arm} boot {self.slot.boot}: the tier's counters still move after {TICKS} short "
                                 f"requests ({counts}); is another client using this server?", reason=Reason.FACTS_DIFFER)

    def rows(self, sent: Sent | None, *measured: Measurement) -> Iterator[Event]:
        """Rows with the boot's conditions and the request's; None: they are the whole boot's."""
        slot, workload = self.slot, {}
        if sent is not None:
            workload = {"prompt_sha256": sent.prompt.sha256, "prompt_tokens": sent.reply.prompt_tokens,
                        "cached_tokens": sent.reply.cached_tokens, "completion_tokens": sent.reply.completion_tokens,
                        "temperature": 0.0}
        conditions = {"arm": slot.arm, "boot": slot.boot, "pair": slot.pair, "order": slot.order, **workload,
                      **self.server.facts.conditions()}
        for measurement in measured:
            yield Tagged(measurement, conditions)


def _check_length(tokens: int, block: int, budget: int) -> None:
    """A length at which the unpatched tree is served too can show no arm not served."""
    if oracle.neighbours(tokens, block, budget):
        chunk = budget // block
        way_out = (f"leave prompt_tokens out, or change it by {block}" if chunk > 1 else
                   f"raise --max-num-batched-tokens to {2 * block} or more")
        raise InvalidMeasurement(
            f"a prompt of {tokens:,} tokens ({tokens // block} blocks of {block}, {chunk} a prefill chunk) leaves two Mamba "
            f"states in neighbouring blocks, and is served without the patch too; {way_out}", reason=Reason.BAD_CONFIG)


def _number(argv: Sequence[str], flag: str) -> float | None:
    """What the last `flag` of a vLLM command line says; None where there is none that is a plain number."""
    value = None
    for word, after in zip(argv, [*argv[1:], ""], strict=False):
        name, given, inline = word.partition("=")
        if name.replace("_", "-") == flag:
            value = inline if given else after
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None
