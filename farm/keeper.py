"""Keeps one card for one run: has it alone, lets a boot begin only where it is idle and as it was, knows whether it works.

    with keeper.held(cell.id, progress):            # around an attempt
        keeper.ready(interpreter, progress)         # before its first use: idle, unchanged, probed
        before = keeper.gate(progress)              # before each boot
        …
        keeper.wait_memory_back(before)             # after it
        judged = keeper.judged(outcome, cell.id)    # whose making was it?

What waits is bounded by the matrix's `cards.busy_wait_s`.  A foreign process is named, and never signalled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farm import health
from farm.cardlock import POLL_S, TELL_EVERY_S, CardLock, Held, Holder, duration
from farm.cardprobe import CardProbe
from farm.cards import Client, Reading
from farm.errors import FarmError, InvalidMeasurement
from farm.evidence import Policy
from farm.health import Blame, Interpreter
from farm.quarantine import CardError, Journal, Quarantine, Start
from farm.records import Outcome, Reason, Verdict, utc_now
from farm.supervisor import carrying, descendants

Progress = Callable[[str], None]

IDLE_BYTES, IDLE_SHARE = 2**30, 0.05  # memory in use on an idle card, the larger: its driver's own, and a desktop's
SLACK_BYTES = 64 * 2**20  # what a driver may keep of a process that has ended
SLACK_W = 0.5
SETTLES_S = 10.0  # after the end of a server, its memory may still be on its way back
CARD_MARK = "FARM_CARD"  # environment variable of all that is started on a card


@dataclass(frozen=True)
class Judged:
    """An attempt's outcome once the card was asked, and the quarantine that it led to."""

    outcome: Outcome
    quarantine: Quarantine | None = None


