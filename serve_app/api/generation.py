"""Runs the engine requests of one HTTP request and merges them into text pieces.

Independent of the wire format.
"""

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import orjson

from serve_app.api.admission import Ticket
from serve_app.api.bodies.schemas import GenerationBody
from serve_app.api.choice_scores import OddsMeter
from serve_app.api.merging import merge
from serve_app.api.service import RequestContext, Service
from serve_app.api.sse import ChunkUsage
from serve_app.api.tracking import RequestTracker
from serve_app.core.request import EngineRequest
from serve_app.core.results import LOGPROBS, TokenDelta, TokenLogprob
from serve_app.errors import EngineError
from serve_app.text.choice_scores import Odds
from serve_app.text.stream import StopConfig, TextPiece, TextStream

ChoicePiece = tuple[int, TextPiece]
"""(index of the choice in the answer, its new piece)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer so far. `cached_tokens` are prompt tokens found in the prefix
    cache."""

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
    """Runs `requests`, one per prompt, all with the same n.

    Choice c of prompt p is choice p * n + c of the answer.
    """

    def __init__(
        self,
        service: Service,
        requests: Sequence[EngineRequest],
        contexts: Sequence[RequestContext],
        stop: StopConfig,
        tracker: RequestTracker,
        meter: OddsMeter | None = None,
    ) -> None:
        self._service = service
        self._requests = requests
        self._contexts = contexts
        self._tracker = tracker
        self._meter = meter
        self._num_scored_tokens = 0 if meter is None else meter.num_tokens
        self.n = requests[0].params.n
        self.streams = [
            TextStream(service.tokenizer, request.prompt_token_ids, stop) for request in requests for _ in range(self.n)
        ]
        self._last_at: list[float | None] = [None] * len(self.streams)
        self._cached_tokens = [0] * len(requests)
        self.prompt_logprobs: list[list[TokenLogprob]] = [[] for _ in requests]
        """Per prompt, one entry for each prompt token after the first. Complete when the first
        choice has text."""
        self.results: list[dict[str, list[Any]]] = [{} for _ in self.streams]
        """Per choice and kind of result, one entry per token. Log-probabilities are in the pieces
        instead."""
        self.keep: Callable[[Any], Any] = lambda entry: entry
        """Converts each entry of `results` as it arrives, for example to the form that the wire
        sends."""
        self.odds: list[list[Odds]] = [[] for _ in requests]
        """Per prompt, the odds of the answers of `meter`. Complete when the prompt's choices have
        ended."""

    @property
    def usage(self) -> Usage:
        """Token counts so far.

        Prompt tokens count once per prompt, not per choice, and include the answers that are scored
        for odds.
        """
        reasoning = [count for stream in self.streams if (count := stream.num_reasoning_tokens) is not None]
        return Usage(
            sum(len(request.prompt_token_ids) + self._num_scored_tokens for request in self._requests),
            sum(stream.num_tokens for stream in self.streams),
            sum(self._cached_tokens),
            sum(reasoning) if reasoning else None,
        )

    @property
    def num_prompt_logprobs(self) -> int:
        """Number of prompt log-probabilities in one choice, with alternatives; the mean over
        prompts."""
        alternatives = self._requests[0].params.prompt_logprobs or 0
        return (1 + alternatives) * sum(map(len, self.prompt_logprobs)) // len(self._requests)

    def prompt_token_ids(self, prompt: int) -> tuple[int, ...]:
        """Token ids of prompt number `prompt`."""
        return self._requests[prompt].prompt_token_ids

    async def pieces(self, tickets: Sequence[Ticket]) -> AsyncGenerator[list[ChoicePiece], None]:
        """Yield the new pieces of each engine step until all choices have ended.

        Each ticket gets an equal share of the requests and runs them one after another. Raises
        `RequestError`. Closing the generator aborts all requests.
        """
        every = len(self._requests)
        runs = [self._run(range(i, every, len(tickets)), ticket) for i, ticket in enumerate(tickets)]
        async with aclosing(runs[0] if len(runs) == 1 else merge(runs)) as merged:
            async for pieces in merged:
                yield pieces

    async def _run(self, share: Sequence[int], ticket: Ticket) -> AsyncGenerator[list[ChoicePiece], None]:
        async with ticket:
            for index in share:
                first = index * self.n
                streams = self.streams[first : first + self.n]
                request, context = self._requests[index], replace(self._contexts[index], slots=ticket)
                async with aclosing(self._service.generate(request, context)) as steps:
                    self._tracker.queued(ticket.waited_s, len(request.prompt_token_ids) + self._num_scored_tokens)
                    async for deltas in steps:
                        yield [(first + delta.choice, self._feed(index, delta)) for delta in deltas]
                        if all(stream.finish_reason is not None for stream in streams):
                            break
                    else:
                        raise EngineError("the engine ended the stream before the answer was complete")
                if self._meter is not None:
                    self.odds[index] = await self._meter.measure(request, context)

    def _feed(self, index: int, delta: TokenDelta) -> TextPiece:
        choice = index * self.n + delta.choice
        stream = self.streams[choice]
        if delta.choice == 0:
            if delta.num_cached_tokens is not None:
                self._cached_tokens[index] = delta.num_cached_tokens
                self._tracker.found_cached(index, delta.num_cached_tokens)
            if delta.prompt_results:
                self.prompt_logprobs[index].extend(delta.prompt_logprobs)
        before, reasoned = stream.num_tokens, stream.num_reasoning_tokens or 0
        for kind, entries in delta.results.items():
            if kind != LOGPROBS:
                self.results[choice].setdefault(kind, []).extend(map(self.keep, entries[before - delta.offset :]))
        piece = stream.feed(delta)
        if piece.finish_reason is not None:
            self._contexts[index].ended_choices.add(delta.choice)
        if count := stream.num_tokens - before:
            now = time.monotonic()
            last, self._last_at[choice] = self._last_at[choice], now
            gap = None if last is None else now - last
            self._tracker.tokens(count, gap, (stream.num_reasoning_tokens or 0) - reasoned)
        return piece


def chunk_usage(body: GenerationBody, generation: Generation) -> ChunkUsage:
    """Return what each chunk has as `usage`: nothing, null, or the tokens so far."""
    if body.wants_running_usage:
        return ChunkUsage(True, lambda: b',"usage":%b' % orjson.dumps(generation.usage.to_json()))
    field = b',"usage":null' if body.wants_usage else b""
    return ChunkUsage(body.wants_usage, lambda: field)
