"""What has become of a server that no longer does as it should: looked up, and put into the exception that says so."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection
from contextlib import suppress

import httpx

from farm import bootlog, launch, stacks
from farm.bench import Arm
from farm.client import Address
from farm.errors import BootFailure, RefusedConfig, RequestFailed, RequestOverdue, ServerLost
from farm.lifeline import Supervised
from farm.records import Reason
from farm.serverlog import TAIL_LINES, ServerLog
from farm.serverspec import ServerSpec
from farm.supervisor import signal_name
from farm.watch import Member, Watch, members, said, tells_of_dead_engine

LOST_WITHIN_S = 3.0  # after a failed request, how long a dying server may take to be gone
HEALTH_S = 10.0  # how long /health may take to answer after a failed request
STACK_LINES = 400
_CODE_ERROR = re.compile(r"\b(Syntax|Indentation|Tab|Import|ModuleNotFound|Name|Attribute|Type|UnboundLocal)Error\b")


class Endings:
    """Of one server.  What is found is raised, or returned for the caller to raise where it knows the cause better."""

    def __init__(self, spec: ServerSpec, start: launch.Start, log: ServerLog, child: Supervised) -> None:
        self._spec, self._start, self._log, self._child = spec, start, log, child
        self._watch: Watch | None = None
        self._served: launch.Served | None = None  # the process that answers, once the boot is over
        self._told = False  # the caller knows that the server is lost

    @property
    def where(self) -> str:
        return f"the server on {self._spec.card.name} (log {self._log.path})"

    # --- who must stay ----------------------------------------------------------------------------

    def watch_from(self, main: int) -> None:
        """From now on whoever of its processes has loaded the tree must stay, `main` among them."""
        self._watch = Watch(members(self._spec.tree, self._child.processes(), main))

    def booted(self, served: launch.Served) -> None:
        self._served = served
        self.watch_from(served.pid)

    # --- while it boots ---------------------------------------------------------------------------

    def died(self) -> BootFailure:
        if sentence := bootlog.refusal(self._log.lines()):
            return RefusedConfig(sentence, log_tail=self._log.tail())
        status = self._child.wait(0.0)
        return BootFailure(f"{self.where} ended with {_status(status)} while it booted: {self._log.cause()}"
                           f"{self._start.hint(status, self._child.processes)}",
                           reason=Reason.BOOT_DIED, log_tail=self._log.tail())

    def stalled(self, what: str) -> BootFailure:
        """Keep the stacks: py-spy's, or else those that faulthandler writes to the log on SIGABRT."""
        words = self._log.last_words() + self._start.hint(None, self._child.processes)
        size, seen = self._log.size(), self._stacks()
        if not seen:
            for pid in self._child.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            self._child.wait(timeout_s=2.0)
        tail = self._log.tail(STACK_LINES if self._log.size() > size else TAIL_LINES) + seen
        return BootFailure(f"{self.where} {what}; its last line: {words}", reason=Reason.BOOT_STALLED, log_tail=tail)

    def canary_failed(self, error: RequestFailed) -> BootFailure:
        if self._child.wait(LOST_WITHIN_S) is not None:
            return self.died()
        if (engine := self._dead_engine()) is not None:
            return self._engine_dead(engine)
        return BootFailure(f"{self.where} answers /health, but its first completion failed: {error}",
                           reason=Reason.CANARY_FAILED, log_tail=self._log.tail() + self._stacks())

    # --- while it serves --------------------------------------------------------------------------

    def look(self) -> None:
        """During a request, and so in well under a millisecond: raise what need not wait for its deadline."""
        if self._watch is None:
            return
        if (engine := self._dead_engine()) is not None:
            raise self._engine_dead(engine)
        if (hung := self._watch.hung()) is not None:
            raise self._silent(f"is silent: {hung} has been stopped by a signal (state T of ps); to let it go on: kill -CONT "
                               f"{hung.pid}")

    def overdue(self, error: RequestOverdue, size: int, address: Address) -> None:
        """After a request that was not answered in time, whose log was `size` long before: raise where that is the server's."""
        self.failed(error, address)
        error.log_tail = self._log.tail() + self._stacks()
        if not error.heard and not said(self._log.lines(size)):
            raise self._silent("is there and calls itself healthy, but neither the request nor its log heard of it "
                               f"({error})", error.log_tail) from error

    def failed(self, error: RequestFailed, address: Address) -> None:
        """After a failed request: raise where the server did not outlive it."""
        if (engine := self._dead_engine()) is not None:
            raise self._engine_dead(engine) from error
        status = self._child.wait(LOST_WITHIN_S)
        if status is not None:
            raise self._lost(status, "during a request") from error
        if self._served is not None and self._served.pid not in self._child.processes():
            raise self._gone(f"{self.where}: process {self._served.pid}, which served, is gone; what its start script may "
                             f"have started since is another boot ({error})") from error
        if (engine := self._dead_engine()) is not None:
            raise self._engine_dead(engine) from error
        with address.http(HEALTH_S) as http:
            try:
                status = http.get("/health").status_code
            except httpx.TimeoutException:
                raise self._silent(f"is there but answers nothing any more: /health took longer than {HEALTH_S:g} s after a "
                                   f"failed request ({error})") from None
            except httpx.HTTPError:
                status = 0
            if status != 200:
                raise self._gone(f"{self.where} is there but no longer healthy after a failed request ({error})") from error

    def prove_alive(self) -> None:
        """Raise ServerLost where the server, or its engine, has ended by itself after its last answer: nobody knows yet."""
        if self._told:
            return
        if (status := self._child.poll()) is not None:
            raise self._lost(status, "after its last answer, before it was told to")
        if (engine := self._dead_engine()) is not None:
            raise self._engine_dead(engine)

    # --- inside -----------------------------------------------------------------------------------

    def _dead_engine(self) -> Member | None:
        return None if self._watch is None else self._watch.dead_engine()

    def _engine_dead(self, engine: Member) -> BootFailure:
        """While it boots, an engine that says why it died is a boot that died: it may be the tree's fault."""
        cause = bootlog.failure(self._log.lines())
        if self._served is None and cause and not tells_of_dead_engine([cause]):
            return BootFailure(f"the engine of {self.where} ended while it booted: {cause}", reason=Reason.BOOT_DIED,
                               log_tail=self._log.tail())
        return self._gone(f"the engine of {self.where} is gone ({engine}), while its API server is there and may still call "
                          f"itself healthy: {cause or self._log.last_words()}", Reason.ENGINE_DEAD)

    def _lost(self, status: int, when: str) -> ServerLost:
        # An API server that finds its engine dead ends itself in order; one that is killed does not.
        reason = Reason.ENGINE_DEAD if status >= 0 and tells_of_dead_engine(self._log.lines()) else Reason.SERVER_LOST
        return self._gone(f"{self.where} ended with {_status(status)} {when}: {self._log.cause()}", reason)

    def _silent(self, how: str, tail: str | None = None) -> ServerLost:
        seen = self._log.tail() + self._stacks() if tail is None else tail
        return self._gone(f"{self.where} {how}", Reason.SERVER_SILENT, seen)

    def _gone(self, message: str, reason: Reason = Reason.SERVER_LOST, tail: str | None = None) -> ServerLost:
        self._told = True
        return ServerLost(message, reason=reason, log_tail=self._log.tail() if tail is None else tail)

    def _stacks(self) -> str:
        """What its processes are doing, to go behind a log's tail; empty without py-spy."""
        seen = stacks.taken(self._child.processes(), self._spec.python)
        return f"\n{seen}" if seen else ""


def is_the_trees_fault(error: BootFailure, arm: Arm, booted: Collection[str]) -> bool:
    """Whether a boot's end is evidence against its tree: a patched arm, an exception of its code, and another arm that
    had been healthy on the same card in the same cell.  All else may be the card's or the farm's: ERROR."""
    return bool(error.reason is Reason.BOOT_DIED and arm.patches and set(booted) - {arm.name}
                and _CODE_ERROR.search(str(error)))


def _status(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {signal_name(-status)}"
    return f"exit status {status}"
