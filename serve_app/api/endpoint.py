"""Serves a generation request of any endpoint: parse, queue, tokenize, generate, answer.

A disconnect cancels the request at any of these stages.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api import sse
from serve_app.api.admission import AsyncAdmissionQueue, Ticket
from serve_app.api.bodies.schemas import GenerationBody
from serve_app.api.caller import caller_of, session_of, timeout_of
from serve_app.api.choice_scores import OddsMeter
from serve_app.api.door.errors import internal_error
from serve_app.api.door.limits import ApiLimits
from serve_app.api.drain import Drain
from serve_app.api.generation import ChoicePiece, Generation, Usage
from serve_app.api.prepare import check_tenant, off_loop, parsed
from serve_app.api.request_events import Endpoint, RequestLog, RequestObserver
from serve_app.api.service import RequestContext, Service
from serve_app.api.tracking import RequestTracker
from serve_app.core.request import EngineRequest
from serve_app.errors import RequestError
from serve_app.tenants.accounts import Accounts, Charge
from serve_app.tenants.tenant import Tenant
from serve_app.text.parts import Part, joined
from serve_app.text.stream import StopConfig, TextPiece, TokenText, content_of

logger = logging.getLogger(__name__)

_LOGPROB = 8
"""Cost of writing the log-probability of one prompt token or alternative, in characters of
tokenizing."""


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The dependencies of every route."""

    service: Service
    admission: AsyncAdmissionQueue
    limits: ApiLimits
    observer: RequestObserver
    drain: Drain
    log: RequestLog
    accounts: Accounts
    share_prefixes: bool = False
    """Whether tenants may reuse each other's prompts in the prefix cache."""

    def cache_salt(self, given: str | None, tenant: Tenant) -> str:
        """Return the prefix cache salt.

        Only tenants that share prefixes with `tenant` get the same one.
        """
        given = given or ""
        return given if self.share_prefixes else tenant.cache_salt(given)


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice of a non-streamed answer."""

    index: int
    parts: Sequence[Part]
    logprobs: Sequence[Any]
    """`Wire.token`'s result for each token."""
    finish_reason: str
    stop_string: str | None = None
    token_ids: Sequence[int] = ()
    called: bool = False
    """As `TextPiece.called`."""

    @property
    def text(self) -> str:
        """The content, without reasoning and calls."""
        return content_of(self.parts)


