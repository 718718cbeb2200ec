"""Cells that each boot a played vLLM with a CPU tier and ask it for a while, by the real dispatch on real Ray actors.

What a machine has of memory is played too: so that a tier of a few MiB may be one too many.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import played
import ray
import roomfarm

from farm import folders, server, sweep
from farm.bench import Prompt
from farm.config import PinConfig
from farm.evidence import Span
from farm.hostmemory import Room, room
from farm.places import host_state
from farm.plan import ArmSpec, Cell, PinSpec, combine
from farm.profilefile import ProfileConfig
from farm.records import BootRow, Measurement, Outcome, Reason, Tagged, Verdict, utc_now
from farm.supervisor import regions
from farm.tiers import GIB
from farm.worker import Progress

PROMPT = Prompt((1, 2, 3), "0" * 64)
EVERY_S = 0.1
DEADLINE_S = 30.0  # of one answer


@dataclass(frozen=True)
class Serve:
    """One boot and requests for `seconds`; a line of JSON in `folder` once it serves, and another at the end."""

    folder: str
    seconds: float
    name: str = "prefill"
    serves: bool = True

    def run(self, bench):
        with bench.serve() as running:
            pids = running._child.processes()
            tell = {"cell": bench.cell, "attempt": bench.attempt, "worker": os.getpid(), "card": bench.card.uuid,
                    "server": running.pid, "supervisor": running._child.supervisor_pid, "regions": sorted(regions(pids))}
            self._say(tell | {"event": "serves"})
            longest, until = 0.0, time.monotonic() + self.seconds
            while (began := time.monotonic()) < until:
                running.complete(PROMPT, max_tokens=2, deadline_s=DEADLINE_S)
                longest = max(longest, time.monotonic() - began)
                time.sleep(EVERY_S)
            there = all(map(os.path.exists, tell["regions"]))
            self._say(tell | {"event": "ends", "regions_there": there})
        yield Tagged(Measurement("ttft", longest, "s"), {"arm": "patched"})
        yield Tagged(BootRow(True), {"arm": "patched", "boot": 0})
        yield Outcome(Verdict.PASS, Reason.AS_EXPECTED, "served")

    def _say(self, told):
        with open(Path(self.folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(told | {"t": time.time()}) + "\n")


class ServeBench:
    """What a Serve needs of one: a played server of the cell's profile, in its place of the spans."""

    def __init__(self, cell, attempt, card, spec, spans, progress):
        self.cell, self.attempt, self.card = cell, attempt, card
        self._spec, self._spans, self._progress = spec, spans, progress

    def serve(self):
        return _spanned(self._spec, self._spans, self._progress)


class _spanned:
    """A boot whose phases become spans, as LiveBench's do."""

    def __init__(self, spec, spans, progress):
        self._boot, self._spans, self._began = server.boot(spec, progress), spans, utc_now()

    def __enter__(self):
        running = self._boot.__enter__()
        self._end("boot")
        return running

    def __exit__(self, *exc):
        self._end("requests")
        swallowed = self._boot.__exit__(*exc)
        self._end("teardown")
        return swallowed

    def _end(self, kind):
        now = utc_now()
        self._spans.append(Span(kind, "patched", self._began, now))
        self._began = now


class Serving(roomfarm.Bare):
    """A worker for them.  The tree is in FARM_TEST_TREE; FARM_TEST_SHM is how many bytes its machine's /dev/shm plays."""

    def room(self):
        seen = room()
        if (shm := os.environ.get("FARM_TEST_SHM")) is None:
            return seen
        return Room(seen.machine, seen.host, seen.memory_bytes, seen.memory_free_bytes, int(shm), int(shm))

    def _measure(self, cell, evidence, spans, events):
        with folders.private() as folder:
            base = played.spec_of(Path(os.environ["FARM_TEST_TREE"]), folder, evidence.info.run, "engine")
            spec = dataclasses.replace(
                base, args=(*cell.profile_config.args, *cell.arms[0].args), card=self._card,
                records=sweep.records(host_state()),
                env={**base.env, "FARM_CELL": cell.id, **self._keeper.marks}, stall_s=60.0, deadline_s=90.0, canary_s=60.0)
            bench = ServeBench(cell.id, evidence.attempt, self._card, spec, spans, lambda text: events.put(Progress(text)))
            return roomfarm.driven(cell.job, bench, evidence, events)


def by_value():
    """The actors cannot import these files: their classes travel whole."""
    roomfarm.by_value()
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.cloudpickle.register_pickle_by_value(played)


def cells(room, count, seconds, tier_bytes=None):
    """Cells with a tier of so many bytes, or of what `tier_bytes` says for each."""
    sizes = tier_bytes if isinstance(tier_bytes, list) else [tier_bytes] * count
    return [_cell(room, number, seconds, size) for number, size in enumerate(sizes)]


def _cell(room, number, seconds, tier_bytes):
    job = Serve(str(room.told), seconds)
    args = () if tier_bytes is None else (f"--kv-offloading-size={tier_bytes / GIB}",)
    profile = ProfileConfig(model={"tiny": "qwen3_5-gpu"}, args=args)
    pin = PinSpec("p", PinConfig(version="0.29.0", flavour="cpu"))
    return Cell(f"cell-{number:03}", job, None, pin, "played", profile, (ArmSpec("patched", ()),), {},
                combine(profile.needs.needs(), None), number, "5e")
