"""Ray's own routers in front of our engine, as applications for `import_path` in a Serve config.

Ray's routers route calls of a Ray handle, so here each request is a streaming call instead of a
message on our link, without failover, which the comparison does not need. Ray's prefix-aware router
is used without its package, whose import requires vLLM or SGLang. It compares texts, so it gets one
character per token.
"""

import asyncio
import contextvars
import importlib
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray import cloudpickle, serve
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter

from serve_app.app import engine_options, ingress_options
from serve_app.fleet.attempt import Attempt, Transport
from serve_app.fleet.link import IngressEnd
from serve_app.fleet.loss import LossReason, ReplicaLostError
from serve_app.fleet.prefix_routing import PrefixRouting
from serve_app.fleet.replica_set import ReplicaSet
from serve_app.fleet.transport import LinkTransport
from serve_app.fleet.wire import WireItem, WireRequest, pack_request
from serve_app.serving.gpus import use_gpu
from serve_app.serving.ingress import Ingress
from serve_app.serving.ray_router import ReportingMixin
from serve_app.serving.replica import EngineReplica
from serve_app.settings import Settings

_PACKAGE = "ray.llm._internal.serve.routing_policies.prefix_aware"
_FIRST_SURROGATE, _NUM_SURROGATES = 0xD800, 0x800


def _import_prefix_router() -> Any:
    """Return Ray's class, loaded from its two files alone.

    It is pickled by value for processes that cannot import them.
    """
    parts = _PACKAGE.split(".")
    for i in range(2, len(parts) + 1):
        package = ModuleType(".".join(parts[:i]))
        package.__path__ = [str(Path(ray.__file__).parent.joinpath(*parts[1:i]))]
        sys.modules[package.__name__] = package
    modules = [importlib.import_module(f"{_PACKAGE}.{name}") for name in ("prefix_tree", "prefix_aware_router")]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    return modules[1].PrefixCacheAffinityRouter


def _call(pending: PendingRequest) -> dict[str, Any]:
    first = pending.args[0] if pending.args else None
    return first if isinstance(first, dict) else {}


class PowerOfTwoRouter(ReportingMixin, PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray Serve's default router."""


class PrefixTreeRouter(ReportingMixin, _import_prefix_router()):  # type: ignore[misc]
    """Ray Serve LLM's `PrefixCacheAffinityRouter`, with its defaults."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        ids = _call(pending_request).get("prompt_token_ids", ())
        return "".join(chr(i if i < _FIRST_SURROGATE else i + _NUM_SURROGATES) for i in ids)


class CalledReplica(EngineReplica):
    """A replica that also accepts requests as streaming calls, which it passes to itself over a
    link."""

    _link: IngressEnd | None = None

    async def call(self, data: WireRequest) -> AsyncGenerator[WireItem, None]:
        link, items = await self._own_link(), asyncio.Queue[WireItem | ReplicaLostError]()
        link.start(data, items.put_nowait)
        try:
            while not isinstance(item := await items.get(), ReplicaLostError):
                yield item
        finally:
            link.cancel(data["attempt_id"])

    async def _own_link(self) -> IngressEnd:
        if self._link is None:
            self._link = link = IngressEnd(self._links.key, lambda _: None)
            host, _, port = self._link_address.rpartition(":")
            await asyncio.get_running_loop().create_connection(lambda: link, host, int(port))
        return self._link


class HandleTransport(LinkTransport):
    """Sends requests through Ray's handle, and receives heartbeats through our link."""

    def __init__(self, engines: DeploymentHandle[Any], replicas: ReplicaSet) -> None:
        super().__init__(replicas, PrefixRouting())
        self._call = engines.options(method_name="call", stream=True)
        self._calls: dict[str, asyncio.Task[None]] = {}

    def start(self, attempt: Attempt) -> None:
        """Call the replica and pass on its outputs."""
        self._calls[attempt.attempt_id] = asyncio.create_task(self._run(attempt))

    def stop(self, attempt: Attempt) -> None:
        """Cancel the call."""
        if (call := self._calls.pop(attempt.attempt_id, None)) is not None:
            call.cancel()

    async def _run(self, attempt: Attempt) -> None:
        # In a separate context: in that of an HTTP request, all calls would share one id, by which
        # the router distinguishes waiting calls.
        data = pack_request(attempt.request, attempt.attempt_id)
        items = contextvars.Context().run(self._call.remote, data)
        try:
            async for item in items:
                attempt.receive(item)
            attempt.receive(ReplicaLostError(LossReason.CUT))
        except Exception as error:
            attempt.receive(error)
        finally:
            items.cancel()


class RivalIngress(Ingress):
    """An ingress whose requests are routed by Ray's router."""

    def _open_transport(self, engines: DeploymentHandle[Any]) -> Transport:
        return HandleTransport(engines, self._replicas)


def power_of_two(args: Settings) -> serve.Application:
    """Return our application with Ray Serve's default router."""
    return _build(args, PowerOfTwoRouter)


def prefix_tree(args: Settings) -> serve.Application:
    """Return our application with Ray Serve LLM's prefix-aware router."""
    return _build(args, PrefixTreeRouter)


def _build(settings: Settings, router: type[RequestRouter]) -> serve.Application:
    options = engine_options(settings) | {
        "request_router_config": RequestRouterConfig(request_router_class=router),
        "max_ongoing_requests": settings.max_ongoing_per_replica,
    }
    engines = serve.deployment(CalledReplica).options(**options).bind(settings, use_gpu=use_gpu(settings))
    ingress = serve.deployment(serve.ingress()(RivalIngress)).options(**ingress_options(settings))
    return ingress.bind(engines, settings)
