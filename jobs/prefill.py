"""prefill: the long-prefill A/B.  What a long prompt takes of the KV pool, and for how long.

Each arm is booted in balanced order; each boot serves the same prompts, which are identical by hash in all arms and
boots.  A fresh one must find nothing cached (asserted).  One with a cached prefix is served just after its first tokens
were a prompt of their own, and must find cached what the boot's block size leads to (farm.geometry).  While a prompt is
prefilled the pool gauge is sampled, and short requests may be sent beside it (jobs.beside).

Recorded per request, with its cached tokens among the conditions: `kv_peak` and `kv_settle` (ratio of the pool, 0 to 1),
`ttft` (s), `prefill_tokens_per_s`, and the gauge's samples; of short requests `short_ttft` each, and `short_ttft_max` (s).
Boots with the probe (farm/probe) come after the others and record also what the engine held, exactly: `kv_peak_exact`
(ratio), `kv_peak_blocks`, `retained_states_before` and `retained_states_after` (the most state blocks of one request
around a retirement).  They decide nothing between the arms; where they disagree with the other boots, `unproven` says so.
With `repeats` each boot sends so many prompts of each length, all different, and counts with the median.
The rules that decide are `expect`, written in the matrix before the run; one with `probe: true` is about the probe's own
cost, and then boots with and without it take turns.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict

from farm.bench import Bench, BootFacts, BootSlot, Event, Needs, Server
from farm.errors import InvalidMeasurement
from farm.records import Measurement, Outcome, Reason, Sample, Tagged, Verdict, utc_now
from farm.stats import Comparison, Pair, Rule, compare, noise_floor, number, percent, relative_change
from jobs.beside import Concurrent, beside
from jobs.longprompt import Request, Seen, Workload, check_counts, conditions

Values = dict[tuple[str, Request], dict[str, list[float]]]  # by metric and request, then by arm: one value a boot


@dataclass(frozen=True)
class Expect:
    """One rule: the metric of the second arm against the first, for fresh prompts or for those with this `prefix`.

    `at` are prompt lengths (default all that there are).  `probe`: of each arm's boots with the probe against those without.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    metric: Literal["kv_peak", "ttft", "short_ttft_max"]
    direction: Literal["lower", "higher", "unchanged"]
    margin: float = 0.01  # relative
    at: tuple[int, ...] = ()
    prefix: int = 0
    probe: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.margin < math.inf:
            raise ValueError(f"margin {self.margin} must be a number, 0 or more")

    def covers(self, request: Request) -> bool:
        return request.prefix == self.prefix and (not self.at or request.prompt in self.at)

    def check(self, requests: tuple[Request, ...]) -> None:
        """Raise ValueError unless there are requests that the rule can judge."""
        there = [r.prompt for r in requests if r.prefix == self.prefix]
        if not there:
            raise ValueError(f"expect names a prefix that cached_prefix does not list: {self.prefix}" if self.prefix else
                             "expect judges fresh prompts, and prompts lists none: give the rule a prefix")
        if missing := sorted(set(self.at) - set(there)):
            where = f"cached_prefix does not list after a prefix of {self.prefix}" if self.prefix else "prompts does not list"
            raise ValueError(f"expect.at names lengths that {where}: {missing}")


