"""The results of a step: per row from the runner, and per request for readers.

Plain data, small and picklable. Types with one instance per row and step are named tuples, which
take a third of the time of frozen dataclasses.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, NamedTuple

from serve_app.errors import RequestError

LOGPROBS = "logprobs"
"""Kind of result: a `TokenLogprob` per output or prompt token."""

EMBEDDING = "embedding"
"""Kind of result: the prompt's embedding, for the one token of a request with `pooling`.

Bytes of little-endian float32.
"""

Results = Mapping[str, tuple[Any, ...]]
"""Results besides the tokens.

For each kind, one entry per token, of plain data that msgpack supports. A kind has a name here and
a property of `TokenDelta` that reads it. Scheduler, wire and failover pass it on unread. Do not
modify an instance.
"""
NO_RESULTS: Results = {}


class FinishReason(StrEnum):
    """Why a choice ended.

    STOP: an end token or a stop token id (the ingress finds stop *strings*).
    """

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class TokenLogprob(NamedTuple):
    """Natural log-probability of a token under the model.

    Before penalties, bias and temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely alternatives as (token id, logprob), best first; as many as requested."""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The results of a step, by row index of `SchedulerOutput.rows`.

    - `token_ids[i]`: the accepted drafts and one more token; empty for a row that did not sample.
    - `failed[i]`: the error that ends this request only.
    - `results[i]`: an entry for each of its tokens.
    - `prompt_results[i]`: an entry for each *next* prompt token that the row's positions predict.
    - `sat_out`: rows that should have sampled but could not yet. Their last token is computed
      again. `sit_out` has already reported them to the scheduler.
    - `forced[i]`: tokens that the grammar forces after `token_ids[i]`, as drafts for the next step.
    - `mask_s`: CPU time of grammar masks since the previous step, in seconds.
    """

    token_ids: tuple[tuple[int, ...], ...]
    results: dict[int, Results] = field(default_factory=dict)
    prompt_results: dict[int, Results] = field(default_factory=dict)
    failed: dict[int, RequestError] = field(default_factory=dict)
    sat_out: frozenset[int] = frozenset()
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)
    mask_s: float = 0.0


class TokenDelta(NamedTuple):
    """The output of one choice in one step."""

    request_id: str
    choice: int
    offset: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    error: RequestError | None = None
    results: Results = NO_RESULTS
    prompt_results: Results = NO_RESULTS

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the tokens; empty if not requested."""
        return tuple(map(TokenLogprob._make, self.results.get(LOGPROBS, ())))

    @property
    def embedding(self) -> bytes | None:
        """The prompt's embedding; None if not requested."""
        entries = self.results.get(EMBEDDING)
        return entries[0] if entries else None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of prompt tokens; empty if not requested or already delivered."""
        return tuple(map(TokenLogprob._make, self.prompt_results.get(LOGPROBS, ())))


class RequestOutputs(NamedTuple):
    """The output of one request in one flush: at most one delta per choice."""

    request_id: str
    deltas: list[TokenDelta]
    ended: bool = False
    error: RequestError | None = None


def join_deltas(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Join consecutive deltas of one request into one delta per choice."""
    if len(deltas) == 1:
        return deltas
    by_choice: dict[int, list[TokenDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.choice, []).append(delta)
    return [_join(parts) if len(parts) > 1 else parts[0] for parts in by_choice.values()]


def _join(parts: list[TokenDelta]) -> TokenDelta:
    first, last = parts[0], parts[-1]
    token_ids: list[int] = []
    for part in parts:
        token_ids += part.token_ids
    return TokenDelta(
        first.request_id,
        first.choice,
        first.offset,
        tuple(token_ids),
        last.finish_reason,
        first.num_cached_tokens,
        last.error,
        _join_results([part.results for part in parts if part.results]),
        _join_results([part.prompt_results for part in parts if part.prompt_results]),
    )


def _join_results(parts: list[Results]) -> Results:
    if not parts:
        return NO_RESULTS
    kinds = dict.fromkeys(chain.from_iterable(parts))
    return {kind: tuple(chain.from_iterable([part.get(kind, ()) for part in parts])) for kind in kinds}
