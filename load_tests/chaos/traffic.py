"""The requests of the chaos suite, a client that records everything, and the comparison with
undisturbed answers.

Classifies answers as complete, typed error or cut. Independent of processes and faults.
"""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import Enum
from random import Random
from typing import Any

import aiohttp

MODEL = "small"
STOPPED = "seeded stop"
"""Requests of this name get a stop string from their own answer (`with_stop`)."""
_NO_ROUTE = "not found. Ping http"
"""HAProxy's answer, with status 404, after a restart while it knows no application yet."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz     "


class Outcome(Enum):
    """How a request ended, as its client sees it."""

    COMPLETE = "complete"
    """Status 200, every choice with its finish reason, `[DONE]` last."""
    ERROR = "typed error"
    """A JSON error in OpenAI's shape: the whole answer, or the last event of a stream without
    `[DONE]`."""
    CUT = "cut"
    """The connection failed, it ended without `[DONE]` or an error, or a proxy has no backend."""
    HUNG = "hung"
    """Not ended when the experiment stopped waiting."""
    WRONG = "wrong"
    """Other: `[DONE]` after an error, events after `[DONE]`, errors not in OpenAI's form."""


@dataclass(frozen=True)
class Ask:
    """A request: the body, and a name for the report."""

    name: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """A key that is equal for requests with the same answer, independent of user and
        cache salt."""
        return repr({name: value for name, value in self.body.items() if name not in ("user", "cache_salt")})


@dataclass
class Answer:
    """The recorded answer. Times are on the monotonic clock."""

    ask: Ask
    outcome: Outcome = Outcome.HUNG
    detail: str = ""
    status: int | None = None
    retry_after_s: float | None = None
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of the output, as the server counts them."""
    started_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    first_event_at: float | None = None
    last_event_at: float | None = None
    longest_gap_s: float = 0.0
    """The longest time between two events of the stream."""
    events: int = 0
    num_tokens: int = 0
    """Number of streamed tokens of all choices."""

    def wait_s(self, struck_at: float = 0.0) -> float:
        """Return the time until the first event, from the strike or the request, whichever is
        later."""
        return 0.0 if self.first_event_at is None else self.first_event_at - max(struck_at, self.started_at)

    def silence_s(self, struck_at: float = 0.0) -> float:
        """Return the longest silence, including the wait for the first event."""
        return max(self.longest_gap_s, self.wait_s(struck_at))

    def said(self) -> tuple[Any, ...]:
        """Return everything in the answer that must not depend on faults."""
        return self.texts, self.finish_reasons, self.logprobs, self.usage


@dataclass(frozen=True)
class Difference:
    """A comparison with the undisturbed answer: missing and surplus characters (= tokens),
    equality."""

    lost: int
    doubled: int
    equal: bool


def compare(answer: Answer, undisturbed: Answer) -> Difference:
    """Compare two answers. Complete ones must be equal; a failed one must be a prefix."""
    whole = answer.outcome is Outcome.COMPLETE
    lost = doubled = 0
    for index, expected in undisturbed.texts.items():
        text = answer.texts.get(index, "")
        if text == expected or (not whole and expected.startswith(text)):
            continue
        blocks = SequenceMatcher(None, expected, text, autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
        lost += len(expected) - same if whole else 0
        doubled += len(text) - same
    return Difference(lost, doubled, answer.said() == undisturbed.said() if whole else not doubled)


def first_difference(answer: Answer, undisturbed: Answer) -> str:
    """Return a description of the first difference between two answers."""
    for index, expected in undisturbed.texts.items():
        said = answer.texts.get(index, "")
        if said != expected:
            same = next((i for i, (a, b) in enumerate(zip(said, expected, strict=False)) if a != b), None)
            at = min(len(said), len(expected)) if same is None else same
            return (
                f"choice {index} differs from character {at} on ({len(said)} for {len(expected)}): "
                f"{said[at : at + 30]!r} for {expected[at : at + 30]!r}"
            )
    for name, got, wanted in (
        ("finish reasons", answer.finish_reasons, undisturbed.finish_reasons),
        ("usage", answer.usage, undisturbed.usage),
    ):
        if got != wanted:
            return f"{name} {got} for {wanted}"
    for index, entries in undisturbed.logprobs.items():
        for at, (got, wanted) in enumerate(zip(answer.logprobs.get(index, []), entries, strict=False)):
            if got != wanted:
                return f"choice {index} logprobs differ from token {at} on: {got} for {wanted}"
    return "logprobs differ in number"


def text(rng: Random, length: int) -> str:
    """Return a prompt of exactly `length` tokens."""
    return "".join(rng.choice(_LETTERS) for _ in range(length))


def ask(name: str, prompt: str | list[int], max_tokens: int, **fields: Any) -> Ask:
    """Return a streamed completion request of exactly `max_tokens` tokens per choice, unless a stop
    string ends it."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **fields,
    }
    return Ask(name, body)


