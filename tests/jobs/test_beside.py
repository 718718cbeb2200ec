"""Short requests beside a block: when they are sent, what a slow or failed one does to the others."""

import threading
import time

import pytest

from farm.bench import Prompt, Reply
from farm.errors import RequestFailed
from jobs.beside import Concurrent, beside

PROMPTS = tuple(Prompt((n,) * 4, str(n)) for n in range(3))
SOON = Concurrent(count=3, tokens=4, interval_s=0.001)


class Server:
    """`answer(prompt)` stands for the server's work; who was asked is in `asked`."""

    def __init__(self, answer=lambda prompt: None):
        self.asked, self._answer, self.all_asked = [], answer, threading.Event()

    def complete(self, prompt, *, max_tokens, deadline_s):
        self.asked.append(prompt.sha256)
        if len(self.asked) == len(PROMPTS):
            self.all_asked.set()
        self._answer(prompt)
        return Reply(0.1, 0.2, prompt.tokens, max_tokens, 0)


def test_the_replies_are_there_once_the_block_has_ended_in_the_order_of_sending():
    server = Server()
    with beside(server, PROMPTS, SOON, 9.0) as shorts:
        assert server.all_asked.wait(10)
    assert [s.prompt.sha256 for s in shorts] == ["0", "1", "2"]
    assert [s.sent_s for s in shorts] == sorted(s.sent_s for s in shorts)
    assert shorts[0].sent_s >= SOON.interval_s
    assert shorts[0].reply.completion_tokens == SOON.max_tokens


def test_a_slow_request_does_not_put_off_the_next():
    server = Server(lambda prompt: None if prompt.sha256 != "0" else server.all_asked.wait(10))
    with beside(server, PROMPTS, SOON, 9.0) as shorts:
        assert server.all_asked.wait(10)
    assert len(shorts) == 3


def test_none_is_sent_after_the_block_has_ended():
    server = Server()
    begun = time.monotonic()
    with beside(server, PROMPTS, Concurrent(count=3, interval_s=60.0), 9.0) as shorts:
        pass
    assert (shorts, server.asked) == ([], [])
    assert time.monotonic() - begun < 30


def test_what_was_sent_is_waited_for():
    answered = threading.Event()

    def late(prompt):
        time.sleep(0.05)
        answered.set()

    server = Server(late)
    with beside(server, PROMPTS[:1], SOON, 9.0) as shorts:
        while not server.asked:
            time.sleep(0.001)
    assert answered.is_set()
    assert len(shorts) == 1


def fail(prompt):
    raise RequestFailed("the stream was cut")


def test_a_failed_request_is_raised_at_the_end():
    server = Server(fail)
    with pytest.raises(RequestFailed, match="cut"), beside(server, PROMPTS, SOON, 9.0):
        assert server.all_asked.wait(10)


def test_what_the_block_raises_comes_first():
    with pytest.raises(KeyError), beside(Server(fail), PROMPTS, SOON, 9.0):
        raise KeyError


def test_without_options_nothing_is_sent():
    with beside(Server(), (), None, 9.0) as shorts:
        pass
    assert shorts == []
