"""What the HTTP layer needs from whoever owns it: something that generates.

Serving implements it over links to the replicas, tests over an engine in the same process.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from serve_app.core.admission_queue import Place
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.core.sampling_params import Pooling
from serve_app.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model. `vocab_size` is the width of the logits, `created` a Unix time in seconds.

    `hidden_size` is the length of its embeddings, `pooling` how they are made where the request does not say. `end_ids`
    are the tokens that end a text.

    `fingerprint` changes whenever the same seed may give another answer (weights, dtype, version).
    """

    name: str
    max_model_len: int
    vocab_size: int
    created: int
    fingerprint: str
    hidden_size: int
    pooling: Pooling
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a service needs to know of a request beside its tokens.

    deadline: on `time.monotonic`'s clock, in seconds; after it the request ends with `RequestTimeoutError`.
    session: the client's name for a conversation whose requests should meet the same cache.
    ended_choices: filled while it runs with the choices that are over for the client (a stop string was found).
    replicas: filled by the service while it runs: the engines that had the request, in order.
    place: lent by the service while the client is so far behind that nothing is generated for it.
    """

    deadline: float | None = None
    session: str | None = None
    ended_choices: set[int] = field(default_factory=set)
    replicas: list[str] = field(default_factory=list)
    place: Place | None = None


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

    def check_cluster(self) -> None:
        """Raises `UnavailableError` while nothing that is lost would be replaced; requests are served all the same."""

    async def metrics(self) -> MetricsPage:
        """The metrics in Prometheus' text format."""
