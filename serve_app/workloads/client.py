"""An asynchronous load generator for any server with OpenAI's `/v1/completions`.

Decides when requests are sent and how time and tokens are counted; independent of any server's
internals.

Time to first token (TTFT): from sending a request to its first event with a token. Inter-token
latency (ITL): gap between consecutive such events, pooled over all requests. Time per output token
(TPOT): (end - first token) / (tokens - 1) of one request. Tokens: the server's `usage`, otherwise
its text tokenized again; chunks are never counted.

Closed loop: at most `concurrency` requests are in flight (one per user if users take turns), and a
request's clock starts when it is sent.

Open loop: requests are sent at their own times, however slow the answers are. A request's clock
starts when it is due, even if this process sends it late or retries it after a refusal, so that
queueing is not hidden. `late_s` is how late this process sent it.
"""

import asyncio
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from serve_app.workloads.mixes import WorkItem, Workload
from serve_app.workloads.prompts import PromptWriter

MAX_TOKENS_PLACEHOLDER = "$MAX_TOKENS"
SAMPLING_PLACEHOLDER = "$SAMPLING"
_NO_TRUNCATION = {"top_k": 0, "min_p": 0}
"""Disable these, because servers have their own defaults for them."""
REFUSALS = (429, 503)


@dataclass(frozen=True, slots=True)
class Server:
    """Where to send requests, and what a server requires or does not accept.

    `extra_body` is merged into every body. In it, the string "$MAX_TOKENS" is replaced by the
    item's number of tokens; "$SAMPLING" inside a string by its sampling, as in transformers'
    generation config without the braces. `extensions` False omits fields outside OpenAI's API, and
    `stream_options`, for servers that reject unknown fields.
    """

    base_url: str
    model: str
    extra_body: dict[str, Any] = field(default_factory=dict)
    extensions: bool = True
    timeout_s: float = 900.0
    api_key: str | None = field(default=None, repr=False)

    def body(self, item: WorkItem) -> dict[str, Any]:
        """Return the JSON body of a streaming completion with `item`'s length and sampling."""
        sampling = item.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": item.prompt,
            "max_tokens": item.output_tokens,
            "temperature": sampling.temperature,
            "stream": True,
        }
        if sampling.temperature:
            body |= {"top_p": sampling.top_p} | (_NO_TRUNCATION if self.extensions else {})
        if self.extensions:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        body.update(_fill_in(self.extra_body, item))
        return body


def _fill_in(value: Any, item: WorkItem) -> Any:
    if isinstance(value, dict):
        return {key: _fill_in(inner, item) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill_in(inner, item) for inner in value]
    if value == MAX_TOKENS_PLACEHOLDER:
        return item.output_tokens
    if not isinstance(value, str):
        return value
    sampling = json.dumps(item.sampling.for_transformers)[1:-1]
    return value.replace(MAX_TOKENS_PLACEHOLDER, str(item.output_tokens)).replace(SAMPLING_PLACEHOLDER, sampling)


@dataclass(slots=True)
class RequestResult:
    """The result of one request. Times are in seconds.

    `error` is None on success and if the client disconnected.
    """

    item: WorkItem
    error: str | None = None
    ttft_s: float | None = None
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int | None = None
    """As reported by the server; None if not reported."""
    due_s: float = 0.0
    """When its clock started, in seconds from the start of the run."""
    late_s: float = 0.0
    """How long after `due_s` it was first sent."""
    status: int | None = None
    """HTTP status of the last attempt; None if there was no answer."""
    retry_after_s: float | None = None
    """The `Retry-After` of the last refusal."""
    attempts: int = 1
    cancelled: bool = False
    """The client disconnected on purpose: latencies until then count, the length does not."""

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first; None for answers of one token."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


class _Stream:
    """Reads one answer's events and records when tokens arrived. `start`: its clock's start."""

    def __init__(self, result: RequestResult, start: float) -> None:
        self.result = result
        self.text: list[str] = []
        self.usage: dict[str, Any] = {}
        self._start = start
        self._last: float | None = None
        self._ended = False

    def event(self, data: dict[str, Any]) -> None:
        now = time.perf_counter()
        if data.get("error"):
            self.result.error = str(data["error"])[:300]
        self.usage = data.get("usage") or self.usage
        for choice in (data.get("choices") or [])[:1]:
            text, closing = choice.get("text") or "", choice.get("finish_reason") is not None
            self.text.append(text)
            self._ended |= closing
            # A final event without text has no token, unless it is the only event: then its token
            # has no printable text.
            if text or not closing or self._last is None:
                if self._last is None:
                    self.result.ttft_s = now - self._start
                else:
                    self.result.gaps_s.append(now - self._last)
                self._last = now

    def done(self) -> None:
        """Record that the server sent `[DONE]`."""
        self._ended = True

    def close(self, count: Callable[[str], int]) -> None:
        """Record the end of the connection, and count the tokens received."""
        result = self.result
        result.e2e_s = time.perf_counter() - self._start
        result.prompt_tokens = self.usage.get("prompt_tokens")
        reported = self.usage.get("completion_tokens")
        result.output_tokens = count("".join(self.text)) if reported is None else reported
        if result.error is None and result.ttft_s is None:
            result.error = "the answer contained no token"
        elif result.error is None and not self._ended:
            result.error = "the stream ended early"


