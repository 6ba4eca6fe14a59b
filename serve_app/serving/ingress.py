"""The ingress deployment: the HTTP layer on one side, handles of engine replicas on the other.

Decides: how a request travels to a replica and what its failures mean to a client; what `/metrics` shows of the whole
application. Text, validation and queueing are the HTTP layer's.
"""

import asyncio
import hashlib
import logging
import time
import urllib.request
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import serve_app
from serve_app.api.admission import AdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.service import ApiLimits, MetricsPage, ModelCard
from serve_app.core.output import TokenDelta
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import ConfigError, EngineError, OverloadedError, RequestTimeoutError, UnavailableError
from serve_app.observability.logging import log_to_terminal
from serve_app.observability.metrics import IngressMetrics, merge_expositions
from serve_app.serving import replica_set
from serve_app.serving.binding import bind_replica_port_to_node
from serve_app.serving.wire import pack_request, unpack_deltas
from serve_app.settings import Settings, fast_path_enabled, started_by_launcher
from serve_app.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 2.0
_RETRY_AFTER_S = 2.0
_NO_FAST_PATH = (
    "; this server runs on Ray's default path, which takes five times the processor time per token: "
    "`make serve` starts it on the fast path and keeps all of Ray's ports on loopback"
)


class ReplicaService:
    """`api.Service` over the engine replicas of this application."""

    def __init__(
        self, engines: DeploymentHandle[Any], model: ModelCard, tokenizer: Tokenizer, timeout_s: float
    ) -> None:
        self._generate = engines.options(method_name="generate", stream=True)
        self._timeout_s = timeout_s
        self.model = model
        self.tokenizer = tokenizer
        self.ingress_metrics: IngressMetrics | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[list[TokenDelta], None]:
        """News of the request until it ends. Closing or cancelling aborts it on its replica, also while it waits."""
        self.check_ready()
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        response: DeploymentResponseGenerator[Any] = self._generate.remote(pack_request(request))
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        item = await anext(response)
                except StopAsyncIteration:
                    return
                yield unpack_deltas(request.request_id, item)
        except TimeoutError:
            raise RequestTimeoutError(f"the request was not done after {self._timeout_s:g} seconds") from None
        except (RayError, RequestCancelledError, BackPressureError, DeploymentUnavailableError) as error:
            raise _for_client(error) from error
        finally:
            response.cancel()

    def check_ready(self) -> None:
        """Raise `UnavailableError` while no replica is there."""
        if not replica_set.current():
            raise UnavailableError("no engine replica is running", retry_after_s=_RETRY_AFTER_S)

    async def metrics(self) -> MetricsPage:
        """The ingress's own metrics and every replica's."""
        assert self.ingress_metrics is not None
        replicas = {name: str(metadata["metrics"]) for name, metadata in sorted(replica_set.current().items())}
        pages = await asyncio.gather(*(asyncio.to_thread(_scrape, address) for address in replicas.values()))
        body = merge_expositions(self.ingress_metrics.registry, dict(zip(replicas, pages, strict=True)))
        return MetricsPage(body, CONTENT_TYPE_LATEST)


class Ingress:
    """The deployment's class (`app` wraps it with `serve.ingress()`)."""

    async def __init__(self, engines: DeploymentHandle[Any], settings: Settings) -> None:  # type: ignore[misc]
        """Load the tokenizer and wait for the first engine replica. Raises `ConfigError`."""
        log_to_terminal()
        bind_replica_port_to_node()
        tokenizer, _ = await asyncio.gather(
            asyncio.to_thread(load_tokenizer, settings.model), engines.options(method_name="ping").remote()
        )
        card = _model_card(settings, tokenizer.name)
        if tokenizer.vocab_size > card.vocab_size:
            raise ConfigError(
                f"model: the tokenizer knows {tokenizer.vocab_size} ids, but the logits are {card.vocab_size} wide"
            )
        self._service = ReplicaService(engines, card, tokenizer, settings.ingress.request_timeout_s)
        await _first_token(self._service)
        if not started_by_launcher():
            logger.info("%s served its first token%s", card.name, "" if fast_path_enabled() else _NO_FAST_PATH)
        self._queue = AdmissionQueue(settings.max_ongoing_requests, settings.ingress.max_queued_requests)
        self._settings = settings

    def __serve_build_asgi_app__(self) -> Any:
        """The ASGI application; Ray calls this once, after the constructor."""
        ingress = self._settings.ingress
        metrics = IngressMetrics(lambda: self._queue.queued, lambda: self._queue.ongoing)
        self._service.ingress_metrics = metrics
        limits = replace(
            ApiLimits(), max_body_bytes=int(ingress.max_body_mib * 2**20), body_timeout_s=ingress.body_timeout_s
        )
        app = create_app(self._service, limits=limits, admission=self._queue, observer=metrics)
        app.add_middleware(OneRequestId)
        return app


class OneRequestId:
    """Leaves out the response's request id where Ray, which is the next outer layer, will write the same once more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, watching the response's headers."""
        given = [value for name, value in scope.get("headers", ()) if name == b"x-request-id"]

        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                message["headers"] = [(n, v) for n, v in headers if not (n == b"x-request-id" and v in given)]
            await send(message)

        await self._app(scope, receive, send_once)


def _model_card(settings: Settings, name: str) -> ModelCard:
    """What the replicas serve, as the first one's metadata has it. One has just answered, so the router knows it."""
    info = next(iter(replica_set.current().values()))["info"]
    identity = f"{name}|{info['dtype']}|{info['backend']}|{info['vocab_size']}|{serve_app.__version__}"
    return ModelCard(
        name=settings.served_model_name or name,
        max_model_len=info["max_model_len"],
        vocab_size=info["vocab_size"],
        created=int(time.time()),
        fingerprint="fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12],
    )


async def _first_token(service: ReplicaService) -> None:
    """Have one token generated, so that ready means ready and the first client does not pay for first times."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    async for _ in service.generate(EngineRequest(f"warm-up-{uuid.uuid4().hex}", (0,), params)):
        pass


def _for_client(error: Exception) -> Exception:
    """What a failure between ingress and replica means to the client."""
    if isinstance(error, BackPressureError):
        return OverloadedError("all engine replicas are full", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, RayActorError | DeploymentUnavailableError):
        return UnavailableError("the engine replica that had the request is gone", retry_after_s=_RETRY_AFTER_S)
    return EngineError("the engine failed the request")


def _scrape(address: str) -> str | None:
    """The page of one replica's metrics port (`host:port`), or None when it does not answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=_SCRAPE_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError:
        return None
