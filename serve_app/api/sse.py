"""Server-sent events as bytes. The token path builds them from pieces made once per request, not from objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    """One event of JSON data."""
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event of JSON data, with its name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


@dataclass(frozen=True, slots=True)
class ChunkUsage:
    """Where a stream tells its usage.

    at_end: in an event after the last chunk. so_far: makes the `usage` field of a chunk, with its comma, or nothing.
    """

    at_end: bool
    so_far: Callable[[], bytes]


class ChunkTemplate:
    """Chunks with one choice each, which differ only in that choice."""

    def __init__(self, head: dict[str, Any], usage: ChunkUsage) -> None:
        """`head` holds the fields of every chunk but `choices` and `usage`."""
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
        """One event. `content` is the choice's own field as JSON, such as b'"text":"..."'.

        `of_choice` and `of_chunk` are more fields, each with a comma before it.
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
        """The events after the last chunk; one with no choices and the whole usage, if that was asked for."""
        return event({**self._head, "choices": [], "usage": usage}) + DONE if self._usage.at_end else DONE

    def error(self, error: bytes) -> bytes:
        """The last event of a stream that failed; `error` is the JSON of an error response."""
        return named_event("error", error)
