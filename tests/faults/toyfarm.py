"""`python toyfarm.py VERB …` is `farm VERB …` with a job that measures nothing and takes as long as it is told.

Everything but the bench is real: preflight, trees, Ray, actors, supervised children, the store, the report.  A cell of
the job `toy` starts a child that starts another one in a session of its own, as vLLM does, so orphans would be seen.

TOY_GATE names a file that cells from TOY_GATE_FROM on wait for in their middle.
TOY_PAUSE names a phase in which the driver waits for TOY_PAUSE_S seconds after it has written TOY_MARKER:
preflight, cluster (before Ray starts), compaction, rendering.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jobs
from farm import worker
from farm.bench import Needs
from farm.lifeline import Supervised
from farm.records import Measurement, Outcome, Reason, Sample, Tagged, Verdict

CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'], " \
        "start_new_session=True); time.sleep(120)"
ROWS = 5


@dataclass(frozen=True)
class Toy:
    """Options: `number` tells cells apart, `seconds` is how long one takes, `weight` how many bytes its note has."""

    number: int
    seconds: float = 0.5
    weight: int = 10

    name: ClassVar[str] = "toy"
    needs: ClassVar[Needs] = Needs()

    def run(self, bench: ToyBench):
        with bench.child():
            for n in range(ROWS):
                value = bench.rng.random()
                yield Tagged(Measurement("kv_peak", value, "ratio", note="x" * self.weight), {"pair": n})
                yield Tagged(Sample("kv", float(n), value), {"pair": n})
                bench.progress(f"row {n}")
                time.sleep(self.seconds / ROWS)
            _gate(self.number)
        yield Outcome(Verdict.FAIL if self.number % 4 == 3 else Verdict.PASS, Reason.AS_EXPECTED, f"toy {self.number}")


def _gate(number: int) -> None:
    file, deadline = os.environ.get("TOY_GATE"), time.monotonic() + 100.0
    while file and number >= int(os.environ["TOY_GATE_FROM"]) and not Path(file).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


class ToyBench:
    """In the place of farm.livebench.LiveBench: no environment, no tree, no server."""

    moment = None

    def __init__(self, workshop: Any, cell: Any, evidence: Any, progress: Callable[[str], None]) -> None:
        self.progress, self.rng = progress, random.Random(cell.seed)
        self._marks, self._scratch = {"FARM_RUN": evidence.info.run, "FARM_CELL": cell.id}, workshop.root

    @classmethod
    def prepare(cls, workshop: Any, cell: Any, card: Any, evidence: Any, *_: Any, progress: Any, **__: Any) -> ToyBench:
        return cls(workshop, cell, evidence, progress)

    @contextmanager
    def child(self):
        with Supervised.start([sys.executable, "-c", CHILD], env={"PATH": os.environ["PATH"], **self._marks},
                              cwd=self._scratch, stdout_path=self._scratch / "child.log"):
            yield

    def prove_trees(self) -> None:
        pass


class ToyWorker(worker.Worker):
    """Pickled by its name, so that an actor imports this file, and with it the bench above."""


worker.LiveBench = ToyBench
jobs.REGISTRY[Toy.name] = Toy


def main() -> None:
    from farm import cli

    cli.quiet_ray()  # as the verb does, before it imports Ray
    from farm import dispatch, matrix
    from farm.store import Store

    dispatch.Worker = ToyWorker
    for phase, place, name in (("preflight", matrix, "preflight"), ("cluster", dispatch, "attached"),
                               ("compaction", Store, "compact"), ("rendering", matrix, "render_terminal")):
        if os.environ.get("TOY_PAUSE") == phase:
            setattr(place, name, _paused(getattr(place, name)))
    cli.main()


def _paused(function: Callable[..., Any]) -> Callable[..., Any]:
    def waits(*args: Any, **more: Any) -> Any:
        Path(os.environ["TOY_MARKER"]).touch()
        time.sleep(float(os.environ.get("TOY_PAUSE_S", "2")))
        return function(*args, **more)

    return waits


if __name__ == "__main__":
    from toyfarm import main as by_name  # so that its classes are pickled by a name that actors can import

    by_name()
