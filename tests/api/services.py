"""Two services: a scripted one for wire formats and faults, and one over an engine in this
process."""

import asyncio
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from serve_app.api.service import NO_CONTEXT, MetricsPage, ModelCard, RequestContext
from serve_app.core.request import EngineRequest
from serve_app.core.results import EMBEDDING, LOGPROBS, FinishReason, Results, TokenDelta, TokenLogprob
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_record import StepRecord
from serve_app.errors import RequestError
from serve_app.text.tokenizer import Tokenizer
from tests.engine.streams import StreamEngine

EOS = 2


@dataclass
class ScriptedService:
    """Answers every choice with `reply` (token by token, as long as `max_tokens` allows), then the
    EOS token; the first requests with `replies`, one after another. `ids`: the tokens of the reply,
    in its place.

    `error` is raised before token number `error_at` (without an error, the stream just ends there).
    With `hold`, generation waits for the event after each token.
    """

    tokenizer: Tokenizer
    reply: str = "Paris is the capital of France."
    replies: list[str] = field(default_factory=list)
    ids: list[int] | None = None
    error: Exception | None = None
    error_at: int | None = None
    hold: asyncio.Event | None = None
    ready: RequestError | None = None
    max_model_len: int = 2048
    requests: list[EngineRequest] = field(default_factory=list)
    contexts: list[RequestContext] = field(default_factory=list)
    running: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def model(self) -> ModelCard:
        return ModelCard(
            "scripted", self.max_model_len, self.tokenizer.vocab_size, 1_700_000_000, "fp_scripted", 64, "last", (EOS,)
        )

    def check_cluster(self) -> None:
        """Nothing is lost."""

    def check_ready(self) -> None:
        if self.ready is not None:
            raise self.ready

    async def metrics(self) -> MetricsPage:
        return MetricsPage(b"serve_app_up 1\n", "text/plain; version=0.0.4; charset=utf-8")

    async def generate(
        self, request: EngineRequest, context: RequestContext = NO_CONTEXT
    ) -> AsyncGenerator[list[TokenDelta], None]:
        self.requests.append(request)
        self.contexts.append(context)
        self.running += 1
        try:
            reply = self.replies.pop(0) if self.replies else self.reply
            spoken = self.tokenizer.encode(reply, add_special_tokens=False) if self.ids is None else self.ids
            ids = [*spoken, EOS][: request.params.max_tokens]
            for i, token_id in enumerate(ids):
                if i == self.error_at:
                    if self.error is not None:
                        raise self.error
                    return
                yield [self._delta(request, choice, i, token_id, ids) for choice in range(request.params.n)]
                if self.hold is not None:
                    await self.hold.wait()
                await asyncio.sleep(0)
        finally:
            self.running -= 1
            self.closed.set()

    def _delta(self, request: EngineRequest, choice: int, i: int, token_id: int, ids: list[int]) -> TokenDelta:
        reason = None
        if i == len(ids) - 1:
            reason = FinishReason.STOP if token_id == EOS else FinishReason.LENGTH
        params = request.params
        first = i == 0
        prompt_results = {}
        if first and choice == 0 and params.prompt_logprobs is not None:
            following = request.prompt_token_ids[1:]
            prompt_results[LOGPROBS] = tuple(_logprob(t, params.prompt_logprobs) for t in following)
        return TokenDelta(
            request.request_id,
            choice,
            offset=i,
            token_ids=(token_id,),
            results=_results(token_id, params),
            prompt_results=prompt_results,
            finish_reason=reason,
            num_cached_tokens=1 if first else None,
        )


def _results(token_id: int, params: SamplingParams) -> Results:
    if params.pooling is not None:
        return {EMBEDDING: (array("f", [1.0] * (params.dimensions or 64)).tobytes(),)}
    return {} if params.logprobs is None else {LOGPROBS: (_logprob(token_id, params.logprobs),)}


def _logprob(token_id: int, top: int) -> TokenLogprob:
    return TokenLogprob(token_id, -0.5, tuple((token_id + k, -0.5 - k) for k in range(top)))


@dataclass
class EngineService:
    """The engine itself, in this process and on this event loop."""

    engine: StreamEngine
    tokenizer: Tokenizer
    records: list[StepRecord]
    name: str = "babbler"

    @property
    def model(self) -> ModelCard:
        info = self.engine.info
        made = 1_700_000_000, "fp_engine"
        return ModelCard(
            self.name, info.max_model_len, info.vocab_size, *made, info.hidden_size, info.pooling, info.eos_token_ids
        )

    def check_cluster(self) -> None:
        """Nothing is lost."""

    def check_ready(self) -> None:
        return None

    async def metrics(self) -> MetricsPage:
        return MetricsPage(b"", "text/plain")

    def generate(
        self, request: EngineRequest, context: RequestContext = NO_CONTEXT
    ) -> AsyncGenerator[list[TokenDelta], None]:
        return self.engine.generate(request)
