"""The output that the reader of one request has received; enough for any replica to continue.

Decides which of an attempt's outputs are new. Repeated prompt results, and choices that have
finished, are dropped, so that the reader sees one stream. Tokens are never dropped: tokens that do
not start where the known ones end are an error of the attempt (`TokenGapError`). Independent of
replicas and time.
"""

from collections import Counter
from collections.abc import Set
from dataclasses import replace

from serve_app.core.request import EngineRequest
from serve_app.core.results import Results, TokenDelta


class TokenGapError(Exception):
    """An attempt's tokens do not start where the known ones end."""


class ResumeState:
    """Known outputs of `request`, whose seed must be fixed.

    `ended`: choices that the reader no longer needs; may grow.
    """

    def __init__(self, request: EngineRequest, ended: Set[int] = frozenset()) -> None:
        self.request = request
        self._ended = ended
        self._outputs = [list(ids) for ids in request.prior_output_ids] or [[] for _ in range(request.params.n)]
        self._finished: set[int] = set()
        self._delivered_cached: set[int] = set()
        self._delivered_prompt: Counter[str] = Counter()
        self._seen_prompt: Counter[str] = Counter()
        """Prompt results by kind.

        `_delivered_prompt`: given to the reader; `_seen_prompt`: sent by this attempt.
        """
        self._attempts = 0

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens of all choices."""
        return sum(map(len, self._outputs))

    @property
    def num_known_tokens(self) -> int:
        """Known prompt and output tokens. Another replica recomputes those that are not cached."""
        return len(self.request.prompt_token_ids) + self.num_output_tokens

    @property
    def complete(self) -> bool:
        """Whether every choice has finished or is no longer needed."""
        return len(self._finished) == len(self._outputs) or len(self._finished | self._ended) == len(self._outputs)

    def next_attempt(self) -> EngineRequest:
        """Return the request for the next replica, with all known outputs.

        Pass its outputs to `accept`.
        """
        self._attempts += 1
        self._seen_prompt.clear()
        if self._attempts == 1:
            return self.request
        return replace(
            self.request,
            prior_output_ids=tuple(tuple(ids) for ids in self._outputs),
            finished_choices=tuple(sorted(self._finished | self._ended)),
        )

    def accept(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        """Record an attempt's outputs and return the new ones. Raises `TokenGapError`."""
        fresh = (
            deltas if self._attempts == 1 else [new for delta in deltas if (new := self._new_part(delta)) is not None]
        )
        for count, delta in enumerate(fresh):
            output = self._outputs[delta.choice]
            if delta.offset != len(output):
                self._forget(fresh[:count])
                raise TokenGapError(
                    f"choice {delta.choice} has {len(output)} tokens, but the next ones start at {delta.offset}"
                )
            output += delta.token_ids
            self._delivered_prompt.update(_lengths(delta.prompt_results))
            if delta.num_cached_tokens is not None:
                self._delivered_cached.add(delta.choice)
            if delta.finish_reason is not None:
                self._finished.add(delta.choice)
        return fresh

    def _forget(self, deltas: list[TokenDelta]) -> None:
        """Undo recorded outputs that will not be delivered: the next attempt repeats them."""
        for delta in reversed(deltas):
            del self._outputs[delta.choice][delta.offset :]
            self._delivered_prompt.subtract(_lengths(delta.prompt_results))
            if delta.num_cached_tokens is not None:
                self._delivered_cached.discard(delta.choice)
            if delta.finish_reason is not None:
                self._finished.discard(delta.choice)

    def _new_part(self, delta: TokenDelta) -> TokenDelta | None:
        """Return the part of `delta` that no earlier attempt gave.

        Its tokens are always new, because the attempt knew all earlier ones.
        """
        if delta.choice in self._finished:
            return None
        prompt_results = {}
        for kind, entries in delta.prompt_results.items():
            repeated = max(0, self._delivered_prompt[kind] - self._seen_prompt[kind])
            if fresh := entries[repeated:]:
                prompt_results[kind] = fresh
        self._seen_prompt.update(_lengths(delta.prompt_results))
        if not (delta.token_ids or prompt_results or delta.finish_reason is not None):
            return None
        is_delivered = delta.choice in self._delivered_cached
        return delta._replace(
            prompt_results=prompt_results,
            num_cached_tokens=None if is_delivered else delta.num_cached_tokens,
        )


def _lengths(results: Results) -> dict[str, int]:
    return {kind: len(entries) for kind, entries in results.items()}
