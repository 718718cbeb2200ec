"""One request: real streams of vLLM 0.29.0 (data/sse) and what may become of them."""

import asyncio
import http.server
import threading
import time
from pathlib import Path

import httpx
import pytest

from farm import client
from farm.errors import RequestFailed

SSE = Path(__file__).parent / "data" / "sse"
COMPLETION = (SSE / "completion-0.29.0.sse").read_bytes()
CHAT = (SSE / "chat-0.29.0.sse").read_bytes()
BODY = client.completion_body("farm", range(40, 80), max_tokens=4, seed=1, temperature=0.0)
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n'
END = b"data: [DONE]\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    reason = "null" if finish is None else f'"{finish}"'
    return f'data: {{"choices":[{{"index":0,"text":"{text}","finish_reason":{reason}}}]}}\n\n'.encode()


class Stream(httpx.AsyncByteStream):
    """Chunks with pauses: a number waits so many seconds, an exception is raised."""

    def __init__(self, *parts):
        self.parts = parts

    async def __aiter__(self):
        for part in self.parts:
            if isinstance(part, bytes):
                yield part
            elif isinstance(part, Exception):
                raise part
            else:
                await asyncio.sleep(part)


def ask(*parts, status=200, deadline_s=5.0, body=BODY):
    answer = httpx.MockTransport(lambda request: httpx.Response(status, stream=Stream(*parts)))
    return client.complete(answer, body, deadline_s=deadline_s)


def test_a_real_completion_is_accounted_for_by_its_usage():
    reply = ask(COMPLETION)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens, reply.text) == (40, 4, 0, "")
    assert 0 <= reply.ttft_s <= reply.total_s


def test_first_token_may_decode_to_no_text():
    first, rest = COMPLETION.split(b"\n\n", 1)
    assert b'"text":""' in first
    reply = ask(0.15, first + b"\n\n", 0.15, rest)
    assert 0.15 <= reply.ttft_s < 0.29 <= reply.total_s


def test_a_role_is_no_token():
    role, rest = CHAT.split(b"\n\n", 1)
    assert b'"role":"assistant"' in role
    reply = ask(role + b"\n\n", 0.2, rest)
    assert reply.ttft_s >= 0.2
    assert (reply.completion_tokens, reply.text) == (4, "\\")


@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content"])
def test_reasoning_counts_as_the_first_token(field):
    event = f'data: {{"choices":[{{"delta":{{"{field}":"hm"}},"finish_reason":null}}]}}\n\n'.encode()
    reply = ask(event, 0.2, token("x", "stop"), USAGE, END)
    assert reply.ttft_s < 0.2


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        pytest.param((b": keep-alive\n\n", token("a"), b":\n\n: ping\n", token("b", "length"), USAGE, END), "ab",
                     id="comments"),
        pytest.param((b"event: x\nid: 3\nretry: 9\n" + token("a", "length"), USAGE, END), "a", id="other fields"),
        pytest.param((token("a", "length").replace(b"\n", b"\r\n"), USAGE, END), "a", id="CRLF"),
        pytest.param((token("\u00e4\u2028\U0001f600", "length"), USAGE, END), "\u00e4\u2028\U0001f600",
                     id="a line separator inside a string"),
        pytest.param((token("a", "length"), USAGE.replace(b"data: ", b"data:"), END), "a", id="no blank after data:"),
    ],
)
def test_server_sent_events(parts, text):
    assert ask(*parts).text == text


def test_chunks_may_end_anywhere():
    whole = token("\u00e4\U0001f600") + token("z", "length") + USAGE + END
    assert ask(*[whole[i:i + 1] for i in range(len(whole))]).text == "\u00e4\U0001f600z"


