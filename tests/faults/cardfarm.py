"""A farm's use of cards in a process of its own: the real worker, its keeper and locks; only the cards are played.

    python cardfarm.py alone|ray RUN CELLS SECONDS FOLDER BUSY_WAIT_S QUARANTINE_AFTER QUARANTINE_S

runs CELLS cells of SECONDS on CPU slot 1 of 1, played by a file in TEST_PLAYED_CARDS (tests/playedcard.py), in the host
state FARM_HOST_STATE, and prints a JSON line for each event.  `alone`: the worker, one cell after another; `ray`: the
whole dispatch on a Ray of its own, rows in FOLDER/results-RUN.  While a cell measures, FOLDER/on-card-N has the process
ids of its worker and of the server that it has started.
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from playedcard import PlayedWorker

from farm import worker
from farm.bench import Needs
from farm.config import PinConfig
from farm.evidence import Policy, RunInfo
from farm.lifeline import Supervised
from farm.plan import Cell, PinSpec
from farm.records import Outcome, Reason, Verdict
from farm.supervisor import started
from farm.worker import Ended, Progress, Seat


class WitnessJob:
    """Has the card's witness file for itself while it measures: a second one at the same time cannot make it."""

    name = "prefill"

    def __init__(self, folder, seconds):
        self._folder, self._seconds = Path(folder), seconds

    def run(self, bench):
        witness = self._folder / f"on-card-{bench.card.index + 1}"
        try:
            file = os.open(witness, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            others = witness.read_text().split()
            if len(others) < 2 or any(started(int(pid)) is not None for pid in others):
                yield Outcome(Verdict.FAIL, Reason.CHANGED, f"processes {others} are on the card too")
                return
            file = os.open(witness, os.O_WRONLY | os.O_TRUNC)  # of one that was killed
        with bench.server() as pid:
            os.write(file, f"{os.getpid()} {pid}".encode())
            os.close(file)
            bench.progress("measuring")
            time.sleep(self._seconds)
        witness.unlink()
        yield Outcome(Verdict.PASS, Reason.AS_EXPECTED, "alone")


class CardBench:
    """In the place of LiveBench: no pin, no tree, no server."""

    moment = None

    def __init__(self, card, progress, marks):
        self.card, self.progress, self._marks = card, progress, marks

    @classmethod
    def prepare(cls, workshop, cell, card, evidence, spans, *, emit, progress, keeper, policy):
        return cls(card, progress, keeper.marks)

    @contextmanager
    def server(self):
        """Its pid: a child under a supervisor, with the card's mark.  TEST_STUBBORN: it does not end when it is asked to."""
        trap = "trap '' TERM; " if os.environ.get("TEST_STUBBORN") else ""
        env = {"PATH": os.environ["PATH"], **self._marks}
        argv = ["sh", "-c", f"{trap}while :; do sleep 0.1; done"]
        with Supervised.start(argv, env=env, cwd="/", stdout_path=os.devnull) as child:
            yield child.pid

    def prove_trees(self):
        pass


class CardWorker(PlayedWorker):
    def __init__(self, *args):
        super().__init__(*args)
        worker.LiveBench = CardBench  # here: in an actor too


def cell(number, job):
    return Cell(f"cell-{number}", job, None, PinSpec("p", PinConfig(version="0.29.0", flavour="cpu")), None, None, (), {},
                Needs(), 1, "5e")


class Said:
    """A watcher that prints."""

    def event(self, card, cell, text):
        say(event="progress", text=text, cell=cell, card=card)

    def finished(self, cell, outcome):
        say(event="ended", verdict=outcome.verdict.value, reason=outcome.reason.value, cell=cell, detail=outcome.detail)


def alone(run, cells, policy):
    made = CardWorker(Seat("node", "cpu", 0, 1), RunInfo(run, None, None), os.environ["FARM_CACHE"], policy)
    for one in cells:
        for event in made.run(one, 1):
            if isinstance(event, Progress):
                Said().event(made.card().name, one.id, event.text)
            elif isinstance(event, Ended):
                Said().finished(one.id, event.outcome)


def by_ray(run, cells, policy, results):
    from farm import dispatch
    from farm.store import Store

    dispatch.Worker = CardWorker
    with dispatch.attached(None):
        dispatch.run_cells(cells, RunInfo(run, None, None), Store.open(results), Said(), cpu_slots=1, attempts=2,
                           cache=os.environ["FARM_CACHE"], opened=lambda *_: None, policy=policy)


def main(how, run, cells, seconds, folder, busy_wait_s, quarantine_after, quarantine_s):
    wanted = [cell(number, WitnessJob(folder, float(seconds))) for number in range(int(cells))]
    policy = Policy(float(busy_wait_s), int(quarantine_after), float(quarantine_s))
    if how == "alone":
        alone(run, wanted, policy)
    else:
        by_ray(run, wanted, policy, Path(folder) / f"results-{run}")


def say(**event):
    print(json.dumps({"t": time.monotonic(), **event}), flush=True)


if __name__ == "__main__":
    from cardfarm import main as by_name  # so that its classes are pickled by a name that actors can import

    by_name(*sys.argv[1:])
