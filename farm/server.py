"""One vLLM server: boot, facts, requests, liveness, teardown.

The server is started in one of two ways (farm.launch), under a supervisor (farm.lifeline) that ends the
whole process tree whatever becomes of us.  It counts as healthy once a canary completion has come back, its
processes have shown that they run the tree (farm.attest), and its facts are those that its profile expects.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import httpx

from farm import attest, bootlog, client, folders, kernels, launch, metrics, probing
from farm.bench import BootFacts, Probing, Prompt, Reply
from farm.childenv import CACHES, redact, redact_argv
from farm.endings import Endings
from farm.errors import BootFailure, FarmError, InvalidMeasurement, RequestFailed, RequestOverdue
from farm.lifeline import ProcessesLeft, Supervised
from farm.records import Reason
from farm.serverlog import TAIL_LINES, ServerLog
from farm.serverspec import ServerSpec

Progress = Callable[[str], None]

CANARY = tuple(range(48, 64))  # token ids that every vocabulary has; shorter than any block, so never cached
GRACE_S = 8.0  # from TERM to KILL; vLLM's own shutdown takes about one second
TELL_EVERY_S = 10.0


@contextmanager
def boot(spec: ServerSpec, progress: Progress) -> Iterator[ServerProcess]:
    """Boot a server, yield it healthy, end its whole process tree.

    Raises RefusedConfig with vLLM's own sentence; BootFailure (boot-died, boot-stalled, canary-failed, engine-dead,
    server-silent, or port-taken where a stranger has the port) with the log's tail; InvalidMeasurement (wrong-tree,
    facts-differ, bad-config); at its end, of a block that raised nothing, ServerLost where the server had ended by then.
    """
    short = next((d for d in (tempfile.gettempdir(), "/tmp") if len(os.fsencode(d)) < 60), "/tmp")
    with folders.private(short) as folder, launch.prepared(spec, folder) as start:
        server = ServerProcess(spec, start)
        try:
            server.wait_healthy(progress)
            yield server
            server.prove_alive()
        finally:
            server.close()


class ServerProcess:
    """A server that is starting or running; `boot` makes and ends it.  See farm.bench.Server."""

    def __init__(self, spec: ServerSpec, start: launch.Start) -> None:
        self.spec = spec
        self._start = start
        self._caches = _caches(spec)
        for name in CACHES:
            Path(start.environment[name]).mkdir(parents=True, exist_ok=True)
        self._log = ServerLog(spec.log)
        self._parsed: tuple[int, BootFacts] | None = None
        self._boot_s: float | None = None
        self._address = client.Address()
        self._model = ""
        self._served: launch.Served | None = None
        self._cards_seen: tuple[str, ...] | None = None
        self.card_processes: int | None = None  # the worker says it, see farm.keeper
        self._reader = None if spec.probe is None else probing.Reader(spec.probe)
        self.last_request: datetime | None = None  # when it was sent
        self._begun = time.monotonic()
        try:
            self._child = Supervised.start(start.argv, env=start.environment, cwd=start.cwd, stdout_path=spec.log,
                                           cores=spec.card.cores, within=start.within, records=spec.records,
                                           may_gain_privileges=start.trusted)
        except OSError as error:
            raise BootFailure(f"the server on {spec.card.name} (log {spec.log}) could not be started: {error}") from error
        self._endings = Endings(spec, start, self._log, self._child)

    def wait_healthy(self, progress: Progress) -> None:
        """Watch the boot to its end; what it raises is at `boot`."""
        self._wait_listening(progress)
        self._endings.watch_from(self._child.command_pid)
        left = self._begun + self.spec.deadline_s - time.monotonic()
        try:
            with self._http(timeout_s=30.0) as http:
                self._model = self._start.model(http)
            self._complete(CANARY, max_tokens=2, deadline_s=max(1.0, min(self.spec.canary_s, left)))
        except RequestFailed as error:
            raise self._endings.canary_failed(error) from error
        self._boot_s = time.monotonic() - self._begun
        attest.attest_tree(self.spec.tree, self._child.processes(), self._start.advice)
        if self.spec.attest is not None:
            probing.check_attested(probing.attested(self.spec.attest), self.spec.tree)
            self._cards_seen = probing.cards_seen(self.spec.attest)
            probing.check_cards(self._cards_seen, self.spec.card)
        if self._reader is not None:
            self._reader.check()
        self._served = self._start.proved(self._child.command_pid, self._child.processes)
        self._endings.booted(self._served)
        self._child.note_regions()
        self._refuse_silence()
        self.spec.expected.check(self.facts)
        progress(f"healthy after {self._boot_s:.1f} s")

    def _wait_listening(self, progress: Progress) -> None:
        size, grew_at, told_at = 0, self._begun, self._begun
        with ExitStack() as stack:
            http: httpx.Client | None = None
            while self._child.wait(timeout_s=0.1) is None:
                now = time.monotonic()
                if (length := self._log.size()) != size:
                    size, grew_at = length, now
                if http is None and (address := self._listening()) is not None:
                    self._address = address
                    http = stack.enter_context(self._http(timeout_s=5.0))
                if http is not None and _healthy(http):
                    return
                if now - grew_at > self.spec.stall_s:
                    raise self._endings.stalled(f"wrote nothing to its log for {self.spec.stall_s:.0f} s")
                if now - self._begun > self.spec.deadline_s:
                    raise self._endings.stalled(f"was not healthy within {self.spec.deadline_s:.0f} s")
                if now - told_at >= TELL_EVERY_S:
                    told_at = now
                    progress(f"booting for {now - self._begun:.0f} s: {self._log.last_words()}")
        raise self._endings.died()

    def _listening(self) -> client.Address | None:
        try:
            return self._start.listening(self._child.processes)
        except BootFailure as error:
            error.log_tail = self.log_tail()
            raise

    def _refuse_silence(self) -> None:
        """A start script may have sent the server's output elsewhere; all facts of the boot would be missing."""
        if self.spec.launcher is not None and not any(line.level for line in bootlog.split(self._log.lines())):
            raise InvalidMeasurement(f"{self._endings.where} is healthy, but no line of vLLM's is in its log, so nothing is "
                                     "known of its pool and blocks; let the start script leave the server's output where it is "
                                     "(or use tee), and vLLM's logging on", reason=Reason.BAD_CONFIG)

    # --- for a job (farm.bench.Server) ---------------------------------------------------------

    @property
    def facts(self) -> BootFacts:
        """What the log says up to now: lines about compilation in service come after the boot.

        `boot_s` counts from the start of the process to the end of the canary completion.  `argv` and `env` are those
        of the process that serves, which a start script may have chosen otherwise than it was told.
        """
        size = self._log.size()
        if self._parsed is None or self._parsed[0] != size:
            self._parsed = (size, bootlog.parse(self._log.lines()))
        runs = self._served or launch.Served(self._child.pid, self._start.argv, self._start.environment)
        return replace(self._parsed[1], boot_s=self._boot_s, caches=self._caches,
                       probe=self._reader is not None, cards_seen=self._cards_seen, card_processes=self.card_processes,
                       argv=redact_argv(runs.argv), env=redact(runs.env))

    def complete(self, prompt: Prompt, *, max_tokens: int, seed: int | None = None, temperature: float = 0.0,
                 deadline_s: float) -> Reply:
        """One streamed completion.  Raises RequestFailed, RequestOverdue; ServerLost where the server did not outlive it
        (server-lost), its engine did not (engine-dead), or nothing was heard of it any more (server-silent)."""
        self.last_request = datetime.now(timezone.utc)
        size = self._log.size()
        try:
            return self._complete(prompt.token_ids, max_tokens=max_tokens, seed=seed, temperature=temperature,
                                  deadline_s=deadline_s)
        except RequestOverdue as error:
            self._endings.overdue(error, size, self._address)
            raise
        except RequestFailed as error:
            self._endings.failed(error, self._address)
            raise

    @contextmanager
    def sampled(self, gauge: str, interval_s: float) -> Iterator[metrics.GaugeSampler]:
        """Sample a gauge while the block runs, over a connection of its own."""
        with self._http(timeout_s=5.0) as http, \
                metrics.GaugeSampler(gauge, interval_s, lambda: _metrics_text(http)) as sampling:
            yield sampling

    def probed(self) -> AbstractContextManager[Probing]:
        """Take what the probe sees while the block runs; of a boot without it, nothing."""
        return probing.probed(self._reader)

    def counters(self) -> Mapping[str, float]:
        """One scrape: value per exact metric name, summed over engines.  Raises RequestFailed, ServerLost."""
        try:
            with self._http(timeout_s=30.0) as http:
                return metrics.scrape(_metrics_text(http)).values
        except (httpx.HTTPError, ValueError) as error:
            failed = RequestFailed(f"{self._endings.where}: /metrics could not be read: {type(error).__name__} {error}")
            self._endings.failed(failed, self._address)
            raise failed from error

    # --- for the worker -------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._child.command_pid

    def processes(self) -> list[int]:
        """Ids of all processes of this boot, as they are now."""
        return list(self._child.processes())

    def prove_alive(self) -> None:
        """Raise ServerLost where the server, or its engine, has ended by itself after its last answer: nobody knows yet."""
        self._endings.prove_alive()

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of this boot's log, newest last."""
        return self._log.tail(lines)

    def close(self) -> None:
        """End the process tree and prove that nothing is left.  Raises FarmError where something is."""
        try:
            self._child.terminate(GRACE_S)
        except ProcessesLeft as error:
            raise FarmError(f"{self._endings.where} could not be ended: {error}") from error

    # --- inside -----------------------------------------------------------------------------------

    def _http(self, timeout_s: float) -> httpx.Client:
        return self._address.http(timeout_s)

    def _complete(self, token_ids: Sequence[int], *, max_tokens: int, deadline_s: float, seed: int | None = None,
                  temperature: float = 0.0) -> Reply:
        body = client.completion_body(self._model, token_ids, max_tokens=max_tokens, seed=seed, temperature=temperature)
        return client.complete(self._address.transport(), body, deadline_s=deadline_s, url=self._address.url,
                               look=self._endings.look)

def _caches(spec: ServerSpec) -> str:
    """How a boot finds its compile caches; a first one of a patched tree is given the unpatched tree's kernels."""
    if spec.caches.is_dir() and any(p.is_file() for p in spec.caches.rglob("*")):
        return "warm"
    return "seeded" if spec.compiled is not None and kernels.seed(spec.caches, spec.compiled) else "cold"


def _healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.HTTPError:
        return False


def _metrics_text(http: httpx.Client) -> str:
    response = http.get("/metrics")
    response.raise_for_status()
    return response.text