@dataclass(frozen=True)
class Prefill:
    """Options: `prompts` (tokens), which are fresh; `cached_prefix`, a list of {prefix, prompt} (tokens); `repeats` of each
    in every boot; `boots` per arm, and after them `probe_boots` per arm; sampler `interval_s`, `settle_s` after a reply,
    `max_tokens` of each reply, `warmup_tokens` (a request before the first, so that JIT is in none), `concurrent` short
    requests beside each."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    prompts: tuple[int, ...] = ()
    cached_prefix: tuple[Request, ...] = ()
    concurrent: Concurrent | None = None
    repeats: int = 1
    boots: int = 2
    probe_boots: int = 0
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
        if not self.requests or min(r.prompt for r in self.requests) < 1:
            raise ValueError("prompts must list at least one length of one token or more")
        if len(set(self.prompts)) != len(self.prompts):
            raise ValueError("prompts lists a length twice: the second would be cached")
        for request in self.cached_prefix:
            request.check()
        if len({(r.prefix, r.prompt) for r in self.cached_prefix}) != len(self.cached_prefix):
            raise ValueError("cached_prefix lists a prefix and prompt twice: more of the second would be cached")
        finite = all(map(math.isfinite, (self.interval_s, self.deadline_s, self.settle_s)))
        if not finite or self.boots < 1 or self.interval_s <= 0 or self.deadline_s <= 0 or self.settle_s < 0:
            raise ValueError("boots, interval_s, deadline_s must be positive and settle_s not negative, none infinite")
        if self.max_tokens < 1 or self.repeats < 1 or self.warmup_tokens < 0 or self.probe_boots < 0:
            raise ValueError("max_tokens and repeats must be positive, warmup_tokens and probe_boots not negative")
        for rule in self.expect:
            rule.check(self.requests)
            if rule.probe and self.probe_boots != self.boots:
                raise ValueError(f"expect has a rule about the probe: give as many probe_boots as boots ({self.boots})")
            if rule.metric == "short_ttft_max" and self.concurrent is None:
                raise ValueError("expect names short_ttft_max, and no short requests are sent: give concurrent")

    @property
    def requests(self) -> tuple[Request, ...]:
        """In the order in which each boot serves them."""
        return (*map(Request, self.prompts), *self.cached_prefix)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and reply."""
        return max(r.prompt for r in self.requests) + self.max_tokens

    def run(self, bench: Bench) -> Iterator[Event]:
        arms = list(bench.arms)
        workloads = [Workload.of(request, self.concurrent, bench, number)
                     for request in self.requests for number in range(self.repeats)]
        values, watched = _values(), _values()  # of boots without the probe and with it
        first: tuple[BootSlot, BootFacts] | None = None
        for slot in self._slots(bench, arms):
            with bench.serve(slot) as server:
                if first is None:
                    first = (slot, server.facts)
                _check_boot(first, slot, server.facts)
                expected = {request: request.expected_cached(server.facts) for request in self.requests}
                self._warm_up(bench, server)
                found: dict[tuple[str, Request], list[float]] = defaultdict(list)
                for work in workloads:
                    bench.progress(f"{_name(slot)}: prefill of {work.request}")
                    seen = self._measure(slot, server, work)
                    yield from self._rows(slot, server, work, seen)
                    self._check(slot, work, seen, expected[work.request])
                    for metric, value in seen.values().items():
                        found[metric, work.request].append(value)
            for what, repeated in found.items():
                (watched if slot.probe else values)[what][slot.arm].append(statistics.median(repeated))
        yield self._judge(arms, values, watched)

    def _slots(self, bench: Bench, arms: list[str]) -> list[BootSlot]:
        """The balanced boots, then those with the probe, balanced too; in turn with them where a rule compares the two."""
        if any(rule.probe for rule in self.expect):
            sides = {f"{arm}{' with the probe' if probe else ''}": (arm, probe) for arm in arms for probe in (False, True)}
            turns = [(slot, *sides[slot.arm]) for slot in bench.order(list(sides), self.boots)]
            return [replace(slot, arm=arm, probe=probe, **{n: getattr(slot, n) + self.boots * probe for n in ("boot", "pair")})
                    for slot, arm, probe in turns]
        plain = bench.order(arms, self.boots)
        watched = bench.order(arms, self.probe_boots) if self.probe_boots else []
        return plain + [replace(slot, boot=self.boots + slot.boot, pair=self.boots + slot.pair,
                                order=len(plain) + slot.order, probe=True) for slot in watched]

    def _warm_up(self, bench: Bench, server: Server) -> None:
        if self.warmup_tokens:
            server.complete(bench.prompt(self.warmup_tokens, salt="warm-up"), max_tokens=self.max_tokens,
                            deadline_s=self.deadline_s)

    def _measure(self, slot: BootSlot, server: Server, work: Workload) -> Seen:
        if work.prefix is not None:
            reply = server.complete(work.prefix, max_tokens=self.max_tokens, deadline_s=self.deadline_s)
            check_counts(f"{_name(slot)}, the prefix of {work.prefix.tokens} tokens alone", work.prefix, reply, 0)
        began = utc_now()
        with server.sampled(self.gauge, self.interval_s) as sampling, server.probed() as probing, \
                beside(server, work.shorts, self.concurrent, self.deadline_s) as shorts:
            reply = server.complete(work.prompt, max_tokens=self.max_tokens, deadline_s=self.deadline_s)
        with server.sampled(self.gauge, self.interval_s) as settling:
            settling.wait(self.settle_s)
        return Seen(began, reply, sampling.trace(), settling.trace(),
                    tuple(short for short in shorts if short.sent_s < reply.ttft_s), probing.trace())

    def _rows(self, slot: BootSlot, server: Server, work: Workload, seen: Seen) -> Iterator[Event]:
        boot = {"arm": slot.arm, "boot": slot.boot, "pair": slot.pair, "order": slot.order, "started_utc": seen.began,
                **server.facts.conditions()}
        long = boot | conditions(work.prompt, seen.reply)
        for measured in seen.measurements(work.request):
            yield Tagged(measured, long)
        for short in seen.shorts:
            note = f"sent {short.sent_s:.3f} s into the prefill of {work.request}"
            yield Tagged(Measurement("short_ttft", short.reply.ttft_s, "s", 1, note=note),
                         boot | conditions(short.prompt, short.reply))
        for t_s, value in seen.peak.points:
            yield Tagged(Sample(self.gauge, t_s, value), long)

    def _check(self, slot: BootSlot, work: Workload, seen: Seen, cached: int) -> None:
        """Raise InvalidMeasurement where a rule of measuring is broken."""
        where = f"{_name(slot)}, {work.request}"
        check_counts(where, work.prompt, seen.reply, cached)
        for short in seen.shorts:
            check_counts(f"{where}, a short request beside it", short.prompt, short.reply, 0)
        if seen.peak.peak is None:
            raise InvalidMeasurement(
                f"{where}: no sample of {self.gauge} came back in {seen.reply.total_s:.1f} s ({seen.peak.missed} missed)",
                reason=Reason.NO_SAMPLES)
        if self.concurrent is not None and not seen.shorts:
            raise InvalidMeasurement(
                f"{where}: no short request was sent in the {seen.reply.ttft_s:.2f} s of the prefill; shorten "
                f"concurrent.interval_s ({self.concurrent.interval_s:g} s)", reason=Reason.NO_SAMPLES)
        if slot.probe and (seen.probe is None or not seen.probe.steps):
            says = "the server was booted without the probe" if seen.probe is None else "the probe saw no step of the engine"
            raise InvalidMeasurement(f"{where}: {says}, and rows of it were promised (probe_boots)",
                                     reason=Reason.MISSING_ROWS)

    def _judge(self, arms: list[str], values: Values, watched: Values) -> Outcome:
        unproven = tuple(self._unproven(arms, values, watched))
        said = list(self._compared(arms, values, watched))
        if said:
            worst = next((c for wanted in (Verdict.FAIL, Verdict.INVALID) for _, c in said if c.verdict is wanted), said[0][1])
            return Outcome(worst.verdict, worst.reason, " ".join(prefix + c.detail for prefix, c in said), unproven)
        if len(arms) < 2:
            return Outcome(Verdict.PASS, Reason.NO_REGRESSION, f"one arm ({arms[0]}): measured, nothing to compare", unproven)
        return Outcome(Verdict.PASS, Reason.NO_REGRESSION,
                       "measured; the matrix has no expect for this cell, so nothing was decided", unproven)

    def _compared(self, arms: list[str], values: Values, watched: Values) -> Iterator[tuple[str, Comparison]]:
        """Each rule at each request that it covers, and what it is about in words."""
        for rule in self.expect:
            for request in filter(rule.covers, self.requests):
                by_arm = values[rule.metric, request]
                if rule.probe:
                    for arm in arms:
                        yield f"{arm}, {request}: ", _compare(rule, by_arm[arm], watched[rule.metric, request][arm],
                                                              [by_arm[arm]], ("plain boots", "probe boots"))
                elif len(arms) > 1:
                    yield f"{request}: ", _compare(rule, by_arm[arms[0]], by_arm[arms[1]], list(by_arm.values()),
                                                   (arms[0], arms[1]))

    def _unproven(self, arms: list[str], values: Values, watched: Values) -> Iterator[str]:
        """What this cell did not show, in words, for the report."""
        yield f"only prompt lengths {', '.join(str(r) if r.prefix else str(r.prompt) for r in self.requests)} were run"
        if self.boots < 2 and len(arms) > 1:
            yield "one boot per arm: no noise floor"
        if self.concurrent is not None:
            yield f"nothing was measured without short requests (up to {self.concurrent.count}) beside it"
        judged = {(rule.metric, request) for rule in self.expect if rule.probe
                  for request in filter(rule.covers, self.requests)}
        yield from _disagreements(values, watched, judged)
        yield from _unseen(watched)