def mixed(rng: Random, count: int, max_tokens: int) -> list[Ask]:
    """Return `count` different requests that use every feature that failover must preserve."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("greedy", {}),
        ("seeded", {"temperature": 1.0, "seed": 11}),
        ("seeded n=2", {"temperature": 0.9, "top_p": 0.95, "seed": 12, "n": 2}),
        ("greedy logprobs", {"logprobs": 2}),
        ("seeded penalties", {"temperature": 0.8, "seed": 13, "frequency_penalty": 0.4, "presence_penalty": 0.3}),
        ("seeded logprobs", {"temperature": 1.0, "seed": 14, "logprobs": 1, "repetition_penalty": 1.2}),
        ("seeded n=2 logprobs echo", {"temperature": 1.0, "seed": 15, "n": 2, "logprobs": 1, "echo": True}),
        (STOPPED, {"temperature": 1.0, "seed": 16, "min_tokens": max_tokens // 3}),
    ]
    asks = []
    for index in range(count):
        name, fields = kinds[index % len(kinds)]
        length = rng.randrange(20, 200)
        asks.append(ask(f"{name} {index}", text(rng, length), rng.randrange(max_tokens // 2, max_tokens), **fields))
    return asks


def with_stop(whole: Answer) -> Ask:
    """Return the request of `whole` with a stop string that ends it after about two thirds of its
    text."""
    said = whole.texts[0]
    for at in range(2 * len(said) // 3, len(said) - 3):
        stop = said[at : at + 3]
        if said.index(stop) == at:
            return Ask(whole.ask.name, whole.ask.body | {"stop": [stop]})
    return whole.ask


async def send(
    session: aiohttp.ClientSession,
    url: str,
    ask: Ask,
    on_event: Callable[[Answer], None] = lambda _: None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send and read to the end.

    Failures become the answer's outcome; if cancelled, it stays hung.
    """
    answer = Answer(ask)
    await send_into(answer, session, url, on_event, headers)
    return answer


async def send_until_taken(session: aiohttp.ClientSession, url: str, ask: Ask, limit_s: float) -> Answer:
    """Send like `send`, again after `Retry-After` while the queue is full, for at most `limit_s`
    seconds."""
    deadline = time.monotonic() + limit_s
    while True:
        answer = await send(session, url, ask)
        if answer.status != 429 or not answer.retry_after_s or time.monotonic() + answer.retry_after_s > deadline:
            return answer
        await asyncio.sleep(answer.retry_after_s)


async def send_into(
    answer: Answer,
    session: aiohttp.ClientSession,
    url: str,
    on_event: Callable[[Answer], None] = lambda _: None,
    headers: dict[str, str] | None = None,
    slow_bytes: int = 0,
    may_read: asyncio.Event | None = None,
) -> None:
    """Send like `send`, but fill in an existing answer.

    The first `slow_bytes` bytes are read at one per second. Events are read once `may_read` is set.
    """
    try:
        async with session.post(f"{url}/v1/completions", json=answer.ask.body, headers=headers) as response:
            answer.status = response.status
            if response.status == 200:
                if may_read is not None:
                    await may_read.wait()
                await _read_events(answer, response, on_event, slow_bytes)
            else:
                answer.retry_after_s = _seconds(response.headers.get("retry-after"))
                _end(answer, *_error_of(await response.text(), response.status))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        _end(answer, Outcome.CUT, f"{type(error).__name__}: {error}")
    finally:
        answer.ended_at = time.monotonic()


