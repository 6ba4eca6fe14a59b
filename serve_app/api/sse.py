"""Builds and sends server-sent events.

Chunks are built from bytes that are prepared once per request, not from objects.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import orjson
from starlette.types import Send

KEEP_ALIVE_S = 15.0
"""Proxies and clients close streams that are idle for 60 s, some after 30 s."""
PING = b": ping\n\n"
"""A comment, which clients skip."""
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    """Return one event of JSON data."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """Return one named event of JSON data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class EventStream:
    """The body of a streamed answer. The response starts with the first event.

    Sends `ping` after `KEEP_ALIVE_S` without an event. One task does this for the whole stream; a
    timeout around each event would need a task per event.
    """

    def __init__(self, send: Send, ping: Callable[[], bytes]) -> None:
        self.started = False
        self._to_client = send
        self._ping = ping
        self._turn = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._sent_at = self._clock()

    async def __aenter__(self) -> Self:
        self._pinging = asyncio.create_task(self._ping_when_quiet())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pinging.cancel()
        await asyncio.gather(self._pinging, return_exceptions=True)

    async def send(self, events: bytes) -> None:
        """Send events. The first call also sends the response's headers."""
        async with self._turn:
            if not self.started:
                self.started = True
                await self._to_client({"type": "http.response.start", "status": 200, "headers": [*HEADERS]})
            await self._to_client({"type": "http.response.body", "body": events, "more_body": True})
            self._sent_at = self._clock()

    async def end(self, events: bytes) -> None:
        """Send the last events. Call after leaving the context."""
        await self._to_client({"type": "http.response.body", "body": events, "more_body": False})

    async def _ping_when_quiet(self) -> None:
        while True:
            left = self._sent_at + KEEP_ALIVE_S - self._clock()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self.send(self._ping())


@dataclass(frozen=True, slots=True)
class ChunkUsage:
    """Where a stream reports its usage.

    at_end: in an event after the last chunk. so_far: returns a chunk's `usage` field with its
    comma, or nothing.
    """

    at_end: bool
    so_far: Callable[[], bytes]


class ChunkTemplate:
    """Builds the chunks of a stream, which differ only in `choices` and `usage`."""

    def __init__(self, head: dict[str, Any], usage: ChunkUsage) -> None:
        """head: the fields of every chunk except `choices` and `usage`."""
        self._head = head
        self._open = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._usage = usage

    def chunk(
        self,
        index: int,
        content: bytes,
        logprobs: Any,
        finish_reason: str | None,
        of_choice: bytes = b"",
        of_chunk: bytes = b"",
    ) -> bytes:
        """Return one event. `content` is the choice's own field as JSON, such as b'"text":"..."'.

        of_choice, of_chunk: more fields as JSON, each with a comma before it.
        """
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b%b}\n\n' % (
            self._open,
            index,
            content,
            b"null" if logprobs is None else orjson.dumps(logprobs),
            b"null" if finish_reason is None else b'"%b"' % finish_reason.encode(),
            of_choice,
            of_chunk,
            self._usage.so_far(),
        )

    def end(self, usage: dict[str, Any]) -> bytes:
        """Return the events after the last chunk, with the usage if the request asked for it."""
        return event({**self._head, "choices": [], "usage": usage}) + DONE if self._usage.at_end else DONE

    def error(self, error: bytes) -> bytes:
        """Return the last event of a failed stream. `error` is the JSON of an error response."""
        return named_event("error", error)