class Keeper:
    """One card of one worker.  `state` is the host's folder, see farm.places.host_state.

    Raises FarmError: card-lost, or that the folder cannot be used.
    """

    def __init__(self, probe: CardProbe, state: Path, policy: Policy, run: str) -> None:
        self.card = probe.card
        self._probe, self._policy, self._run = probe, policy, run
        self._lock = CardLock(state, self.card.uuid)
        # What a farm with another host state starts is no client: the two know nothing of each other.
        self.marks = {CARD_MARK: f"{self.card.uuid} {state.resolve()}"}
        self._journal = Journal(state, self.card.uuid, self.card.name)
        now = probe.reading()
        self._errors_before = now.uncorrected_errors
        self._start = self._journal.opened(run, Start(now.power_limit_w, now.driver))
        self._interpreter: Interpreter | None = None  # of the attempt that goes on
        self._proved = False  # a probe has passed, and nothing since was suspect
        self._still_held: Callable[[], bool] = lambda: True

    def standing(self) -> Quarantine | None:
        """The quarantine in force.  One that is over is none: a probe decides at the next use."""
        quarantine = self._journal.history().quarantine
        return None if quarantine is None or quarantine.over else quarantine

    # --- alone ------------------------------------------------------------------------------------

    @contextmanager
    def held(self, cell: str, progress: Progress) -> Iterator[None]:
        """Have the card alone while the block runs, among all farms of this host.  Raises FarmError (card-busy)."""
        self._interpreter = None

        def waiting(holder: Holder | None) -> None:
            progress(f"waits for {self._where()}: held by {holder or 'somebody who is not named yet'}")

        try:
            with self._lock.held(self._run, cell, wait_s=self._policy.busy_wait_s, waiting=waiting) as self._still_held:
                try:
                    yield
                finally:
                    self._still_held = lambda: True
        except Held as held:
            raise FarmError(f"{self._where()} was still held after {duration(self._policy.busy_wait_s)} by {held}; see farm "
                            "cards, and give cards.busy_wait_s more time or run it later", reason=Reason.CARD_BUSY) from held

    # --- idle, and as it was ----------------------------------------------------------------------

    def gate(self, progress: Progress) -> Reading:
        """Wait until nobody else is on the card; how it is then.

        Raises FarmError: card-busy after busy_wait_s, card-changed, card-lost.
        """
        begun, told_at = time.monotonic(), None
        while True:
            if not self._still_held():
                raise FarmError(f"{self._where()}: {self._lock.path} was removed or replaced while this run held it, so "
                                f"another farm may have the card too; who cleans {self._lock.path.parent}?",
                                reason=Reason.CARD_BUSY)
            now = self._reading()
            self._refuse_change(now)
            busy = self._busy(now)
            if busy is None:
                return now
            waited = time.monotonic() - begun
            if waited >= self._policy.busy_wait_s:
                raise FarmError(f"{self._where()} was still in use after {duration(waited)}: {busy}. The farm ends nobody "
                                "else's process; ask its owner, or leave the card out (CUDA_VISIBLE_DEVICES)",
                                reason=Reason.CARD_BUSY)
            if told_at is None or waited - told_at >= TELL_EVERY_S:
                told_at = waited
                progress(f"waits for {self._where()}: {busy}")
            time.sleep(POLL_S if waited < 10 else 1.0)

    def placed(self, pids: Sequence[int]) -> int | None:
        """How many of a server's processes compute on this card; None where that cannot be seen (a container's NVML).

        Raises InvalidMeasurement (wrong-card) where one computes on another card.
        """
        ours, where = frozenset(pids), self._probe.placed()
        for uuid, clients in where.items():
            if uuid != self.card.uuid and (astray := ours & clients):
                raise InvalidMeasurement(f"process {min(astray)} of the server computes on {uuid}, though it was given "
                                         f"{self._where()} ({self.card.uuid}); compare nvidia-smi", reason=Reason.WRONG_CARD)
        return len(ours & where.get(self.card.uuid, frozenset())) or None

    def wait_memory_back(self, before: Reading, deadline_s: float = 30.0) -> None:
        """Wait until memory in use is back at what it was `before` a boot: a next one would get a smaller pool.

        Raises FarmError: memory-held, or card-busy where somebody else has come meanwhile.
        """
        if before.memory_used_bytes is None:
            return
        until = time.monotonic() + deadline_s
        while True:
            now = self._reading()
            held = (now.memory_used_bytes or 0) - before.memory_used_bytes
            if held <= SLACK_BYTES:
                return
            if time.monotonic() > until:
                break
            time.sleep(2 * POLL_S)
        if foreign := self._foreign(now):
            raise FarmError(f"{self._where()}: somebody else came while a server ran: {_named(foreign)}; what was measured "
                            "beside it is no evidence", reason=Reason.CARD_BUSY)
        raise FarmError(f"{self._where()}: {held / 2**20:.0f} MiB are still held {deadline_s:.0f} s after the server ended, by "
                        "no process that can be seen; compare nvidia-smi, then reset the card", reason=Reason.MEMORY_HELD)

    def conditions(self) -> dict[str, Any]:
        """The columns of schemas.CARD, as they are now.  Raises FarmError (card-lost)."""
        return self._probe.conditions()

    def power_limit_w(self) -> float | None:
        """As it is now; None where the card does not say, or is lost."""
        try:
            return self._probe.reading().power_limit_w
        except FarmError:  # at the end of a boot, whose own error says more
            return None

    # --- health -----------------------------------------------------------------------------------

    def ready(self, interpreter: Interpreter, progress: Progress) -> None:
        """Before an attempt uses the card: idle, unchanged, and proved by a probe at its first use.

        Raises FarmError: card-unhealthy, and what `gate` raises.
        """
        self._interpreter = interpreter
        self.gate(progress)
        on_trial = self._journal.history().quarantine is not None
        if self._proved and not on_trial:
            return
        progress("probing the card")
        found = self._examined(interpreter)
        if found.outcome == "failed" or (on_trial and not found.passed):
            raise FarmError(f"{self._where()} {'is still in no state to be used' if on_trial else 'failed its health probe'}: "
                            f"{found.detail}", reason=Reason.CARD_UNHEALTHY)
        if on_trial:
            self._journal.returned()
            progress("its quarantine is over: the probe passed")

    def judged(self, outcome: Outcome, cell: str) -> Judged:
        """What an attempt's outcome is worth: where it may be the card's making, the card is asked.

        A FAIL or ERROR on a card that then fails its probe becomes ERROR card-unhealthy.  ERRORs of the card's own
        making are counted, and the last of `quarantine_after` puts it in quarantine.
        """
        blame = health.blame(outcome)
        if blame is Blame.SUSPECT and (fault := self._fault()) is not None:
            reason, what = fault
            outcome = Outcome(Verdict.ERROR, reason, f"{what}. So it is no evidence that before this the attempt ended "
                              f"{outcome.verdict.value} {outcome.reason.value}: {outcome.detail}")
            blame = Blame.CARD
        if blame is not Blame.CARD:
            return Judged(outcome)
        self._proved = False
        error = CardError(utc_now(), outcome.reason, outcome.detail, self._run, cell)
        return Judged(outcome, self._journal.erred(error, after=self._policy.quarantine_after, for_s=self._policy.quarantine_s))

    # --- inside -----------------------------------------------------------------------------------

    def _fault(self) -> tuple[Reason, str] | None:
        """What is wrong with the card; None: nothing, or it cannot be told."""
        if self._interpreter is None:  # it was never used
            return None
        try:
            now, idle = self._settled()
        except FarmError as error:
            return error.reason, str(error)
        more = (now.uncorrected_errors or 0) - (self._errors_before or 0)
        if self._errors_before is not None and more > 0:
            self._errors_before = now.uncorrected_errors
            return Reason.CARD_UNHEALTHY, f"{self._where()} reports {more} uncorrected memory errors since its last check"
        if not idle:
            return None  # a probe beside somebody else says nothing
        found = self._examined(self._interpreter)
        if found.outcome != "failed":
            return None
        return Reason.CARD_UNHEALTHY, f"{self._where()} failed its health probe: {found.detail}"

    def _settled(self) -> tuple[Reading, bool]:
        """The card once a server that has just ended has let go of it, and whether it is idle then."""
        until = time.monotonic() + SETTLES_S
        while True:
            now = self._reading()
            if (idle := self._busy(now) is None) or time.monotonic() > until:
                return now, idle
            time.sleep(2 * POLL_S)

    def _examined(self, interpreter: Interpreter) -> health.Examined:
        found = self._probe.examine(interpreter)
        self._journal.probed(found.outcome, found.detail)
        self._proved = found.passed
        return found

    def _busy(self, now: Reading) -> str | None:
        if foreign := self._foreign(now):
            return _named(foreign)
        allowed = max(IDLE_BYTES, IDLE_SHARE * (self.card.memory_bytes or 0))
        if now.memory_used_bytes is not None and now.memory_used_bytes > allowed:
            return (f"{now.memory_used_bytes / 2**20:.0f} MiB of its memory are in use by nobody who can be named (idle is up "
                    f"to {allowed / 2**20:.0f} MiB)")
        return None

    def _reading(self) -> Reading:
        """Clients are also processes that an earlier life or another farm has left on the card, whatever NVML can see."""
        now = self._probe.reading()
        known = {client.pid for client in now.clients}
        left = [pid for pid in carrying(CARD_MARK, self.marks[CARD_MARK]) if pid not in known]
        return replace(now, clients=(*now.clients, *map(Client.of, left)))

    def _foreign(self, now: Reading) -> tuple[Client, ...]:
        if not now.clients:
            return ()
        ours = {os.getpid(), *descendants(os.getpid())}
        return tuple(c for c in now.clients if c.pid not in ours)

    def _refuse_change(self, now: Reading) -> None:
        was = self._start
        if None not in (was.power_limit_w, now.power_limit_w) and abs(was.power_limit_w - now.power_limit_w) > SLACK_W:
            raise FarmError(f"the power limit of {self._where()} is {now.power_limit_w:.0f} W now and was "
                            f"{was.power_limit_w:.0f} W when run {self._run} began here; set it back (nvidia-smi -i "
                            f"{self.card.uuid} -pl {was.power_limit_w:.0f}) or start a new run", reason=Reason.CARD_CHANGED)
        if None not in (was.driver, now.driver) and was.driver != now.driver:
            raise FarmError(f"the driver of {self._where()} is {now.driver} now and was {was.driver} when run {self._run} "
                            "began here; start a new run", reason=Reason.CARD_CHANGED)

    def _where(self) -> str:
        return f"{self.card.name} {self.card.uuid[-5:]}"


def _named(clients: tuple[Client, ...]) -> str:
    return ", ".join(map(str, clients))
