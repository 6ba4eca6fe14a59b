"""The ingress deployment, between the HTTP layer and the engine replicas.

Decides when the application is ready, how many requests are admitted to the replicas, and what
`/metrics` and `/debug/replicas` show. The HTTP layer handles text, validation and queueing;
`failover` handles requests whose replica is lost.
"""

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any, get_args

from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.app import create_app
from serve_app.api.door.limits import ApiLimits
from serve_app.api.drain import Drain
from serve_app.api.request_events import REFUSAL_REASONS, Endpoint, Outcome, RequestSummary
from serve_app.api.service import MetricsPage, RequestContext
from serve_app.console.routes import Sources, add_console
from serve_app.core.request import EngineRequest
from serve_app.core.results import TokenDelta
from serve_app.core.sampling_params import SamplingParams
from serve_app.environment import FAST_PATH_ENVIRONMENT, bypass_proxies, fast_path_enabled, haproxy_enabled
from serve_app.errors import ConfigError, UnavailableError
from serve_app.fleet.attempt import Condition, Replica, Transport
from serve_app.fleet.availability import RETRY_AFTER_S
from serve_app.fleet.failover import Failover
from serve_app.fleet.loss import LossReason
from serve_app.fleet.prefix_routing import PrefixRouting
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.transport import LinkTransport
from serve_app.fleet.watchdog import Watchdog
from serve_app.grammars import Refusal
from serve_app.observability.held_bytes import HeldBytes, register_held_bytes
from serve_app.observability.logging import RequestLines, log_to_terminal
from serve_app.observability.metrics import IngressMetrics, merge_expositions
from serve_app.observability.tracing import RequestSpans
from serve_app.observability.upkeep import register_upkeep
from serve_app.serving import membership
from serve_app.serving.auth import Auth
from serve_app.serving.freed_memory import return_freed_blocks
from serve_app.serving.front import Front
from serve_app.serving.gcs_watch import GcsWatch
from serve_app.serving.gpus import report_lacking_gpus
from serve_app.serving.model_card import describe_model, new_card
from serve_app.serving.ray_patches import bind_replica_port_to_node, has_certificate, http_host, node_address
from serve_app.serving.replica import STEPS_PATH
from serve_app.serving.scraping import METRICS_ADDRESS, METRICS_KEY, metrics_targets, open_metrics_port
from serve_app.settings import Settings
from serve_app.system.http_client import fetch
from serve_app.system.lasting import LastingTasks
from serve_app.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 2.0
# An engine replica takes minutes to load a large model. After this long, it has failed and the
# cause is logged elsewhere.
_ENGINES_TIMEOUT_S = 1800.0
_ABSENCE_S = 2.0
_NO_FAST_PATH = (
    "this server runs on Ray's default path: decode throughput is about 20% lower, and idle connections hold slots for "
    "`ingress.body_timeout_s`. For the fast path use `make serve`, or set "
    f"{' and '.join(f'{name}={value}' for name, value in FAST_PATH_ENVIRONMENT.items())}"
)


_NO_TLS = (
    "http_options.ssl_certfile: HAProxy started by Ray supports no TLS; start with `serve-app serve`, or without "
    "RAY_SERVE_ENABLE_HA_PROXY, so that Ray's own proxy terminates TLS"
)


