"""The measurements, one module each.  A job sees only a `farm.bench.Bench`."""

from __future__ import annotations

from jobs.boot import Boot
from jobs.prefill import Prefill
from jobs.replay import Replay
from jobs.triage import Triage
from jobs.unit import Unit

REGISTRY = {job.name: job for job in (Triage, Unit, Replay, Prefill, Boot)}
PLANNED = frozenset({"offload"})  # named by matrices, not built yet: refused by name
