"""What the HTTP layer needs from whoever owns it: something that generates, and somebody who wants to know.

Serving implements both over Ray handles and Prometheus; tests over an engine in the same process.
"""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

from serve_app.core.output import TokenDelta
from serve_app.core.request import EngineRequest
from serve_app.text.tokenizer import Tokenizer

Endpoint = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What a client may ask of the HTTP layer. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 8 * 2**20
    max_buffered_bytes: int = 128 * 2**20
    """Bodies of all requests at the server at one time; beyond it new ones are refused as overload."""
    max_header_bytes: int = 16 * 2**10
    body_timeout_s: float = 30.0
    max_sequences: int = 128
    """Prompts times choices of one HTTP request."""
    max_prompt_logprobs: int = 2**16
    """Echoed prompt tokens (of all choices) times alternatives that one answer may carry (`echo` with `logprobs`)."""
    request_timeout_s: float = 600.0
    """The most that a request may take, and the most that it may ask for with `x-request-timeout`."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. `vocab_size` is the width of the logits, `created` a Unix time in seconds.

    `fingerprint` changes whenever the same seed may give another answer (weights, dtype, version).
    """

    name: str
    max_model_len: int
    vocab_size: int
    created: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a service needs to know of a request beside its tokens.

    deadline: on `time.monotonic`'s clock, in seconds; after it the request ends with `RequestTimeoutError`.
    session: the client's name for a conversation whose requests should meet the same cache.
    ended_choices: filled while it runs with the choices that are over for the client (a stop string was found).
    replicas: filled by the service while it runs: the engines that had the request, in order.
    """

    deadline: float | None = None
    session: str | None = None
    ended_choices: set[int] = field(default_factory=set)
    replicas: list[str] = field(default_factory=list)


NO_CONTEXT = RequestContext()


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The body of /metrics."""

    body: bytes
    content_type: str


class Service(Protocol):
    """Generates for the HTTP layer."""

    @property
    def model(self) -> ModelCard:
        """Raises `UnavailableError` while no engine has told what it serves."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def generate(
        self, request: EngineRequest, context: RequestContext = NO_CONTEXT
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """News of the request, all its choices, until each has finished. Raises `RequestError`.

        Closing or cancelling the generator aborts the request, also while it waits.
        """

    def check_ready(self) -> None:
        """Raises `UnavailableError` while a request could not be served now."""

    async def metrics(self) -> MetricsPage:
        """The metrics in Prometheus' text format."""


class Outcome(StrEnum):
    """How a generation request ended, as metrics count it."""

    COMPLETED = "completed"
    INVALID = "invalid"
    OVERLOADED = "overloaded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """How one generation request went: its line in the log, its span in a trace. No text, so nothing private.

    error: the error's code, or its type. queue_s: the longest wait of its prompts, None if none had its turn.
    first_token_s, seconds: since its arrival at started_at, a Unix time in seconds. replicas: in the order in which
    they had it. engine_ids: the names of its prompts in recorded steps. traceparent: the client's, unchecked.
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
    traceparent: str | None


RequestLog = Callable[[RequestSummary], None]
"""Told about every generation request once it has ended. Must neither block nor raise."""


class RequestObserver(Protocol):
    """Told about every generation request. Must neither block nor raise: `tokens` is on the token path.

    Times in seconds. For one HTTP request: `started`, then `queued`, then `tokens` per delivery, then `finished`
    exactly once, before it `refused` if that was the reason. Requests may be refused before they have `started`.
    """

    def started(self, endpoint: Endpoint) -> None:
        """A request arrived (its body is read)."""

    def queued(self, seconds: float) -> None:
        """The request's turn came after `seconds` in the queue."""

    def refused(self, reason: str) -> None:
        """A request was turned away for want of room or time; `reason` is the error's code."""

    def first_token(self, seconds: float) -> None:
        """The first token of the request is on its way to the client, `seconds` after its arrival."""

    def tokens(self, count: int, gap: float | None) -> None:
        """`count` tokens of one choice arrived, `gap` after the choice's tokens before (None: its first)."""

    def finished(
        self, endpoint: Endpoint, outcome: Outcome, prompt_tokens: int, output_tokens: int, seconds: float
    ) -> None:
        """The request ended after `seconds`; tokens count what was computed for it, also if it was cancelled."""


class NullObserver:
    """Ignores everything."""

    def started(self, endpoint: Endpoint) -> None:
        """Ignore."""

    def queued(self, seconds: float) -> None:
        """Ignore."""

    def refused(self, reason: str) -> None:
        """Ignore."""

    def first_token(self, seconds: float) -> None:
        """Ignore."""

    def tokens(self, count: int, gap: float | None) -> None:
        """Ignore."""

    def finished(
        self, endpoint: Endpoint, outcome: Outcome, prompt_tokens: int, output_tokens: int, seconds: float
    ) -> None:
        """Ignore."""