def _compare(rule: Expect, first: list[float], second: list[float], same: list[list[float]],
             names: tuple[str, str]) -> Comparison:
    pairs = [Pair(a, b) for a, b in zip(first, second, strict=True)]
    return compare(pairs, Rule(rule.metric, rule.direction, rule.margin), noise_floor(same), names)


def _values() -> Values:
    return defaultdict(lambda: defaultdict(list))


def _name(slot: BootSlot) -> str:
    return f"{slot.arm} boot {slot.boot}"


def _check_boot(first: tuple[BootSlot, BootFacts], slot: BootSlot, facts: BootFacts) -> None:
    """Pools must be equal: a ratio of two different pools compares nothing."""
    reference = first[1]
    differs = [
        f"{what} {getattr(reference, what)} on {_name(first[0])}, {getattr(facts, what)} on {_name(slot)}"
        for what in ("pool_tokens", "block_size") if getattr(reference, what) != getattr(facts, what)
    ]
    if facts.pool_tokens is None:
        raise InvalidMeasurement(
            f"{_name(slot)} did not say its pool's size, so pools cannot be compared; see the boot's gaps",
            reason=Reason.POOL_MISMATCH)
    if differs:
        raise InvalidMeasurement(
            f"pools differ: {'; '.join(differs)}. Pin the pool in bytes (--kv-cache-memory-bytes) alike on all arms",
            reason=Reason.POOL_MISMATCH)


