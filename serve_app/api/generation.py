"""One HTTP request's generation: its engine requests, merged into text pieces per choice. Knows no wire format."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import orjson

from serve_app.api.admission import Ticket
from serve_app.api.schemas import GenerationBody
from serve_app.api.service import RequestContext, Service
from serve_app.api.sse import ChunkUsage
from serve_app.api.tracking import RequestTracker
from serve_app.core.request import EngineRequest
from serve_app.core.results import LOGPROBS, TokenDelta, TokenLogprob
from serve_app.errors import EngineError
from serve_app.text.stream import StopConfig, TextPiece, TextStream

ChoicePiece = tuple[int, TextPiece]
"""(index of the choice in the answer, what it gained)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer so far. `cached_tokens` are prompt tokens found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage


class Generation:
    """Runs `requests` (one per prompt, all with the same n); choice c of prompt p is choice p * n + c of the answer."""

    def __init__(
        self,
        service: Service,
        requests: Sequence[EngineRequest],
        contexts: Sequence[RequestContext],
        stop: StopConfig,
        tracker: RequestTracker,
    ) -> None:
        self._service = service
        self._requests = requests
        self._contexts = contexts
        self._tracker = tracker
        self.n = requests[0].params.n
        self.streams = [
            TextStream(service.tokenizer, request.prompt_token_ids, stop) for request in requests for _ in range(self.n)
        ]
        self._last_at: list[float | None] = [None] * len(self.streams)
        self._cached_tokens = [0] * len(requests)
        self.prompt_logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
        """Per prompt, for each prompt token after the first; complete when its first choice has text."""
        self.results: list[dict[str, list[Any]]] = [{} for _ in self.streams]
        """Per choice, an entry per token of each kind of result; of log-probabilities none: its pieces hold them."""

    @property
    def usage(self) -> Usage:
        """Tokens so far; each prompt counts once, however many choices it has."""
        reasoning = [count for stream in self.streams if (count := stream.num_reasoning_tokens) is not None]
        return Usage(
            sum(len(request.prompt_token_ids) for request in self._requests),
            sum(stream.num_tokens for stream in self.streams),
            sum(self._cached_tokens),
            sum(reasoning) if reasoning else None,
        )

    async def pieces(self, tickets: Sequence[Ticket]) -> AsyncGenerator[list[ChoicePiece], None]:
        """What each step of the engine adds, until all choices have ended. Raises `RequestError`.

        `tickets` are the requests' places in the queue; each request starts on its turn. Closing this closes all.
        """
        runs = [self._run(i, ticket) for i, ticket in enumerate(tickets)]
        async with aclosing(runs[0] if len(runs) == 1 else _merge(runs)) as merged:
            async for pieces in merged:
                yield pieces

    async def _run(self, index: int, ticket: Ticket) -> AsyncGenerator[list[ChoicePiece], None]:
        first = index * self.n
        streams = self.streams[first : first + self.n]
        async with ticket, aclosing(self._service.generate(self._requests[index], self._contexts[index])) as steps:
            self._tracker.queued(ticket.waited_s, len(self._requests[index].prompt_token_ids))
            async for deltas in steps:
                pieces = [(first + delta.choice, self._feed(index, delta)) for delta in deltas]
                yield pieces
                if all(stream.finish_reason is not None for stream in streams):
                    return
        raise EngineError("the engine ended the stream before the answer was complete")

    def _feed(self, index: int, delta: TokenDelta) -> TextPiece:
        choice = index * self.n + delta.choice
        stream = self.streams[choice]
        if delta.choice == 0:
            if delta.num_cached_tokens is not None:
                self._cached_tokens[index] = delta.num_cached_tokens
                self._tracker.found_cached(index, delta.num_cached_tokens)
            if delta.prompt_results:
                self.prompt_logprobs[index].extend(delta.prompt_logprobs)
        before = stream.num_tokens
        for kind, entries in delta.results.items():
            if kind != LOGPROBS:
                self.results[choice].setdefault(kind, []).extend(entries[before - delta.offset :])
        piece = stream.feed(delta)
        if piece.finish_reason is not None:
            self._contexts[index].ended_choices.add(delta.choice)
        if count := stream.num_tokens - before:
            now = time.monotonic()
            last, self._last_at[choice] = self._last_at[choice], now
            self._tracker.tokens(count, None if last is None else now - last)
        return piece


def chunk_usage(body: GenerationBody, generation: Generation) -> ChunkUsage:
    """What the chunks of the answer to `body` say as their usage: nothing, null, or the tokens so far."""
    if body.wants_running_usage:
        return ChunkUsage(True, lambda: b',"usage":%b' % orjson.dumps(generation.usage.to_json()))
    field = b',"usage":null' if body.wants_usage else b""
    return ChunkUsage(body.wants_usage, lambda: field)


async def _merge(
    runs: Sequence[AsyncGenerator[list[ChoicePiece], None]],
) -> AsyncGenerator[list[ChoicePiece], None]:
    """Items of all runs as they come. The first error ends all of them."""
    items: asyncio.Queue[list[ChoicePiece] | Exception | None] = asyncio.Queue(maxsize=len(runs))

    async def pump(run: AsyncGenerator[list[ChoicePiece], None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(run):
                async for pieces in run:
                    await items.put(pieces)
        except Exception as error:
            end = error
        await items.put(end)

    pumps = [asyncio.create_task(pump(run)) for run in runs]
    running = len(pumps)
    try:
        while running:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