async def send(
    session: aiohttp.ClientSession,
    server: Server,
    item: WorkItem,
    count: Callable[[str], int],
    clock_start: float | None = None,
) -> RequestResult:
    """Send one request and read its stream to the end.

    Reports failures in the result, never raises. `clock_start`: when latencies start to count, in
    `time.perf_counter` seconds; default: now.
    """
    now = time.perf_counter()
    start = now if clock_start is None else clock_start
    result = RequestResult(item, late_s=now - start)
    stream = _Stream(result, start)
    try:
        async with session.post(f"{server.base_url.rstrip('/')}/v1/completions", json=server.body(item)) as response:
            result.status = response.status
            if response.status != 200:
                result.error = f"HTTP {response.status} {(await response.text())[:300]}"
                result.retry_after_s = _seconds(response.headers.get("Retry-After"))
            else:
                await _read(response, stream)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    stream.close(count)
    return result


async def _read(response: aiohttp.ClientResponse, stream: _Stream) -> None:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return stream.done()
        stream.event(orjson.loads(payload))


def _seconds(header: str | None) -> float | None:
    """Return a Retry-After in seconds; None if missing or a date.

    No server measured here sends a date.
    """
    return float(header) if header is not None and header.isdecimal() else None


async def send_again(
    session: aiohttp.ClientSession,
    server: Server,
    item: WorkItem,
    count: Callable[[str], int],
    clock_start: float,
    retries: int,
) -> RequestResult:
    """Like `send`, but retry refusals after their Retry-After, at most `retries` times.

    Latencies and `late_s` count from `clock_start` and the first attempt, because the user waits
    from then on.
    """
    result = await send(session, server, item, count, clock_start)
    late_s, attempts = result.late_s, 1
    while result.status in REFUSALS and result.retry_after_s is not None and attempts <= retries:
        await asyncio.sleep(result.retry_after_s)
        result = await send(session, server, item, count, clock_start)
        attempts += 1
    result.late_s, result.attempts = late_s, attempts
    return result


def open_session(server: Server) -> aiohttp.ClientSession:
    """Return a session without a connection limit.

    Each request opens its own connection, as separate users would.
    """
    return aiohttp.ClientSession(
        headers={} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"},
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=server.timeout_s, sock_connect=30),
        read_bufsize=2**20,
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one workload sent once, in the workload's order, and the duration in seconds."""

    workload: Workload
    results: tuple[RequestResult, ...]
    seconds: float
    client_cpu_s: float


async def run_workload(
    server: Server,
    workload: Workload,
    writer: PromptWriter,
    on_done: Callable[[RequestResult], None] = lambda _: None,
    retries: int = 0,
) -> Run:
    """Send all requests of the workload, closed or open loop, and wait for all answers.

    `retries`: how often a refused open-loop request is retried after its Retry-After.
    """
    gates = [asyncio.Semaphore(places) for places in workload.lanes]
    before = _own_cpu_s()
    start = time.perf_counter()

    async def one(session: aiohttp.ClientSession, number: int, item: WorkItem) -> RequestResult:
        if workload.concurrency is None:
            await asyncio.sleep(max(0.0, start + item.at_s - time.perf_counter()))
            result = await send_again(session, server, item, writer.count, start + item.at_s, retries)
            result.due_s = item.at_s
        else:
            async with gates[number % len(gates)]:
                due_s = time.perf_counter() - start
                result = await send(session, server, item, writer.count)
                result.due_s = due_s
        on_done(result)
        return result

    async with open_session(server) as session:
        start = time.perf_counter()
        results = await asyncio.gather(*(one(session, number, item) for number, item in enumerate(workload.items)))
        seconds = time.perf_counter() - start
    return Run(workload, tuple(results), seconds, _own_cpu_s() - before)


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