class _Gained:
    """Collects one choice's pieces."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._logprobs: list[Any] = []
        self._token_ids: list[int] = []
        self._last = TextPiece()

    def add(self, piece: TextPiece, logprobs: Iterable[Any]) -> None:
        self._parts.extend(piece.parts)
        self._logprobs.extend(logprobs)
        self._token_ids.extend(piece.token_ids)
        if piece.finish_reason is not None:
            self._last = piece

    def finish(self, index: int) -> Choice:
        parts, last = joined(self._parts), self._last
        reason = last.finish_reason or ""
        return Choice(index, parts, self._logprobs, reason, last.stop_string, self._token_ids, last.called)


class Wire(Protocol):
    """Writes an endpoint's answers, streamed or whole."""

    def start(self, index: int) -> bytes:
        """Return the events before the first text of a choice."""

    def chunk(self, index: int, piece: TextPiece) -> bytes:
        """Return the event for a choice's new piece; empty if there is nothing to send."""

    def ping(self) -> bytes:
        """Return the keep-alive of an idle stream."""

    def end(self, usage: Usage) -> bytes:
        """Return the events after the last chunk."""

    def error(self, error: RequestError, request_id: str) -> bytes:
        """Return the events that end a failed stream, instead of `end`."""

    def token(self, index: int, token: TokenText) -> Any:
        """Return a token's log-probabilities in the form that `whole` needs.

        Called as each token arrives: formatting a long answer at its end would block the event loop
        for seconds.
        """

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the non-streamed answer."""


class Job(Protocol):
    """A parsed request of one endpoint."""

    @property
    def body(self) -> GenerationBody:
        """The parsed body."""

    @property
    def num_prompts(self) -> int:
        """Number of prompts that run concurrently. Each needs a ticket."""

    @property
    def stream(self) -> bool:
        """Whether to stream the answer."""

    @property
    def stop(self) -> StopConfig:
        """Conditions that end the text."""

    async def engine_requests(self, cache_salt: str) -> list[EngineRequest]:
        """Tokenize and validate. Raises `InvalidRequestError`."""

    def wire(self, generation: Generation) -> Wire:
        """Return the wire for the answer. Call after `engine_requests`."""


class GenerationResponse(Response):
    """A response that does all of the request's work while it is sent.

    So an error before the first byte can still set status and headers.
    """

    def __init__(
        self, context: ApiContext, endpoint: Endpoint, request: Request, parse: Callable[[bytes], Job]
    ) -> None:
        super().__init__()
        self._context = context
        self._endpoint = endpoint
        self._request = request
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, and cancel it if the client disconnects."""
        body = await self._request.body()
        await until_disconnect(receive, self._serve(body, send))

    async def _serve(self, body: bytes, send: Send) -> None:
        tenant: Tenant = self._request.state.tenant
        charge = self._context.accounts.open(tenant)
        with self._tracker(charge) as tracker, self._context.drain.request():
            headers = self._request.headers
            session = session_of(headers)
            deadline = self._context.admission.clock() + timeout_of(headers, self._context.limits.request_timeout_s)
            job = await parsed(self._parse, body)
            self._context.service.check_ready()
            check_tenant(tenant, self._context.service.model.name)
            caller = caller_of(tenant, job.body, deadline)
            n = max(job.body.num_choices, len(job.body.answers_with_odds))
            tickets: list[Ticket] = []
            try:
                with self._with_limit_headers(charge):
                    charge.begin(job.num_prompts * n)
                    tickets = self._context.admission.reserve(job.num_prompts, n, caller)
                    requests = await job.engine_requests(self._context.cache_salt(job.body.cache_salt, tenant))
                    meter = await OddsMeter.of(job.body, requests, self._context.service, self._context.limits)
                    scored = 0 if meter is None else meter.num_tokens
                    charge.reserve(sum(_most_tokens(request) + scored for request in requests))
                contexts = [RequestContext(deadline, session) for _ in requests]
                tracker.generates(requests, contexts)
                generation = Generation(self._context.service, requests, contexts, job.stop, tracker, meter)
                async with aclosing(generation.pieces(tickets)) as pieces:
                    if job.stream:
                        await self._stream(job, generation, pieces, tracker, send, deadline)
                    else:
                        await self._answer(job, generation, pieces, tracker, send, deadline)
            finally:
                for ticket in tickets:
                    ticket.close()

    @contextmanager
    def _with_limit_headers(self, charge: Charge) -> Iterator[None]:
        """Set the rate limit headers when the block ends, with or without an error."""
        try:
            yield
        finally:
            self._request.state.response_headers.update(charge.headers())

    def _tracker(self, charge: Charge) -> RequestTracker:
        request, context = self._request, self._context
        traceparent = request.headers.get("traceparent")
        return RequestTracker(
            context.observer,
            context.log,
            self._endpoint,
            request.state.request_id,
            context.service.model,
            charge,
            traceparent,
        )

    async def _answer(
        self,
        job: Job,
        generation: Generation,
        pieces: AsyncGenerator[list[ChoicePiece], None],
        tracker: RequestTracker,
        send: Send,
        deadline: float,
    ) -> None:
        wire = job.wire(generation)
        gained = [_Gained() for _ in generation.streams]
        async with self._context.drain.limit(deadline):
            async for step in pieces:
                for index, piece in step:
                    gained[index].add(piece, (wire.token(index, token) for token in piece.logprobs))
        tracker.settle()
        choices = [choice.finish(index) for index, choice in enumerate(gained)]
        work = partial(_whole_body, job, wire, choices, generation)
        body = await off_loop(work, _LOGPROB * generation.num_prompt_logprobs * len(choices))
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(
        self,
        job: Job,
        generation: Generation,
        pieces: AsyncGenerator[list[ChoicePiece], None],
        tracker: RequestTracker,
        send: Send,
        deadline: float,
    ) -> None:
        """Send one body message per flush. Raises errors that come before the first one.

        So these errors still set the status.
        """
        wire = job.wire(generation)
        events = sse.EventStream(send, wire.ping)
        seen = [False] * len(generation.streams)
        try:
            async with events, self._context.drain.limit(deadline):
                async for step in pieces:
                    data = bytearray()
                    for index, piece in step:
                        chunk = wire.chunk(index, piece)
                        if chunk and not seen[index]:
                            seen[index] = True
                            work = partial(wire.start, index)
                            data += await off_loop(work, _LOGPROB * generation.num_prompt_logprobs)
                        data += chunk
                    if data:
                        await events.send(bytes(data))
            tracker.settle()
            end = wire.end(generation.usage)
        except Exception as error:
            if not events.started:
                raise
            tracker.sent_error = error
            end = wire.error(self._as_request_error(error), self._request.state.request_id)
        await pieces.aclose()  # free the engine before a send that may block on a slow client
        await events.end(end)

    def _as_request_error(self, error: Exception) -> RequestError:
        if isinstance(error, RequestError):
            return error
        logger.error("request %s failed in its stream", self._request.state.request_id, exc_info=error)
        return internal_error()


def _whole_body(job: Job, wire: Wire, choices: Sequence[Choice], generation: Generation) -> bytes:
    answer = wire.whole(choices, generation.usage)
    if job.body.answers_with_odds:
        for index, choice in enumerate(answer["choices"]):
            choice["odds"] = generation.odds[index // (job.body.n or 1)]
    return orjson.dumps(answer)


def _most_tokens(request: EngineRequest) -> int:
    """Return the maximum number of tokens of the prompt and all choices."""
    assert request.params.max_tokens is not None, "the HTTP layer bounds every output"
    return len(request.prompt_token_ids) + request.params.n * request.params.max_tokens


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`. Cancel it if the client disconnects or if this task is cancelled.

    Waits until `work` has cleaned up.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
        del task, watcher  # their exceptions would keep this frame and the body alive


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