def _disagreements(values: Values, watched: Values, judged: Collection[tuple[str, Request]]) -> Iterator[str]:
    """Where a metric of the probe's boots strays from the other boots' by more than those differ among themselves, and no
    rule of the matrix has `judged` that."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (metric, request), by_arm in watched.items():
        if (metric, request) not in values or (metric, request) in judged:  # no other boot knows the exact peak
            continue
        noise = noise_floor(list(values[metric, request].values()))
        for arm, seen in by_arm.items():
            mean = math.fsum(values[metric, request][arm]) / len(values[metric, request][arm])
            change, farthest = max((abs(relative_change(mean, value)), value) for value in seen)
            if change > (noise or 0.0) + 1e-9:  # rounding
                known = "not measured" if noise is None else percent(noise)
                found[metric, arm].append(f"{number(farthest)} against {number(mean)} at {request} (noise {known})")
    for (metric, arm), cases in found.items():
        yield f"{metric} of {arm} with the probe is not as without it: {'; '.join(cases)}"


def _unseen(watched: Values) -> Iterator[str]:
    """Where the gauge showed less than the engine held: it is read between steps, and a step that ends a request is never
    shown."""
    cases = [f"{number(gauge)} of {number(exact)} on {arm} at {request}"
             for (metric, request), by_arm in watched.items() if metric == "kv_peak_exact"
             for arm, peaks in by_arm.items()
             for gauge, exact in zip(watched["kv_peak", request][arm], peaks, strict=True) if gauge < exact - 1e-9]
    if cases:
        yield f"kv_peak is what the gauge showed; the engine held more: {'; '.join(cases)}"
