"""Seats and the actors on them: opened, listened to, asked whether they live, opened again, closed.

A seat is a GPU of a node or one of its CPU slots.  An actor that dies or falls silent loses its attempt, and its seat is
opened again while its node is there; a node that joins brings seats, one that goes takes its seats along.  Every wait here
has an end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from farm.bench import Card
from farm.hostmemory import Host
from farm.nodes import Node, NodeWatch
from farm.records import Reason, utc_now
from farm.worker import Seat

OPENINGS = 2  # how often a seat whose actor fails to start is tried in a row
LOOK_S = 5.0


@dataclass(frozen=True)
class Patience:
    """How long is waited for what, in seconds."""

    start_s: float = 120.0  # an actor on a fresh node imports Ray, pyarrow and the farm first
    alive_every_s: float = 10.0
    alive_s: float = 60.0  # then an actor that does not say that it lives is ended
    nodes_every_s: float = 2.0
    fetch_s: float = 60.0  # an event's rows, from another node
    deserted_s: float = 30.0  # a node with a card, where there is none (yet, or any more)


@dataclass(eq=False)
class Desk:
    """A seat whose actor has said which card it has; `stream` is the attempt that it is on."""

    seat: Seat
    node: Node
    actor: Any
    card: Card
    host: Host
    asked_at: float
    asked: Any = None  # the open question whether it lives
    stream: Any = None


@dataclass(eq=False)
class _Opening:
    seat: Seat
    node: Node
    actor: Any
    replies: list[Any]
    since: float
    tries: int
    was: Card | None  # of the actor before


@dataclass(frozen=True)
class Opened:
    """A desk is ready for work, unless its card is in quarantine; `again`: the same card was there before."""

    desk: Desk
    standing: Any
    again: bool


@dataclass(frozen=True)
class Heard:
    """What the worker streamed; None: the attempt is over, and the worker broke its contract by not saying how."""

    desk: Desk
    event: Any
    why: str = ""


@dataclass(frozen=True)
class Lost:
    """A desk that is no more.  Its seat is opened again, or Closed comes next."""

    desk: Desk
    reason: Reason
    why: str


@dataclass(frozen=True)
class Closed:
    """A seat that is given up.  `card` is None where nobody ever said which it is."""

    seat: Seat
    node: Node
    card: Card | None
    why: str


Event = Opened | Heard | Lost | Closed


class Seats:
    """All seats of the nodes that `watch` sees.  `hire` starts the actor of a seat."""

    def __init__(self, hire: Callable[[Seat, Node], Any], watch: NodeWatch, cpu_slots: int, patience: Patience,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._hire, self._watch, self._cpu_slots, self._patience, self._clock = hire, watch, cpu_slots, patience, clock
        self.desks: list[Desk] = []
        self._openings: list[_Opening] = []
        self._known: set[str] = set()  # nodes
        self._resting: dict[Seat, tuple[Node, datetime]] = {}
        self._deserted_at: float | None = None

    @property
    def hopeful(self) -> bool:
        """Whether a card may still come: one is being started, or there is no machine for one and this waits a while."""
        if self._openings:
            return True
        if self.desks or self._watch.own_gone or any(map(self._places, self._watch.present.values())):
            self._deserted_at = None
            return False
        if self._deserted_at is None:
            self._deserted_at = self._clock()
        return self._clock() - self._deserted_at < self._patience.deserted_s

    def give(self, desk: Desk, cell: Any, attempt: int) -> None:
        desk.stream = desk.actor.run.options(num_returns="streaming").remote(cell, attempt)

    def rest(self, desk: Desk, until: datetime) -> None:
        """End the actor of a card that is in quarantine; its seat is opened again when that is over."""
        self._dismiss(desk)
        self._resting[desk.seat] = (desk.node, until)

    def close(self) -> None:
        for one in (*self.desks, *self._openings):
            ray.kill(one.actor)

    def step(self, timeout_s: float) -> list[Event]:
        """Wait until something happens, at most `timeout_s`, and tell all that has."""
        events = list(self._of_nodes())
        if events:
            return events
        ready = self._ready(timeout_s)
        for opening in list(self._openings):
            events += self._reply(opening, all(reply in ready for reply in opening.replies))
        for desk in list(self.desks):
            if desk.stream is not None and desk.stream in ready:
                events += self._next(desk)
            if desk in self.desks:
                events += self._pulse(desk, desk.asked in ready)
        return events

    # --- nodes ------------------------------------------------------------------------------------

    def _of_nodes(self) -> Iterator[Event]:
        present = self._watch.present
        if self._watch.own_gone:  # Ray ends our actors everywhere, and starts none
            present = {}
        for desk in [d for d in self.desks if d.seat.node not in present]:
            yield from self._gone(desk)
        for opening in [o for o in self._openings if o.seat.node not in present]:
            yield self._give_up(opening, self._farewell(opening.node))
        for node in [n for id, n in present.items() if id not in self._known]:
            self._known.add(node.id)
            for seat in self._places(node):
                self._open(seat, node)
        for seat, (node, until) in list(self._resting.items()):
            if utc_now() >= until and seat.node in present:
                del self._resting[seat]
                self._open(seat, node)

    def _places(self, node: Node) -> list[Seat]:
        """One seat per GPU; on a node without any, the CPU slots, unless it is a head alone (`--num-cpus=0`)."""
        kind, count = ("cuda", node.gpus) if node.gpus else ("cpu", self._cpu_slots if node.cpus else 0)
        return [Seat(node.id, kind, index, count) for index in range(count)]

    def _gone(self, desk: Desk) -> Iterator[Event]:
        why = self._farewell(desk.node)
        self._dismiss(desk)
        yield Lost(desk, Reason.NODE_DIED, why)
        yield Closed(desk.seat, desk.node, desk.card, why)

    def _farewell(self, node: Node) -> str:
        if self._watch.own_gone:
            return "the Ray node that this run is attached to died, and all its actors with it; run its matrix again"
        return f"node {node} died or left the cluster"

    # --- opening ----------------------------------------------------------------------------------

    def _open(self, seat: Seat, node: Node, was: Card | None = None, tries: int = 1) -> None:
        actor = self._hire(seat, node)
        actor.tether.remote()
        self._openings.append(_Opening(seat, node, actor, [actor.card.remote(), actor.standing.remote(), actor.room.remote()],
                                       self._clock(), tries, was))

    def _reply(self, opening: _Opening, came: bool) -> Iterator[Event]:
        if not came:
            if self._clock() - opening.since > self._patience.start_s:
                yield self._give_up(opening, f"its actor did not start within {self._patience.start_s:.0f} s")
            return
        try:
            card, standing, room = ray.get(opening.replies, timeout=self._patience.fetch_s)
        except RayError as error:
            if opening.tries < OPENINGS and isinstance(error, RayActorError):
                self._give_up(opening, "")
                self._open(opening.seat, opening.node, opening.was, opening.tries + 1)
            else:
                yield self._give_up(opening, f"its actor did not start: {words(error)}")
            return
        if twin := next((d for d in self.desks if d.card.uuid == card.uuid), None):
            opening.was = None
            yield self._give_up(opening, f"its card {card.uuid} is that of a seat on node {twin.node} too: two Ray nodes of "
                                         "one machine? Give each its own GPUs, and FARM_NODE its own name")
            return
        self._openings.remove(opening)
        host = Host(opening.node.id, opening.node.object_store_bytes, room)
        desk = Desk(opening.seat, opening.node, opening.actor, card, host, self._clock())
        self.desks.append(desk)
        if opening.was is not None and opening.was.uuid != card.uuid:
            yield Closed(opening.seat, opening.node, opening.was, "its seat came back with another card")
        yield Opened(desk, standing, again=opening.was is not None and opening.was.uuid == card.uuid)

    def _give_up(self, opening: _Opening, why: str) -> Closed:
        self._openings.remove(opening)
        ray.kill(opening.actor)
        return Closed(opening.seat, opening.node, opening.was, why)

    # --- listening --------------------------------------------------------------------------------

    def _ready(self, timeout_s: float) -> set[Any]:
        waited = [ref for o in self._openings for ref in o.replies]
        waited += [ref for d in self.desks for ref in (d.stream, d.asked) if ref is not None]
        if not waited:
            time.sleep(min(timeout_s, 0.2))
            return set()
        try:
            # The first that comes, then all that are there: else the first of the list would starve the last.
            some, _ = ray.wait(waited, num_returns=1, timeout=timeout_s)
            return set(ray.wait(waited, num_returns=len(waited), timeout=0)[0]) if some else set()
        except RayError:  # our own raylet is going: the next census says so
            time.sleep(0.2)
            return set()

    def _next(self, desk: Desk) -> Iterator[Event]:
        try:
            yield Heard(desk, ray.get(next(desk.stream), timeout=self._patience.fetch_s))
        except StopIteration:
            desk.stream = None
            yield Heard(desk, None, "the worker ended without an outcome")
        except GetTimeoutError:
            yield from self._lose(desk, f"what it measured did not arrive within {self._patience.fetch_s:.0f} s")
        except RayActorError as error:
            yield from self._lose(desk, words(error))
        except RayError as error:
            desk.stream = None
            yield Heard(desk, None, words(error))

    def _pulse(self, desk: Desk, came: bool) -> Iterator[Event]:
        now, patience = self._clock(), self._patience
        if desk.asked is None:
            if now - desk.asked_at >= patience.alive_every_s:
                desk.asked, desk.asked_at = desk.actor.alive.remote(), now
        elif came:
            try:
                ray.get(desk.asked, timeout=patience.fetch_s)
                desk.asked = None
            except RayError as error:
                yield from self._lose(desk, words(error))
        elif now - desk.asked_at > patience.alive_s:
            yield from self._lose(desk, f"it has not answered for {patience.alive_s:.0f} s, though its process is there")

    def _lose(self, desk: Desk, why: str) -> Iterator[Event]:
        if desk.seat.node in self._watch.present:
            self._watch.look(LOOK_S)
        if desk.seat.node not in self._watch.present or self._watch.own_gone:
            yield from self._gone(desk)
            return
        self._dismiss(desk)
        yield Lost(desk, Reason.ACTOR_DIED, why)
        self._open(desk.seat, desk.node, desk.card)

    def _dismiss(self, desk: Desk) -> None:
        self.desks.remove(desk)
        ray.kill(desk.actor)  # a process that is stopped is ended by its raylet, after 5 s


def words(error: object) -> str:
    """The sentence of a Ray error that says something: it begins with a common place, and may end with a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if "creation task" in lines[0] or "Traceback" in " ".join(lines[:4]):
        return lines[-1][:500]
    return next((line for line in lines if line.startswith(("The actor is dead", "The actor died because"))), lines[0])[:500]
