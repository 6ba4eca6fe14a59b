"""Computes the odds of the answers in `structured_outputs.choice`.

This runs after the prompt's own answer, when the prompt is in the prefix cache. Each allowed answer
then costs about as much as its own tokens.
"""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

from serve_app.api.bodies.schemas import GenerationBody
from serve_app.api.door.limits import ApiLimits
from serve_app.api.merging import merge
from serve_app.api.prepare import off_loop
from serve_app.api.service import RequestContext, Service
from serve_app.core.request import EngineRequest
from serve_app.errors import ContextLengthError, InvalidRequestError
from serve_app.text.choice_scores import Odds, answer_tokens, odds, scoring_params

_FIELD = "structured_outputs.choice"


@dataclass(frozen=True, slots=True)
class OddsMeter:
    """Computes the odds of `answers` after each prompt of one HTTP request."""

    service: Service
    answers: Sequence[str]
    token_ids: Sequence[tuple[int, ...]]

    @classmethod
    async def of(
        cls, body: GenerationBody, requests: Sequence[EngineRequest], service: Service, limits: ApiLimits
    ) -> Self | None:
        """Return a meter, or None if the request does not ask for odds.

        Raises `InvalidRequestError` naming the limit.
        """
        answers = body.answers_with_odds
        if not answers:
            return None
        tokenizer, context = service.tokenizer, service.model.max_model_len
        work = partial(answer_tokens, tokenizer, answers, service.model.end_ids)
        token_ids = await off_loop(work, sum(map(len, answers)))
        meter = cls(service, answers, token_ids)
        if meter.num_tokens * len(requests) > limits.max_prompt_logprobs:
            raise InvalidRequestError(
                f"`{_FIELD}` with `odds` has {meter.num_tokens} tokens for each of {len(requests)} prompts: at most "
                f"{limits.max_prompt_logprobs} per request",
                param=_FIELD,
            )
        room = context - 1 - max(len(request.prompt_token_ids) for request in requests)
        if (longest := max(map(len, token_ids))) > room:
            raise ContextLengthError(
                f"`{_FIELD}` contains an answer of {longest} tokens, but this model's context of {context} tokens "
                f"leaves {room} after the prompt",
                param=_FIELD,
            )
        return meter

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers together. They count as prompt tokens."""
        return sum(map(len, self.token_ids))

    async def measure(self, request: EngineRequest, context: RequestContext) -> list[Odds]:
        """Return the odds of each answer after the prompt of `request`. Raises `RequestError`."""
        logprobs: list[list[float]] = [[] for _ in self.answers]
        runs = [self._run(request, context, number) for number in range(len(self.answers))]
        async with aclosing(merge(runs)) as merged:
            async for found in merged:
                for number, logprob in found:
                    logprobs[number].append(logprob)
        return odds(self.answers, logprobs)

    async def _run(
        self, request: EngineRequest, context: RequestContext, number: int
    ) -> AsyncGenerator[list[tuple[int, float]], None]:
        prompt = request.prompt_token_ids
        scored = replace(
            request,
            request_id=uuid.uuid4().hex,
            prompt_token_ids=(*prompt, *self.token_ids[number]),
            params=scoring_params(len(prompt)),
        )
        async with aclosing(self.service.generate(scored, replace(context, ended_choices=set()))) as steps:
            async for deltas in steps:
                yield [(number, entry.logprob) for delta in deltas for entry in delta.prompt_logprobs]
