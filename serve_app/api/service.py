"""The interface of the HTTP layer to generation.

The serving layer implements it over links to the replicas; tests use an engine in the same process.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.core.admission_queue import AdmissionSlots
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.core.sampling_params import Pooling
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. `vocab_size` is the width of the logits, `created` a Unix time in seconds.

    aliases: further names; any_name: requests may name any model. hidden_size: the length of its
    embeddings. pooling: the default for embeddings. end_ids: the
    tokens that end a text.
    fingerprint: changes whenever the same seed may give a different answer (weights, dtype,
    version).
    """

    name: str
    max_model_len: int
    vocab_size: int
    created: int
    fingerprint: str
    hidden_size: int
    pooling: Pooling
    end_ids: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    any_name: bool = False


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request's context besides its tokens.

    deadline: on `time.monotonic`'s clock, in seconds. The request then ends with
    `RequestTimeoutError`.

    session: the client's name for a conversation. Its requests should use the same prefix cache.

    ended_choices: choices that ended before the engine ended them (a stop string was found). The
    HTTP layer adds them while the request runs.

    replicas: the engines that had the request, in order. The service adds them while the request
    runs.

    slots: the request's admission slots. The service releases them while generation is paused for a
    slow client.
    """

    deadline: float | None = None
    session: str | None = None
    ended_choices: set[int] = field(default_factory=set)
    replicas: list[str] = field(default_factory=list)
    slots: AdmissionSlots | None = None


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
        """The served model. Raises `UnavailableError` until an engine has reported it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def generate(
        self, request: EngineRequest, context: RequestContext = NO_CONTEXT
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the new tokens of all choices until each has finished. Raises `RequestError`.

        Closing or cancelling the generator aborts the request, even while it waits.
        """

    def check_ready(self) -> None:
        """Raise `UnavailableError` if requests cannot be served now."""

    def check_cluster(self) -> None:
        """Raise `UnavailableError` if lost replicas would not be replaced.

        Requests are still served.
        """

    async def metrics(self) -> MetricsPage:
        """Return the metrics in Prometheus' text format."""
