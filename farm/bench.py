"""The contract between farm/ and jobs/: all that a job sees of the world.

Pure: protocols and value types only.  The worker hands a job a real bench
(`farm.livebench`), a job's test hands it a fake one; neither Ray, paths nor
processes show through.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from farm.records import BootRow, Measurement, Outcome, PatchRow, Reason, Sample, Tagged, TestRow

Event = Tagged | Outcome


@dataclass(frozen=True)
class Needs:
    """What a job or a profile needs of a card; a card without it makes the cell SKIP."""

    cuda: bool = False
    min_capability: tuple[int, int] | None = None
    min_memory_bytes: int | None = None
    own_card: bool = True  # False: may share its card with another cell (no server, no timing)
    sandbox: bool = False  # runs a tree's code, and the matrix asks for isolation


@dataclass(frozen=True)
class Card:
    """One GPU, or the CPU slot that plays one.  Facts a card cannot have are None."""

    uuid: str
    name: str
    kind: str  # cuda, cpu
    host: str
    index: int = 0
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    driver: str | None = None
    cores: tuple[int, ...] = ()  # CPU slots: the cores that a server of this slot may use
    facts: Mapping[str, Any] = field(default_factory=dict)  # columns of schemas.CARD
    unsafe: str | None = None  # why its machine can make no sandbox, where the run asks for them (farm.isolation)


@dataclass(frozen=True)
class Arm:
    """One side of an A/B: a tree (pin + patches) and environment."""

    name: str
    tree: str  # content hash
    patches: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BootFacts:
    """What a server said of itself while it booted (DOMAIN.md 2).  None: it did not say."""

    pool_tokens: int | None = None
    pool_pinned: bool | None = None
    block_size: int | None = None
    mamba_padding_percent: float | None = None
    backend: str | None = None
    kv_layout: str | None = None
    connector: str | None = None
    jit_lines: int = 0
    unknown_knobs: tuple[str, ...] = ()
    boot_s: float | None = None
    caches: str | None = None  # warm, cold, seeded
    probe: bool = False
    cards_seen: tuple[str, ...] | None = None  # UUIDs, as the engine sees them from inside
    card_processes: int | None = None  # of the server's, those that NVML lists on its card; None: its list cannot be read
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    gaps: tuple[str, ...] = ()

    CONDITIONS: ClassVar[tuple[str, ...]] = (
        "pool_tokens", "pool_pinned", "block_size", "mamba_padding_percent", "backend", "kv_layout", "connector",
        "boot_s", "caches", "probe", "cards_seen", "card_processes", "jit_lines", "unknown_knobs", "argv", "env",
    )

    def conditions(self) -> dict[str, Any]:
        """The columns of schemas.BOOT and schemas.SERVING that these facts fill."""
        values = {name: getattr(self, name) for name in self.CONDITIONS}
        return {k: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v
                for k, v in values.items()}


@dataclass(frozen=True)
class Prompt:
    """A prompt of exactly `tokens` tokens for the profile's tokenizer; `sha256` of its token ids."""

    token_ids: tuple[int, ...]
    sha256: str

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Reply:
    """One finished request.  Token counts are the server's usage, never counted chunks."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None  # None: the server did not say
    text: str = ""


@dataclass(frozen=True)
class GaugeTrace:
    """A gauge sampled during a request: (seconds since start, value) pairs, and the achieved interval."""

    metric: str
    points: tuple[tuple[float, float], ...]
    interval_s: float | None  # median spacing of scrapes that came back
    missed: int = 0  # scrapes that failed or timed out

    @property
    def peak(self) -> float | None:
        return max((v for _, v in self.points), default=None)


@dataclass(frozen=True)
class ProbeTrace:
    """What the probe in the engine saw between two moments: exact, at every engine step (farm/probe).

    `peak_blocks` of `pool_blocks` usable ones (the null block is none) gives `peak`, the ratio that
    `vllm:kv_cache_usage_perc` would read.  `retained_before` and `retained_after` are the most state blocks that one
    request held (non-null entries of its fullest Mamba group's table) just before and just after a retirement; None
    where no Mamba group is served.
    """

    steps: int
    pool_blocks: int
    peak_blocks: int
    retained_before: int | None
    retained_after: int | None
    requests: int

    @property
    def peak(self) -> float:
        return self.peak_blocks / self.pool_blocks


class Probing(Protocol):
    def trace(self) -> ProbeTrace | None:
        """What was seen while the block ran; call after it has ended.  None: the server was booted without the probe."""


class Server(Protocol):
    """A healthy server of one arm; torn down when its context ends."""

    @property
    def facts(self) -> BootFacts: ...

    def complete(self, prompt: Prompt, *, max_tokens: int, seed: int | None = None, temperature: float = 0.0,
                 deadline_s: float) -> Reply:
        """One streamed completion.  May be called from several threads at once (jobs.beside): each call has a connection of
        its own.  Raises RequestFailed or ServerLost."""

    def sampled(self, gauge: str, interval_s: float) -> AbstractContextManager[Sampling]:
        """Sample a gauge (Prometheus name) while the block runs."""

    def probed(self) -> AbstractContextManager[Probing]:
        """Take what the probe sees while the block runs."""

    def counters(self) -> Mapping[str, float]:
        """One scrape: value per metric name, summed over engines."""


class Sampling(Protocol):
    def wait(self, seconds: float) -> None:
        """Let the sampler run for `seconds` with nothing else to do."""

    def trace(self) -> GaugeTrace:
        """What has been sampled; call after the block has ended."""


@dataclass(frozen=True)
class BootSlot:
    """One boot of the balanced order: `pair` counts from 0, `order` is the place in the whole sequence."""

    arm: str
    boot: int  # per arm, from 0
    pair: int
    order: int
    probe: bool = False  # boot with the probe on; such a boot's rows say so and decide nothing


@dataclass(frozen=True)
class Suite:
    """A set of tests to run on one arm.

    source `pin`: vLLM's own tests from the sdist of the cell's pin; `newer`:
    single tests, by node id, from the sdist of `version`, grafted onto the
    pin's own file; `series`: the regression tests of patches/tests.
    `select` holds node ids or paths relative to the source's root.  `side_by_side`
    runs it on all arms at once: for tests that leave the card's memory alone.
    """

    name: str
    source: str
    select: tuple[str, ...] = ()
    version: str | None = None
    marker: str | None = None
    keyword: str | None = None
    workers: int = 2
    timeout_s: float = 120.0  # per test
    deadline_s: float = 1800.0  # whole suite
    side_by_side: bool = False


@dataclass(frozen=True)
class TestRun:
    """All outcomes of one suite on one arm.  `complete` is False where the process died early; the
    tests that it had promised are then in `outcomes` as `crashed` or `missing`."""

    __test__ = False

    outcomes: tuple[TestRow, ...]
    complete: bool
    vllm_path: str | None  # package that the tests really imported
    note: str | None = None
    cut: Reason | None = None  # what ended it from outside: the suite's deadline (tests-stalled), SIGKILL (tests-crashed)


@dataclass(frozen=True)
class PatchTriage:
    """How one patch of the pin's series fares on the pin's pristine package (farm.triage).

    `status` is a word of the triage table, `good` whether the series stands with it.  `claim` is the release that the
    patch's own header names as the first to carry its change (`Applied-Upstream`), where this pin is that old or newer;
    `traces` is what the release's source shows of it.
    """

    row: PatchRow
    good: bool
    upstream: bool = False
    moved: bool = False
    claim: str | None = None
    traces: tuple[str, ...] = ()


@runtime_checkable
class Bench(Protocol):
    """The whole world of a job."""

    card: Card
    pin: str  # name, e.g. 0.29.0-cpu
    version: str  # e.g. 0.29.0
    profile: str | None
    arms: Mapping[str, Arm]
    rng: random.Random  # seeded from the cell id
    cell: str

    def serve(self, slot: BootSlot) -> AbstractContextManager[Server]:
        """Boot a healthy server of the slot's arm.  The bench itself writes the boot's row, whatever happens.

        Raises BootFailure, RefusedConfig.
        """

    def pytest(self, arm: str, suite: Suite) -> TestRun:
        """Run a suite in the arm's tree.  Raises TestProcessLost, InvalidMeasurement (wrong tree)."""

    def python(self, arm: str, code: str, args: Mapping[str, Any], *, timeout_s: float) -> Iterator[Mapping[str, Any]]:
        """Run a script in the arm's tree: `args` as JSON on its stdin, each JSON line it prints is yielded.

        Raises TreeFailure where the script itself ends in an exception, InvalidMeasurement for a wrong tree.
        """

    def triage(self) -> Sequence[PatchTriage]:
        """The whole series on this pin's pristine package, patch by patch, in its order."""

    def order(self, arms: Sequence[str], boots: int) -> list[BootSlot]:
        """The balanced boot order: A B, then B A, and so on in turn, `boots` boots an arm."""

    def prompt(self, tokens: int, *, salt: str) -> Prompt:
        """A deterministic prompt, the same for the same salt, sharing no block with another salt's."""

    def progress(self, text: str) -> None:
        """A line for whoever watches: what is being done now."""


def balanced_order(arms: Sequence[str], boots: int) -> list[BootSlot]:
    """A B, then B A, and so on in turn: warmth and drift fall on both arms alike."""
    slots: list[BootSlot] = []
    for pair in range(boots):
        turn = arms if pair % 2 == 0 else list(reversed(arms))
        slots += [BootSlot(arm, pair, pair, len(slots) + place) for place, arm in enumerate(turn)]
    return slots


class Job(Protocol):
    """A way of measuring.  Implemented by frozen dataclasses in jobs/, whose fields are the options
    that a matrix may give under `with:`."""

    name: ClassVar[str]
    needs: ClassVar[Needs]

    def run(self, bench: Bench) -> Iterator[Event]:
        """Yield records as they happen and one Outcome as the last event."""


__all__ = [
    "Arm", "Bench", "BootFacts", "BootRow", "BootSlot", "Card", "Event", "GaugeTrace", "Job", "Measurement", "Needs",
    "Outcome", "PatchTriage", "Prompt", "Reply", "Sample", "Sampling", "Server", "Suite", "Tagged", "TestRow", "TestRun",
    "balanced_order",
]
