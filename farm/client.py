"""One request: a streamed completion of a server on this machine, timed and accounted for.

Token counts are the server's own usage.  Time to first token is the arrival of the first event
that carries one: by the running usage that vLLM puts into each event, or by its text or
delta; a byte-level tokenizer's first token may well decode to no text at all.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from farm.bench import Reply
from farm.errors import RequestFailed, RequestOverdue

_BROKEN_FINISH = ("abort", "error")  # vLLM's finish reasons of a request that did not run to its end
LOOK_EVERY_S = 0.5
_ON_SOCKET = "http://server"  # the host in the URL of a request over a Unix socket: any


@dataclass(frozen=True)
class Address:
    """Where a server is reached: its Unix socket, or the URL of a loopback address and port.

    Transports are named in full, so that no proxy of our own environment comes between.
    """

    url: str = _ON_SOCKET
    socket: Path | None = None

    def http(self, timeout_s: float) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=None if self.socket is None else str(self.socket))
        return httpx.Client(transport=transport, base_url=self.url, timeout=timeout_s)

    def transport(self) -> httpx.AsyncHTTPTransport:
        """Of one request: each takes a fresh one."""
        return httpx.AsyncHTTPTransport(uds=None if self.socket is None else str(self.socket))


def completion_body(model: str, prompt: Sequence[int], *, max_tokens: int, seed: int | None,
                    temperature: float) -> dict[str, Any]:
    """The JSON of a request.  End-of-text is ignored, so that every arm decodes `max_tokens` tokens."""
    body: dict[str, Any] = {
        "model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": temperature,
        "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if seed is not None:
        body["seed"] = seed
    return body


def complete(transport: httpx.AsyncBaseTransport, body: Mapping[str, Any], *, deadline_s: float,
             path: str = "/v1/completions", url: str = _ON_SOCKET, look: Callable[[], None] = lambda: None) -> Reply:
    """Send `body` and read its stream to the end.

    Raises RequestFailed: refused, an error event after HTTP 200, a stream that was cut or ended
    without usage; RequestOverdue: a whole request longer than `deadline_s` seconds, however it spent them.
    Meanwhile `look` is called every LOOK_EVERY_S; what it raises ends the request.
    """
    stream = _Stream(path)

    async def bounded() -> Reply:
        return await asyncio.wait_for(_watched(_request(transport, body, stream, url), look), deadline_s)

    try:
        return asyncio.run(bounded())
    except (TimeoutError, asyncio.TimeoutError) as error:  # two classes on Python 3.10
        heard = "it had begun to answer" if stream.heard else "no part of an answer had come"
        raise RequestOverdue(f"{path} with {_size(body)} ran past its deadline of {deadline_s:g} s; {heard}",
                             heard=stream.heard) from error
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RequestFailed(f"{path} with {_size(body)}: an answer of another form than the API's: "
                            f"{type(error).__name__} {error}") from error
    except httpx.HTTPError as error:
        raise RequestFailed(f"{path} with {_size(body)}: the connection failed: "
                            f"{type(error).__name__} {error}".rstrip()) from error


def _size(body: Mapping[str, Any]) -> str:
    return f"{len(body.get('prompt', ()))} prompt tokens"


async def _watched(request: Coroutine[Any, Any, Reply], look: Callable[[], None]) -> Reply:
    task = asyncio.ensure_future(request)
    try:
        while not (await asyncio.wait([task], timeout=LOOK_EVERY_S))[0]:
            look()
        return task.result()
    finally:
        task.cancel()


async def _request(transport: httpx.AsyncBaseTransport, body: Mapping[str, Any], stream: _Stream, url: str) -> Reply:
    path = stream.path
    async with httpx.AsyncClient(transport=transport, base_url=url, timeout=None) as client:
        payload = json.dumps(body).encode()  # outside the clock
        begun = time.perf_counter()
        async with client.stream("POST", path, content=payload,
                                 headers={"Content-Type": "application/json"}) as response:
            if response.status_code != 200:
                raise RequestFailed(f"{path}: HTTP {response.status_code}: {_message(await response.aread())}")
            async for event in events(response.aiter_bytes()):
                if stream.take(event) and stream.first_token_at is None:
                    stream.first_token_at = time.perf_counter()
        return stream.reply(begun, time.perf_counter())


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event.  Comments, other fields and blank events are skipped.

    Lines are cut as bytes: a chunk may end inside a character, and str.splitlines would
    also cut at characters (U+2028, form feed) that JSON strings may hold.
    """
    buffer = b""
    data: list[str] = []
    async for chunk in chunks:
        *lines, buffer = (buffer + chunk).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].decode("utf-8", "replace").removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data = []


class _Stream:
    """What one response's events have said so far."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.first_token_at: float | None = None
        self.text: list[str] = []
        self.usage: Mapping[str, Any] | None = None
        self.finish: str | None = None
        self.done = False
        self.heard = False  # any event

    def take(self, data: str) -> bool:
        """Account for one event.  True where it carries at least one token."""
        self.heard = True
        if data == "[DONE]":
            self.done = True
            return False
        try:
            event = json.loads(data)
        except json.JSONDecodeError as error:
            raise RequestFailed(f"{self.path}: an event that is no JSON: {data[:200]!r}") from error
        if not isinstance(event, dict) or "error" in event:
            raise RequestFailed(f"{self.path}: error after HTTP 200: {_message(data.encode())}")
        usage = event.get("usage")
        choices = event.get("choices") or []
        if usage and not choices:
            self.usage = usage
        carries = bool(choices) and bool(usage and usage.get("completion_tokens"))
        for choice in choices:
            delta = choice.get("delta") or {}
            said = [choice.get("text"), delta.get("content"), delta.get("reasoning"), delta.get("reasoning_content")]
            carries = carries or any(said) or bool(choice.get("token_ids")) or bool(delta.get("tool_calls"))
            self.text.extend(part for part in said[:2] if part)
            self.finish = choice.get("finish_reason") or self.finish
        return carries

    def reply(self, begun: float, ended: float) -> Reply:
        if self.finish in _BROKEN_FINISH:
            raise RequestFailed(f"{self.path}: the server ended the request with finish reason {self.finish!r}")
        missing = [name for name, there in (("[DONE]", self.done), ("a finish reason", self.finish),
                                            ("usage", self.usage)) if not there]
        if missing or self.usage is None:
            raise RequestFailed(f"{self.path}: the stream was cut: it ended without {', '.join(missing)}")
        if self.first_token_at is None:
            raise RequestFailed(f"{self.path}: the stream ended without a token (usage {dict(self.usage)})")
        details = self.usage.get("prompt_tokens_details") or {}
        return Reply(
            ttft_s=self.first_token_at - begun, total_s=ended - begun,
            prompt_tokens=self.usage["prompt_tokens"], completion_tokens=self.usage.get("completion_tokens") or 0,
            cached_tokens=details.get("cached_tokens"), text="".join(self.text),
        )


def _message(body: bytes) -> str:
    """The server's own words in an error body, else its first bytes."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body[:300].decode("utf-8", "replace")