def open_session() -> aiohttp.ClientSession:
    """Return a session without limits of time or connections.

    Each request has its own connection.
    """
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30), read_bufsize=2**20
    )


def open_narrow_session() -> aiohttp.ClientSession:
    """Return a session like `open_session`, with small buffers, so that unread bytes stay at the
    server."""

    def narrow(address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        connection = socket.socket(family, kind, protocol)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        return connection

    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=narrow)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1024)


async def _read_events(
    answer: Answer, response: aiohttp.ClientResponse, on_event: Callable[[Answer], None], slow_bytes: int
) -> None:
    done = False
    head = b""
    for _ in range(slow_bytes):
        head += await response.content.readexactly(1)
        await asyncio.sleep(1)
    if slow_bytes:
        answer.started_at = time.monotonic()  # for this long the reader was silent, not the server
    async for line in _lines(response, head):
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if done or answer.outcome is not Outcome.HUNG:
            return _end(answer, Outcome.WRONG, f"after the end of the stream: {payload[:200]!r}")
        if payload == b"[DONE]":
            done = True
            continue
        _event(answer, json.loads(payload))
        on_event(answer)
    if answer.outcome is not Outcome.HUNG:
        return None
    if not done:
        return _end(answer, Outcome.CUT, "the stream ended without [DONE]")
    missing = answer.ask.body.get("n", 1) - len(answer.finish_reasons)
    if missing or answer.usage is None:
        return _end(answer, Outcome.WRONG, f"[DONE], but {missing} choices unfinished and usage {answer.usage}")
    return _end(answer, Outcome.COMPLETE, "")


async def _lines(response: aiohttp.ClientResponse, head: bytes) -> AsyncIterator[bytes]:
    """Yield the body's lines, which may exceed the session's buffer. head: its first bytes."""
    rest = head
    async for data in response.content.iter_any():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _event(answer: Answer, data: dict[str, Any]) -> None:
    now = time.monotonic()
    if answer.last_event_at is None:
        answer.first_event_at = now
    else:
        answer.longest_gap_s = max(answer.longest_gap_s, now - answer.last_event_at)
    answer.last_event_at = now
    answer.events += 1
    if "error" in data:
        _end(answer, *_error_of(json.dumps(data), 200))
        return
    if (usage := data.get("usage")) is not None:
        answer.num_tokens = usage["completion_tokens"]
        if not data["choices"]:
            answer.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in data["choices"]:
        index = choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + choice["text"]
        if (logprobs := choice.get("logprobs")) is not None:
            tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
            entries = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], tops, strict=True)
            answer.logprobs.setdefault(index, []).extend(entries)
        if choice["finish_reason"] is not None:
            answer.finish_reasons[index] = choice["finish_reason"]


def _error_of(body: str, status: int) -> tuple[Outcome, str]:
    """Return a typed error, or the answer of a proxy without a backend, as an outcome with text."""
    try:
        error = json.loads(body)["error"]
        return Outcome.ERROR, f"{status} {error['type']}/{error['code']}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        outcome = Outcome.CUT if status >= 500 or (status == 404 and _NO_ROUTE in body) else Outcome.WRONG
        return outcome, f"HTTP {status} without a typed error: {body[:100]!r}"


def _end(answer: Answer, outcome: Outcome, detail: str) -> None:
    answer.outcome = outcome
    answer.detail = detail[:300]


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.replace(".", "", 1).isdigit() else None


async def settle(tasks: list[asyncio.Task[None]], limit_s: float) -> None:
    """Wait for all tasks.

    Cancel those that have not ended after `limit_s` seconds; their answers stay hung.
    """
    if not tasks:
        return
    _, pending = await asyncio.wait(tasks, timeout=limit_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