class ReplicaService:
    """`api.Service` over this application's engine replicas.

    Not thread-safe: use it on the event loop that created it.
    """

    def __init__(
        self,
        transport: Transport,
        replicas: ReplicaSet,
        tokenizer: Tokenizer,
        metrics: IngressMetrics,
        settings: Settings,
        auth: Auth,
        tasks: LastingTasks,
    ) -> None:
        """Requires at least one replica.

        `auth` and `tasks` need not be ready.
        """
        self._auth = auth
        self._tasks = tasks
        self._timeout_s = settings.ingress.request_timeout_s
        self._transport = transport
        self._metrics = metrics
        self._replicas = replicas
        self.model = new_card(settings, tokenizer)
        self.tokenizer = tokenizer
        self._describe_model()
        replicas.add_listener(self._describe_model)
        self._failover = Failover(
            transport, replicas, wait_s=settings.ingress.failover_wait_s, on_failover=metrics.failed_over
        )
        watchdog = Watchdog(transport, replicas, tasks=tasks, on_false_alarm=metrics.false_alarm)
        tasks.start("watchdog", watchdog.run)
        gcs = GcsWatch()
        self.check_cluster = gcs.check_ready
        tasks.start("Ray's GCS", gcs.run)

    def generate(
        self, request: EngineRequest, context: RequestContext | None = None
    ) -> AsyncGenerator[list[TokenDelta], None]:
        """Yield the request's outputs until it ends, over as many replicas as needed.

        See `Failover.generate`.
        """
        context = context or RequestContext()
        deadline = time.monotonic() + self._timeout_s if context.deadline is None else context.deadline
        return self._failover.generate(
            request,
            deadline=deadline,
            session=context.session,
            ended=context.ended_choices,
            visited=context.replicas,
            slots=context.slots,
        )

    def _describe_model(self) -> None:
        """Describe the model as the live replicas report it.

        During an update: what all of them support.
        """
        if alive := self._replicas.alive():
            self.model = describe_model(self.model, [replica.metadata for replica in alive])

    def check_ready(self) -> None:
        """Raise `UnavailableError` if no replica serves, no key can be checked, or a task fails.

        Missing replicas count only after 2 s: a replica whose `user_config` changes is away for a
        moment, and requests can wait.
        """
        self._auth.check_ready()
        if (name := self._tasks.failing) is not None:
            raise UnavailableError(f"the task {name!r} of this server keeps failing; see its log")
        if self._failover.without_replicas_s > _ABSENCE_S:
            raise UnavailableError("no engine replica is running", retry_after_s=RETRY_AFTER_S)

    def unread_outputs(self) -> HeldBytes:
        """Return how many bytes of outputs wait for clients to read them."""
        unread = self._failover.unread
        return HeldBytes(lambda: unread.held, unread.max_bytes)

    def replicas(self) -> list[dict[str, Any]]:
        """Return what this process knows of the replicas, for operators."""
        replicas = self._replicas.replicas()
        return [_describe(replica) | {"routing": self._transport.account(replica.replica_id)} for replica in replicas]

    async def metrics(self) -> MetricsPage:
        """Return the metrics of the ingress and every replica on one page, for use with `curl`.

        Prometheus scrapes each process directly (see `scraping`). Scraping this page too would
        count everything twice. Scraping only this page would lose each process's scrape time, and
        the metrics of other ingress replicas.
        """
        replicas = dict(sorted(self._replicas.current().items()))
        pages = await asyncio.gather(*(asyncio.to_thread(_read, one, "/metrics") for one in replicas.values()))
        texts = [None if page is None else page.decode() for page in pages]
        body = merge_expositions(self._metrics.registry, dict(zip(replicas, texts, strict=True)))
        return MetricsPage(body, CONTENT_TYPE_LATEST)

    async def recordings(self, seconds: float) -> list[bytes]:
        """Return the healthy replicas' recordings of the last `seconds` seconds, as JSON."""
        replicas = [r.metadata for r in self._replicas.replicas() if r.condition is Condition.OK]
        path = f"{STEPS_PATH}?seconds={seconds}"
        pages = await asyncio.gather(*(asyncio.to_thread(_read, one, path) for one in replicas))
        return [page for page in pages if page is not None]


