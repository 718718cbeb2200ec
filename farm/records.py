"""What a measurement is: verdicts, reason codes, and the records that a job yields.

Pure, and light to import: neither Ray, vLLM nor Arrow.  `farm.schemas` makes
rows of records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """What a cell ended with.  PASS and FAIL alone are evidence about a tree."""

    PASS = "PASS"
    FAIL = "FAIL"
    INVALID = "INVALID"
    ERROR = "ERROR"
    SKIP = "SKIP"


class Reason(str, Enum):
    """Why.  Stable codes: dashboards and scripts match on them."""

    # PASS, FAIL
    AS_EXPECTED = "as-expected"
    NO_REGRESSION = "no-regression"
    TESTS_BROKEN = "tests-broken"
    FAILING_SET_DIFFERS = "failing-set-differs"
    FLAKY = "flaky"
    EFFECT_ABSENT = "effect-absent"
    EFFECT_WRONG_WAY = "effect-wrong-way"
    CHANGED = "changed"
    TREE_FAILED = "tree-failed"
    SERIES_BROKEN = "series-broken"
    UNKNOWN_KNOB = "unknown-knob"
    CONTROL_HELD = "control-held"
    SERVED = "served"
    NOT_SERVED = "not-served"
    # INVALID
    TIER_OVERFLOW = "tier-overflow"
    NOT_EVICTED = "not-evicted"
    COLD_JIT = "cold-jit"
    NO_STORE = "no-store"
    NO_METRICS = "no-metrics"
    FACTS_DIFFER = "facts-differ"
    POOL_MISMATCH = "pool-mismatch"
    PROMPT_CACHED = "prompt-cached"
    PROMPT_DIFFERS = "prompt-differs"
    NO_SAMPLES = "no-samples"
    MISSING_ROWS = "missing-rows"
    MORE_BOOTS_NEEDED = "more-boots-needed"
    WITHIN_NOISE = "within-noise"
    WRONG_TREE = "wrong-tree"
    WRONG_CARD = "wrong-card"
    NO_CHANGE = "no-change"
    REFUSED_CONFIG = "refused-config"
    BAD_CONFIG = "bad-config"
    CONTROL_MISSED = "control-missed"
    # ERROR
    FARM_ERROR = "farm-error"
    ENV_BUILD_FAILED = "env-build-failed"
    BOOT_DIED = "boot-died"
    BOOT_STALLED = "boot-stalled"
    CANARY_FAILED = "canary-failed"
    SERVER_LOST = "server-lost"
    REQUEST_FAILED = "request-failed"
    TESTS_CRASHED = "tests-crashed"
    ACTOR_DIED = "actor-died"
    PORT_TAKEN = "port-taken"
    NO_CARD = "no-card"
    MEMORY_HELD = "memory-held"
    CARD_BUSY = "card-busy"
    CARD_CHANGED = "card-changed"
    CARD_UNHEALTHY = "card-unhealthy"
    CARD_LOST = "card-lost"
    NODE_DIED = "node-died"
    TESTS_STALLED = "tests-stalled"
    ENGINE_DEAD = "engine-dead"
    SERVER_SILENT = "server-silent"
    ISOLATION_MISSING = "isolation-missing"
    # SKIP
    NEEDS_UNMET = "needs-unmet"


def exit_code(verdicts: list[Verdict]) -> int:
    """0 all PASS or SKIP, 1 any FAIL, 2 any INVALID or ERROR (FAIL wins: it is evidence)."""
    if Verdict.FAIL in verdicts:
        return 1
    if any(v in (Verdict.INVALID, Verdict.ERROR) for v in verdicts):
        return 2
    return 0


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


# --- records: what a job yields -------------------------------------------------------------


@dataclass(frozen=True)
class BootRow:
    """One start of a server: one observation.  Facts are in the boot conditions."""

    ok: bool
    log_tail: str | None = None
    gaps: tuple[str, ...] = ()  # facts whose wording the log parser did not know
    teardown_s: float | None = None


@dataclass(frozen=True)
class Measurement:
    """One value.  `unit` is the field's unit: s, tokens, blocks, ratio (0 to 1), B, count."""

    metric: str
    value: float | None
    unit: str
    n: int | None = None  # how many samples or requests are behind the value
    interval_s: float | None = None  # sampler interval where the value came from sampling
    note: str | None = None


@dataclass(frozen=True)
class Sample:
    """One scrape: seconds since the request began, and the gauge's value."""

    metric: str
    t_s: float
    value: float


@dataclass(frozen=True)
class TestRow:
    """One test's outcome on one arm.  outcome: passed, failed, error, skipped, xfailed, xpassed,
    crashed (its process died), timeout, missing (promised and never reported)."""

    __test__ = False

    suite: str
    nodeid: str
    outcome: str
    duration_s: float | None = None
    message: str | None = None
    round: int = 0


@dataclass(frozen=True)
class PatchRow:
    """How one patch of a tree applied, or in a triage fared."""

    patch: str
    sha256: str
    position: int
    hunks: int
    offset_hunks: int
    max_offset: int
    files: tuple[str, ...]
    status: str | None = None  # of a triage, and what it found
    detail: str | None = None


@dataclass(frozen=True)
class Outcome:
    """A cell's end.  `detail` is one or a few plain sentences with the next step."""

    verdict: Verdict
    reason: Reason
    detail: str
    unproven: tuple[str, ...] = ()


Record = BootRow | Measurement | Sample | TestRow | PatchRow | Outcome


@dataclass(frozen=True)
class Tagged:
    """A record with the conditions that only the job knows: arm, pair, order, boot, workload.

    `conditions` keys must be columns of CONDITIONS; `stamp` refuses others.
    """

    record: Record
    conditions: Mapping[str, Any] = field(default_factory=dict)
