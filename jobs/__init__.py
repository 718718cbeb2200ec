"""The measurements, one module each.  A job sees only a `farm.bench.Bench`."""

from __future__ import annotations

from jobs.prefill import Prefill
from jobs.replay import Replay
from jobs.unit import Unit

REGISTRY = {job.name: job for job in (Unit, Replay, Prefill)}
PLANNED = frozenset({"offload"})  # named by matrices, not built yet: refused by name