class Ingress:
    """The deployment's class (`app` wraps it with `serve.ingress()`)."""

    async def __init__(self, engines: DeploymentHandle[Any], settings: Settings) -> None:  # type: ignore[misc]
        """Load the tokenizer and wait for the first engine replica with the same tokenizer.

        Raises `ConfigError`, or `TimeoutError` if no such replica starts in time.
        """
        gc.disable()  # until everything is loaded, as in the engine replica
        return_freed_blocks()
        log_to_terminal()
        bind_replica_port_to_node()
        bypass_proxies(node_address())
        loop = asyncio.get_running_loop()
        tasks = LastingTasks()
        waiting = tasks.start("waiting for GPUs", report_lacking_gpus, vital=False)
        self._request_lines = RequestLines(loop.call_later)
        if haproxy_enabled() and await asyncio.to_thread(has_certificate):
            logger.error(_NO_TLS)  # Ray does not report the reason, and tries again
            raise ConfigError(_NO_TLS)
        self._auth = Auth(settings.ingress, await asyncio.to_thread(http_host))
        self._engines = engines  # its router publishes the set of replicas
        tokenizer, _ = await asyncio.gather(
            asyncio.to_thread(load_tokenizer_of, settings), engines.options(method_name="ping").remote()
        )
        self._replicas = ReplicaSet(tokenizer.digest)
        membership.engines.subscribe(lambda known: loop.call_soon_threadsafe(self._replicas.publish, known))
        # During an update, a replica of another model may have answered the ping. We must not use
        # that replica.
        await wait_for_replica(self._replicas, _ENGINES_TIMEOUT_S)
        waiting.cancel()
        self._settings = settings
        self._queue = AsyncAdmissionQueue(
            settings.max_ongoing_requests,
            settings.ingress.max_queued_requests,
            by_priority=settings.engine.policy == "priority",
        )
        self._slots_per_replica = settings.max_ongoing_per_replica
        self._drain = Drain()
        self._metrics = IngressMetrics(lambda: self._queue.queued, lambda: self._queue.ongoing, self._engines_load)
        files = lambda: self._auth.keys_file_invalid, lambda: self._auth.ledger_unusable
        register_upkeep(self._metrics.registry, loop, tasks, *files)
        self._metrics.expect(get_args(Endpoint), tuple(Outcome), tuple(LossReason), REFUSAL_REASONS, tuple(Refusal))
        self._metrics_address = open_metrics_port(
            self._metrics.registry, settings.metrics_host, admits=self._auth.admits_to_metrics()
        )
        self._service = ReplicaService(
            self._open_transport(engines), self._replicas, tokenizer, self._metrics, settings, self._auth, tasks
        )
        otlp_endpoint = settings.ingress.otlp_endpoint
        self._spans = None if otlp_endpoint is None else RequestSpans(otlp_endpoint, self._service.model.name)
        self._auth.start(tasks)
        await _first_token(self._service)
        if not fast_path_enabled():
            logger.warning(_NO_FAST_PATH)
        self._replicas.add_listener(self._follow_replicas)
        self._follow_replicas()
        gc.freeze()  # otherwise the first collection takes 0.2 s during the first requests
        gc.enable()

    async def drain(self) -> None:
        """Take no new requests.

        Return when the running ones have ended or were cut off at the drain timeout.
        """
        await self._drain.run(self._settings.ingress.drain_timeout_s)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return this replica's metadata; Serve's controller reads it once."""
        return {METRICS_ADDRESS: self._metrics_address}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `IngressPolicy`."""
        return {"queued": float(self._queue.queued)}

    def _open_transport(self, engines: DeploymentHandle[Any]) -> Transport:
        return LinkTransport(self._replicas, PrefixRouting())

    async def _metrics_targets(self) -> list[dict[str, Any]]:
        return await metrics_targets(serve.get_replica_context().app_name)

    def _follow_replicas(self) -> None:
        """Set the queue's capacity to what the live replicas can hold.

        Without replicas, the capacity of one: admitted requests then wait, or fail with an error.
        """
        slots = [replica.metadata["max_num_seqs"] for replica in self._replicas.alive()]
        capacities = [self._settings.with_chosen(max_num_seqs=number).max_ongoing_per_replica for number in slots]
        self._slots_per_replica = max(capacities, default=self._slots_per_replica)
        self._queue.set_capacity(sum(capacities) or self._slots_per_replica)

    def _engines_load(self) -> tuple[int, int]:
        """Return (waiting, running) sequences of all engines, as last reported.

        Runs in a metrics port thread.
        """
        loads = [replica.load for replica in self._replicas.alive() if replica.load is not None]
        return sum(load.waiting for load in loads), sum(load.running for load in loads)

    def _log_request(self, summary: RequestSummary) -> None:
        fields = asdict(summary)
        self._request_lines(fields)
        if self._spans is not None:
            self._spans(fields)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application. Ray calls this once, after the constructor."""
        ingress = self._settings.ingress
        limits = ApiLimits(
            max_body_bytes=int(ingress.max_body_mib * 2**20),
            max_uploads=self._settings.max_requests,
            body_timeout_s=ingress.body_timeout_s,
            request_timeout_s=ingress.request_timeout_s,
        )
        app = create_app(
            self._service,
            self._queue,
            limits,
            observer=self._metrics,
            drain=self._drain,
            log=self._log_request,
            access=self._auth.access,
            share_prefixes=ingress.share_prefixes,
            accounts=self._auth.accounts,
            cors_origins=ingress.allowed_origins,
        )
        held = {
            "unread_outputs": self._service.unread_outputs(),
            "request_bodies": HeldBytes(lambda: self._metrics.body_bytes, limits.max_buffered_bytes),
        }
        register_held_bytes(self._metrics.registry, held)
        app.add_api_route("/debug/replicas", self._service.replicas)
        app.add_api_route("/metrics/targets", self._metrics_targets)
        queue = self._queue
        add_console(app, Sources(self._service.recordings, lambda: {"waiting": queue.queued, "ongoing": queue.ongoing}))
        app.add_middleware(OneRequestId)
        Front.application, Front.loop = app, asyncio.get_running_loop()
        return app


class OneRequestId:
    """Removes the response's request id if Ray, the next outer layer, adds the same id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and filter the response's headers."""
        given = [value for name, value in scope.get("headers", ()) if name == b"x-request-id"]

        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = message["headers"]
                message["headers"] = [(n, v) for n, v in headers if not (n == b"x-request-id" and v in given)]
            await send(message)

        await self._app(scope, receive, send_once)


async def wait_for_replica(replicas: ReplicaSet, timeout_s: float) -> None:
    """Wait until a replica can take requests. Raises `TimeoutError` after `timeout_s`."""
    changed = asyncio.Event()
    remove_listener = replicas.add_listener(changed.set)
    try:
        async with asyncio.timeout(timeout_s):
            while not replicas.alive():
                logger.info("waiting for an engine replica with the tokenizer of this model")
                changed.clear()
                await changed.wait()
    except TimeoutError:
        raise TimeoutError(f"no engine replica with the tokenizer of this model within {timeout_s:g} s") from None
    finally:
        remove_listener()


def load_tokenizer_of(settings: Settings) -> Tokenizer:
    """Return the model's tokenizer, with everything loaded that the first chat needs.

    Raises `ConfigError`.
    """
    tokenizer = load_tokenizer(settings.model, tools=settings.ingress.tools, ignored=settings.ignore_model_keys)
    tokenizer.check_chat_template()
    tokenizer.learn_formats()
    return tokenizer


async def _first_token(service: ReplicaService) -> None:
    """Generate one token, so that the server is warm when it reports ready."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    async for _ in service.generate(EngineRequest(f"warm-up-{uuid.uuid4().hex}", (0,), params)):
        pass


def _describe(replica: Replica) -> dict[str, Any]:
    return {
        "id": replica.replica_id,
        "node": replica.metadata.get("node"),
        "pid": replica.metadata.get("pid"),
        "model": replica.metadata.get("model"),
        "revision": replica.revision,
        "identity": replica.metadata.get("identity"),
        "condition": replica.condition,
        "reason": replica.reason,
        "leaving": not replica.present,
        "reserved": replica.reserved,
        "in_flight": len(replica.attempts),
        "load": None if replica.load is None else asdict(replica.load),
    }


def _read(replica: Mapping[str, Any], path: str) -> bytes | None:
    """Return a page from a replica's metrics port, or None if it does not answer.

    `replica`: the replica's metadata.
    """
    url = f"http://{replica[METRICS_ADDRESS]}{path}"
    try:
        return fetch(url, timeout_s=_SCRAPE_TIMEOUT_S, api_key=replica[METRICS_KEY])
    except OSError:
        return None
