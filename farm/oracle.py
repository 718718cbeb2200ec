"""The offload oracle: is a prompt that has left the GPU's pool served from the CPU tier?

Pure.  First the sizes that make the question fair (how long a prompt, how many evictors, what
the tier must hold), then what one boot showed and what that is evidence of, then the cell's
verdict.  The published oracle asks for a fast second answer alone; here a boot is evidence only
where the counters say why it was fast, and nothing else could have made it so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from farm.errors import InvalidMeasurement
from farm.records import Outcome, Reason, Verdict

GIB = 2**30

# --- sizes ------------------------------------------------------------------------------------

SHARE = 0.6  # of the pool's tokens that one prompt takes: long enough to be timed, and it fits beside nothing else
EVICT = 1.5  # evictors' tokens over the pool's: its tokens are fewer than its blocks hold when state blocks are few
ROOM = 0.95  # of the tier's bytes: its slots are padded, so it is full before the counter of stored bytes says so


def neighbours(tokens: int, block: int, budget: int) -> bool:
    """Whether a prompt of `tokens` tokens leaves the tier two Mamba states in neighbouring blocks, under MTP in align mode.

    A state is kept at the end of each prefill chunk (floor(budget / block) blocks, `budget` tokens a step) and of the
    last full block but one.  Two in a row are what the unpatched lookup asks for: such a prompt is served without the
    patch too, and shows nothing (driven through vLLM 0.29.0's own connector: 6, 10, 14, 18 blocks at 4 a chunk).
    """
    chunk = budget // block
    return chunk < 2 or (tokens // block - 1) % chunk == 1


def prompt_length(pool_tokens: int, limit: int, block: int | None, budget: int | None) -> int:
    """Tokens of the prompt in question, for a pool and a longest prompt (`limit`), both in tokens.

    Where block and budget are known and a chunk is two blocks or more, the last state but the final block's ends a
    chunk, so that no two states are neighbours; half a block is left over, so that no length sits on an edge.
    """
    longest = min(int(SHARE * pool_tokens), limit)
    if block and budget and budget // block >= 2:
        chunk = budget // block * block
        if chunks := (longest - block - block // 2) // chunk:
            return chunks * chunk + block + block // 2
    return longest


def evictors(pool_tokens: int, prompt_tokens: int, bytes_per_prompt: float, tier_bytes: int) -> int:
    """How many other prompts of the same length push the first out of the pool: EVICT times the pool where the tier has
    room for it, else as many as fit there, but never less than the pool holds.  `bytes_per_prompt` 0: not measured.
    """
    wanted = math.ceil(EVICT * pool_tokens / prompt_tokens)
    if not bytes_per_prompt:
        return wanted
    fitting = int(ROOM * tier_bytes / bytes_per_prompt) - 2  # the warm-up's and the first's own
    return max(pool_tokens // prompt_tokens + 1, min(wanted, fitting))


def check_room(count: int, prompt_tokens: int, bytes_per_prompt: float, pool_tokens: int, tier_bytes: int) -> None:
    """Raise InvalidMeasurement (tier-overflow) where warm-up, prompt and `count` evictors will not all stay in the tier."""
    needed = (count + 2) * bytes_per_prompt
    if needed > ROOM * tier_bytes:
        tokens = int(tier_bytes / bytes_per_prompt * prompt_tokens)
        raise InvalidMeasurement(
            f"the tier of {tier_bytes:,} B holds {tokens:,} tokens at {bytes_per_prompt / prompt_tokens:,.0f} B each; the pool "
            f"holds {pool_tokens:,}, and {count + 2} prompts of {prompt_tokens:,} tokens are to stay in the tier: "
            f"{needed:,.0f} B. Serve with --kv-offloading-size={math.ceil(needed / ROOM / GIB)} or more, or pin a smaller pool",
            reason=Reason.TIER_OVERFLOW)


# --- what the server counts -------------------------------------------------------------------

# Exact names, the first that a server exports; the same in vLLM 0.28 to 0.33 (v1/metrics/loggers.py and
# offloading/metrics.py).  The deprecated kv_offload_total_bytes{transfer_type} is the same bytes: farm.metrics puts them
# under these names once.  kv_offload_cpu_cache_usage_perc counts pinned blocks, not resident ones: never asked for.
COUNTERS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "stored": ("vllm:kv_offload_store_bytes_total",),
    "loaded": ("vllm:kv_offload_load_bytes_total",),
    "external_hits": ("vllm:external_prefix_cache_hits_total",),
    "gpu_hits": ("vllm:prefix_cache_hits_total",),
})


@dataclass(frozen=True)
class Counts:
    """What has been counted up to a scrape, or between two: bytes to and from the tier, tokens hit in tier and pool."""

    stored: float
    loaded: float
    external_hits: float
    gpu_hits: float

    @classmethod
    def of(cls, counters: Mapping[str, float]) -> Counts:
        """Raises InvalidMeasurement (no-metrics) where one is not there: what is not counted is not 0."""
        found = {fact: next((n for n in names if n in counters), None) for fact, names in COUNTERS.items()}
        if absent := [" or ".join(COUNTERS[fact]) for fact, name in found.items() if name is None]:
            raise InvalidMeasurement(
                f"the server exports no {', no '.join(absent)}: serve with --kv-offloading-size and without "
                "--disable-log-stats; if this release has another name for it, add it to COUNTERS in farm/oracle.py",
                reason=Reason.NO_METRICS)
        return cls(**{fact: counters[name] for fact, name in found.items() if name is not None})

    def since(self, before: Counts) -> Counts:
        """Growth.  Raises InvalidMeasurement where a counter went back: the server restarted in between."""
        grown = {fact: getattr(self, fact) - getattr(before, fact) for fact in COUNTERS}
        if shrunk := [fact for fact, growth in grown.items() if growth < 0]:
            raise InvalidMeasurement(f"counter {COUNTERS[shrunk[0]][0]} went back between two scrapes: the server restarted in "
                                     "between; look for a second start in its log")
        return Counts(**grown)


# --- one boot ---------------------------------------------------------------------------------

INFLATED = 1.5  # the first answer's TTFT over the evictors' median, who are as long and as cold: a second reference then


@dataclass(frozen=True)
class Timed:
    """One of the two requests: seconds to its first token, tokens that came from any cache, JIT lines logged meanwhile."""

    ttft_s: float
    cached_tokens: int | None
    jit_lines: int = 0


@dataclass(frozen=True)
class Evidence:
    """What one boot showed.  `evictor_ttft_s` is the median of the evictors', None without any."""

    prompt_tokens: int
    cold: Timed
    again: Timed
    evictor_ttft_s: float | None
    stored_cold: float  # bytes that the first request alone brought into the tier
    stored: float  # bytes, all requests of the boot
    during_again: Counts
    tier_bytes: int

    @property
    def ratio(self) -> float:
        """TTFT of the second request over the first's; infinite where the first took no time."""
        return self.again.ttft_s / self.cold.ttft_s if self.cold.ttft_s > 0 else math.inf

    @property
    def inflated(self) -> float | None:
        """The first request's TTFT over the evictors', where it held more than its prefill; else None."""
        if self.evictor_ttft_s and self.cold.ttft_s > INFLATED * self.evictor_ttft_s:
            return self.cold.ttft_s / self.evictor_ttft_s
        return None

    @property
    def ratio_to_evictors(self) -> float:
        """TTFT of the second request over the evictors'; infinite without any."""
        return self.again.ttft_s / self.evictor_ttft_s if self.evictor_ttft_s else math.inf


@dataclass(frozen=True)
class Finding:
    """What a boot is evidence of: `served`, `not-served`, or of nothing (any other reason)."""

    reason: Reason
    detail: str

    @property
    def valid(self) -> bool:
        return self.reason in (Reason.SERVED, Reason.NOT_SERVED)


def judge_boot(seen: Evidence, ratio: float) -> Finding:
    """The first rule that is broken, else what the counters say.  `ratio`: a served prompt's TTFT is below it."""
    return _broken(seen, ratio) or _said(seen, ratio)


def _broken(seen: Evidence, ratio: float) -> Finding | None:
    cold, again = seen.cold, seen.during_again
    if cold.cached_tokens is None:
        return Finding(Reason.PROMPT_CACHED,
                       "the server does not report cached tokens; serve with --enable-prompt-tokens-details")
    if cold.cached_tokens:
        return Finding(Reason.PROMPT_CACHED,
                       f"{cold.cached_tokens:,} tokens of the first request came from a cache; it needs 0")
    if not seen.stored_cold:
        return Finding(Reason.NO_STORE,
                       f"the first request of {seen.prompt_tokens:,} tokens stored nothing in the tier; a prompt must be "
                       "longer than a block, and the connector must store what it sees once")
    if seen.stored > ROOM * seen.tier_bytes:
        return Finding(Reason.TIER_OVERFLOW,
                       f"{seen.stored:,.0f} B were stored in a tier of {seen.tier_bytes:,} B, so the prompt may have been "
                       "pushed out; raise --kv-offloading-size or use fewer evictors")
    if again.gpu_hits:
        return Finding(Reason.NOT_EVICTED,
                       f"{again.gpu_hits:,.0f} tokens of the second request were still in the GPU's pool (TTFT "
                       f"{cold.ttft_s:.3f} → {seen.again.ttft_s:.3f} s, {again.loaded:,.0f} B loaded); use more evictors")
    if cold.jit_lines:
        return Finding(Reason.COLD_JIT,
                       f"{cold.jit_lines} kernels were compiled during the first request, whose TTFT of {cold.ttft_s:.3f} s "
                       "is no reference; warm up longer")
    if seen.inflated and (seen.ratio < ratio) != (seen.ratio_to_evictors < ratio):
        return Finding(Reason.COLD_JIT,
                       f"the first request's TTFT of {cold.ttft_s:.3f} s is {seen.inflated:.1f} times the evictors', "
                       f"{seen.evictor_ttft_s:.3f} s, who are as long and as cold: it held more than its prefill, and the "
                       f"second request's is {seen.ratio:.2f} of the one and {seen.ratio_to_evictors:.2f} of the other, either "
                       f"side of {ratio:g}; warm up longer")
    return None


def _said(seen: Evidence, ratio: float) -> Finding:
    again, fast = seen.during_again, seen.ratio < ratio
    figures = (f"TTFT {seen.cold.ttft_s:.3f} → {seen.again.ttft_s:.3f} s, ratio {seen.ratio:.2f}, {again.loaded:,.0f} B "
               f"loaded, {again.external_hits:,.0f} tokens hit, {seen.stored:,.0f} B stored")
    if seen.inflated:
        figures += (f"; the first TTFT is {seen.inflated:.1f} times the evictors', of which the second is "
                    f"{seen.ratio_to_evictors:.2f}: the same finding")
    if again.loaded and again.external_hits:
        if fast:
            return Finding(Reason.SERVED, figures)
        if seen.again.jit_lines:
            return Finding(Reason.COLD_JIT, f"{seen.again.jit_lines} kernels were compiled while the prompt was served "
                                            f"({figures}); warm up longer")
        return Finding(Reason.WITHIN_NOISE, f"the tier served, but not below a ratio of {ratio:g} ({figures}); use a longer "
                                            "prompt, or set ratio to what this card's tier can reach")
    if again.loaded or again.external_hits:
        return Finding(Reason.FACTS_DIFFER,
                       f"hits and loads of the tier contradict each other ({figures}); read the server's log")
    if fast or seen.again.cached_tokens:
        return Finding(Reason.FACTS_DIFFER,
                       f"the second request was fast or cached ({seen.again.cached_tokens} tokens), and neither tier nor "
                       f"pool counted why ({figures}); read the server's log")
    return Finding(Reason.NOT_SERVED, figures)


# --- the cell ---------------------------------------------------------------------------------


def judge(found: Mapping[str, Sequence[Finding]], expect: Mapping[str, str], unproven: tuple[str, ...] = ()) -> Outcome:
    """The cell's verdict from each arm's boots, in order.  `expect` holds the reason that an arm's boots must show; an arm
    without one must be served where nothing is expected of any, else it is only recorded.

    Boots of one arm that disagree end `flaky`: FAIL where it had to be served, since it was not always; INVALID where
    it had to be not served, since a control that moves proves nothing.
    """
    for arm, findings in found.items():
        for boot, finding in enumerate(findings):
            if not finding.valid:
                return Outcome(Verdict.INVALID, finding.reason, f"{arm} boot {boot}: {finding.detail}", unproven)
    told = "; ".join(f"{arm} boot {boot} {f.reason.value}: {f.detail}"
                     for arm, findings in found.items() for boot, f in enumerate(findings))
    wanted = dict(expect) or dict.fromkeys(found, Reason.SERVED.value)
    if undecided := [arm for arm in found if arm not in wanted]:
        unproven = (*unproven, f"nothing was expected of {', '.join(undecided)}: recorded, not judged")
    seen = {arm: {f.reason for f in findings} for arm, findings in found.items() if arm in wanted}
    moving = [arm for arm, reasons in seen.items() if len(reasons) > 1]
    for arm in moving:
        if wanted[arm] == Reason.NOT_SERVED.value:
            return Outcome(Verdict.INVALID, Reason.FLAKY, f"{arm} must not be served, and its boots disagree: {told}", unproven)
    if moving:
        return Outcome(Verdict.FAIL, Reason.FLAKY, f"{moving[0]} must be served, and its boots disagree: {told}", unproven)
    wrong = {arm: reason for arm, [reason] in seen.items() if reason.value != wanted[arm]}
    if wrong:
        reason = Reason.NOT_SERVED if Reason.NOT_SERVED in wrong.values() else Reason.SERVED
        words = ", ".join(f"{arm} {r.value} where {wanted[arm]} was expected" for arm, r in wrong.items())
        return Outcome(Verdict.FAIL, reason, f"{words}. {told}", unproven)
    return Outcome(Verdict.PASS, Reason.AS_EXPECTED if expect else Reason.SERVED, told, unproven)
