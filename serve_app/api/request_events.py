"""What is told of every generation request: while it goes on to an observer, and once it has ended to a log."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

Endpoint = Literal["chat", "completions", "responses", "messages", "embeddings"]


class Outcome(StrEnum):
    """How a generation request ended, as metrics count it."""

    COMPLETED = "completed"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    FAILED = "failed"
    CANCELLED = "cancelled"


REFUSAL_REASONS = (
    *("queue_full", "queue_share", "wait_exceeds_timeout", "request_timeout", "bodies_full", "texts_full"),
    *("rate_limit_exceeded", "insufficient_quota", "unavailable"),
)
"""The codes with which requests are turned away for want of room or time."""


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """How one generation request went: its line in the log, its span in a trace. No text, so nothing private.

    error: the error's code, or its type. queue_s: the longest wait of its prompts, None if none had its turn.
    first_token_s, seconds: since its arrival at started_at, a Unix time in seconds. replicas: in the order in which
    they had it. engine_ids: the names of its first 128 prompts in recorded steps. key: the name of its API key.
    traceparent: the client's, unchecked.
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
"""Told about every generation request once it has ended. Must neither block nor raise."""


class RequestObserver(Protocol):
    """Told about every generation request. Must neither block nor raise: `tokens` is on the token path.

    Times in seconds. For one HTTP request: `started`, then `queued`, then `tokens` per flush, then `finished`
    exactly once, before it `refused` if that was the reason. Requests may be refused before they have `started`.
    """

    def started(self, endpoint: Endpoint) -> None:
        """A request arrived (its body is read)."""

    def queued(self, seconds: float) -> None:
        """The request's turn came after `seconds` in the queue."""

    def refused(self, reason: str) -> None:
        """A request was turned away for want of room or time; `reason` is the error's code."""

    def grammar_built(self, seconds: float) -> None:
        """The grammar of the request's constraint was built and checked in this time."""

    def grammar_refused(self, reason: str) -> None:
        """The request's constraint cannot be enforced; `reason` is the error's code."""

    def buffered(self, num_bytes: int) -> None:
        """The bodies of requests hold this many bytes now."""

    def first_token(self, seconds: float) -> None:
        """The first token of the request is on its way to the client, `seconds` after its arrival."""

    def tokens(self, count: int, gap: float | None) -> None:
        """`count` tokens of one choice arrived, `gap` after the choice's tokens before (None: its first)."""

    def charged(self, key: str, outcome: Outcome, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """The request's tenant, if it has a key of that name, was charged for what was computed, before `finished`."""

    def finished(
        self, endpoint: Endpoint, outcome: Outcome, prompt_tokens: int, output_tokens: int, seconds: float
    ) -> None:
        """The request ended after `seconds`; tokens count what was computed for it, also if it was cancelled."""
