"""What the reader of one request has been given so far: enough to let any replica go on exactly there.

Decides what of an attempt's news is new: what an earlier attempt told of the prompt, and of choices that have finished,
is left out, so that the reader sees one stream. Knows neither replicas nor time.
"""

from collections.abc import Set
from dataclasses import replace

from serve_app.core.output import TokenDelta
from serve_app.core.request import EngineRequest


class OutOfPlaceError(Exception):
    """An attempt's tokens do not begin where the known ones end."""


class Journal:
    """The journal of `request`, whose seed is fixed. `ended` may grow: choices that the reader needs no more."""

    def __init__(self, request: EngineRequest, ended: Set[int] = frozenset()) -> None:
        self.request = request
        self._ended = ended
        self._outputs = [list(ids) for ids in request.prior_output_ids] or [[] for _ in range(request.params.n)]
        self._finished: set[int] = set()
        self._told_cached: set[int] = set()
        self._told_prompt_logprobs = 0
        self._seen_prompt_logprobs = 0
        self._attempts = 0

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known, of all choices."""
        return sum(map(len, self._outputs))

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens known: what another replica computes again, unless its prefix cache has them."""
        return len(self.request.prompt_token_ids) + self.num_output_tokens

    @property
    def complete(self) -> bool:
        """Whether every choice has finished or is no longer needed."""
        return len(self._finished) == len(self._outputs) or len(self._finished | self._ended) == len(self._outputs)

    def next_attempt(self) -> EngineRequest:
        """The request as the next replica gets it, with all that is known; `accept` then takes that attempt's news."""
        self._attempts += 1
        self._seen_prompt_logprobs = 0
        if self._attempts == 1:
            return self.request
        return replace(
            self.request,
            prior_output_ids=tuple(tuple(ids) for ids in self._outputs),
            finished_choices=tuple(sorted(self._finished | self._ended)),
        )

    def accept(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Enter an attempt's news; returns what of them is new. Raises `OutOfPlaceError`."""
        news = deltas if self._attempts == 1 else [new for delta in deltas if (new := self._news(delta)) is not None]
        for count, delta in enumerate(news):
            output = self._outputs[delta.choice]
            if delta.offset != len(output):
                self._take_back(news[:count])
                raise OutOfPlaceError(f"{len(output)} tokens of choice {delta.choice}, then those from {delta.offset}")
            output += delta.token_ids
            self._told_prompt_logprobs += len(delta.prompt_logprobs)
            if delta.num_cached_tokens is not None:
                self._told_cached.add(delta.choice)
            if delta.finish_reason is not None:
                self._finished.add(delta.choice)
        return news

    def _take_back(self, news: list[TokenDelta]) -> None:
        """These were entered but will not be told: the next attempt tells them."""
        for delta in reversed(news):
            del self._outputs[delta.choice][delta.offset :]
            self._told_prompt_logprobs -= len(delta.prompt_logprobs)
            if delta.num_cached_tokens is not None:
                self._told_cached.discard(delta.choice)
            if delta.finish_reason is not None:
                self._finished.discard(delta.choice)

    def _news(self, delta: TokenDelta) -> TokenDelta | None:
        """What of `delta` no earlier attempt told. Its tokens are new: the attempt was told all before them."""
        if delta.choice in self._finished:
            return None
        repeated = max(0, self._told_prompt_logprobs - self._seen_prompt_logprobs)
        self._seen_prompt_logprobs += len(delta.prompt_logprobs)
        prompt_logprobs = delta.prompt_logprobs[repeated:]
        if not (delta.token_ids or prompt_logprobs or delta.finish_reason is not None):
            return None
        told_cached = delta.choice in self._told_cached
        return delta._replace(
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=None if told_cached else delta.num_cached_tokens,
        )
