"""The measurements, one module each.  A job sees only a `farm.bench.Bench`."""

from __future__ import annotations

from jobs.boot import Boot
from jobs.offload import Offload
from jobs.prefill import Prefill
from jobs.replay import Replay
from jobs.triage import Triage
from jobs.unit import Unit

REGISTRY = {job.name: job for job in (Triage, Unit, Replay, Prefill, Offload, Boot)}
PLANNED: frozenset[str] = frozenset()  # named by matrices, not built yet: refused by name
