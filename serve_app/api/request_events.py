"""The events of generation requests: for an observer while they run, for a log at the end."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

Endpoint = Literal["chat", "completions", "responses", "messages", "embeddings"]


class Outcome(StrEnum):
    """The outcome of a generation request, as counted by the metrics."""

    COMPLETED = "completed"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    FAILED = "failed"
    CANCELLED = "cancelled"


REFUSAL_REASONS = (
    *("queue_full", "queue_share", "wait_exceeds_timeout", "request_timeout", "bodies_full", "texts_full"),
    *("rate_limit_exceeded", "insufficient_quota", "unavailable"),
)
"""Error codes of requests refused for lack of capacity or time."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """The result of one generation request, for the log and the trace. Contains no text.

    error: the error's code, or its type. queue_s: the longest wait of its prompts; None if none was
    admitted.
    first_token_s, seconds: since arrival. started_at: time of arrival, Unix time in seconds.
    replicas: in the order in which they had the request. engine_ids: request ids of its first 128
    prompts, as in recorded steps.
    key: the name of the API key. traceparent: the client's header, unchecked.
    """

    request_id: str
    endpoint: Endpoint
    outcome: Outcome
    error: str | None
    prompt_tokens: int
    output_tokens: int
    queue_s: float | None
    first_token_s: float | None
    seconds: float
    started_at: float
    replicas: tuple[str, ...]
    engine_ids: tuple[str, ...]
    key: str | None
    traceparent: str | None


RequestLog = Callable[[RequestSummary], None]
"""Receives every generation request's summary after its end. Must neither block nor raise."""


class RequestObserver(Protocol):
    """Receives the events of generation requests, for metrics. Times are in seconds.

    Must neither block nor raise, since `tokens` is on the token path.
    Order for one HTTP request: `started`, `queued`, `tokens` per flush, `refused` if refused, and
    `finished` exactly once. Requests may also be refused before `started`.
    """

    def started(self, endpoint: Endpoint) -> None:
        """A request arrived and its body was read."""

    def queued(self, seconds: float) -> None:
        """A prompt was admitted after `seconds` in the queue."""

    def refused(self, reason: str) -> None:
        """A request was refused for lack of capacity or time. `reason` is the error's code."""

    def grammar_built(self, seconds: float) -> None:
        """The grammar of a request's constraint was built and checked in `seconds`."""

    def grammar_refused(self, reason: str) -> None:
        """A constraint cannot be enforced. `reason` is the error's code."""

    def buffered(self, num_bytes: int) -> None:
        """Request bodies in memory now have `num_bytes` in total."""

    def first_token(self, seconds: float) -> None:
        """The request's first token was generated, `seconds` after arrival (TTFT)."""

    def tokens(self, count: int, gap: float | None) -> None:
        """`count` tokens of one choice arrived, `gap` seconds after its previous ones (None for the
        first)."""

    def charged(self, key: str, outcome: Outcome, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """The request's computed tokens were charged to its tenant. Called before `finished`.

        key: the API key's name, empty without one.
        """

    def finished(
        self, endpoint: Endpoint, outcome: Outcome, prompt_tokens: int, output_tokens: int, seconds: float
    ) -> None:
        """The request ended after `seconds`.

        Tokens are those computed, even if it was cancelled.
        """