@pytest.mark.parametrize(
    ("details", "cached"),
    [("", None), (',"prompt_tokens_details":null', None), (',"prompt_tokens_details":{"cached_tokens":0}', 0),
     (',"prompt_tokens_details":{"cached_tokens":832}', 832)],
    ids=["not said", "null", "none", "some"],
)
def test_cached_tokens_are_none_where_the_server_does_not_say(details, cached):
    usage = f'data: {{"choices":[],"usage":{{"prompt_tokens":2,"completion_tokens":1{details}}}}}\n\n'.encode()
    assert ask(token("a", "length"), usage, END).cached_tokens == cached


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        pytest.param(((SSE / "too-long-0.29.0.json").read_bytes(),), 400,
                     "HTTP 400: This model's maximum context length is 49152 tokens", id="refused"),
        pytest.param((b"upstream gone",), 502, "HTTP 502: upstream gone", id="refused without JSON"),
        pytest.param(((SSE / "out-of-vocabulary-0.29.0.sse").read_bytes(),), 200,
                     "error after HTTP 200: Token id 999999 is out of vocabulary", id="error event after 200"),
        pytest.param((token("a"), b'data: {"error":"EngineCore died"}\n\n'), 200, "EngineCore died",
                     id="error event in the middle"),
        pytest.param((token("a"),), 200, "cut.*without \\[DONE\\], a finish reason, usage", id="cut after a token"),
        pytest.param((token("a", "length"), USAGE), 200, "without \\[DONE\\]", id="cut before the end mark"),
        pytest.param((token("a"), USAGE, END), 200, "without a finish reason", id="no finish"),
        pytest.param((token("a", "length"), END), 200, "without usage", id="no usage"),
        pytest.param((token("a", "length"), USAGE.rstrip(b"\n")), 200, "without", id="half an event is no event"),
        pytest.param((token("", "length"), USAGE, END), 200, "without a token", id="no token at all"),
        pytest.param((token("a", "abort"), USAGE, END), 200, "finish reason 'abort'", id="aborted"),
        pytest.param((b"data: {broken\n\n",), 200, "no JSON", id="broken event"),
        pytest.param((token("a"), httpx.ReadError("reset by peer")), 200, "the connection failed: ReadError reset",
                     id="connection lost"),
        pytest.param((b"",), 200, "cut", id="nothing"),
    ],
)
def test_what_is_no_finished_request_fails(parts, status, message):
    with pytest.raises(RequestFailed, match=message):
        ask(*parts, status=status)


@pytest.mark.parametrize(
    "parts",
    [(token("a"), 30.0), (30.0,), tuple(part for _ in range(100) for part in (b": ping\n\n", 0.02))],
    ids=["silent after a token", "silent from the start", "kept alive by comments"],
)
def test_the_deadline_holds_for_the_whole_request(parts):
    begun = time.monotonic()
    with pytest.raises(RequestFailed, match="40 prompt tokens ran past its deadline of 0.3 s"):
        ask(*parts, deadline_s=0.3)
    assert time.monotonic() - begun < 1.5


def test_no_socket_is_a_failed_request(tmp_path):
    with pytest.raises(RequestFailed, match="ConnectError"):
        client.complete(client.Address(socket=tmp_path / "none").transport(), BODY, deadline_s=5.0)


class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.do_GET()
        self.wfile.write(COMPLETION)


def test_a_server_on_a_port_is_reached_without_our_proxies(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = client.Address(f"http://127.0.0.1:{server.server_port}")
        with address.http(timeout_s=5.0) as connection:
            assert connection.get("/health").status_code == 200
        reply = client.complete(address.transport(), BODY, deadline_s=5.0, url=address.url)
        server.shutdown()
    assert reply.prompt_tokens == 40


def test_the_request_asks_for_usage_and_exact_length():
    body = client.completion_body("farm", (1, 2), max_tokens=8, seed=None, temperature=0.0)
    assert body == {"model": "farm", "prompt": [1, 2], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True,
                    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    assert client.completion_body("farm", (1,), max_tokens=1, seed=7, temperature=0.0)["seed"] == 7
