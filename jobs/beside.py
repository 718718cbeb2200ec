"""Short requests beside a long one: what somebody else's first token costs while a prompt is prefilled."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import ConfigDict

from farm.bench import Prompt, Reply, Server


@dataclass(frozen=True)
class Concurrent:
    """Options: at most `count` short requests of `tokens` tokens each, `interval_s` apart, the first one that long after
    the measured request; `max_tokens` of each reply."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    count: int
    tokens: int = 64
    interval_s: float = 0.1
    max_tokens: int = 8

    def __post_init__(self) -> None:
        if min(self.count, self.tokens, self.max_tokens) < 1 or not 0 < self.interval_s < math.inf:
            raise ValueError("concurrent: count, tokens, max_tokens and interval_s must be positive, none infinite")


@dataclass(frozen=True)
class Short:
    """One short request, sent `sent_s` seconds after the block began."""

    prompt: Prompt
    sent_s: float
    reply: Reply


@contextmanager
def beside(server: Server, prompts: Sequence[Prompt], options: Concurrent | None, deadline_s: float) -> Iterator[list[Short]]:
    """Send the prompts while the block runs; the list holds the replies, in the order of sending, once it has ended.

    Each request has a thread of its own, so that a slow one does not put off the next: a Server must take calls from
    several threads.  None is sent after the block's end, and all that were sent are waited for.
    Raises, at the end, what Server.complete raises; an exception of the block itself comes first.
    """
    replies: list[Short] = []
    if options is None:
        yield replies
        return
    over, begun = threading.Event(), time.monotonic()
    sent: list[Future[Short]] = []

    def one(prompt: Prompt) -> Short:
        sent_s = time.monotonic() - begun
        return Short(prompt, sent_s, server.complete(prompt, max_tokens=options.max_tokens, deadline_s=deadline_s))

    with ThreadPoolExecutor(len(prompts) + 1, thread_name_prefix="short request") as threads:

        def send() -> None:
            for number, prompt in enumerate(prompts, 1):
                if over.wait(max(0.0, begun + number * options.interval_s - time.monotonic())):
                    return
                sent.append(threads.submit(one, prompt))

        sending = threads.submit(send)
        try:
            yield replies
        finally:
            over.set()
            sending.result()
    replies += [request.result() for request in sent]
