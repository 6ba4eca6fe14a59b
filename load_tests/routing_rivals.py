"""Ray's own routers in front of our engine, for comparison: applications to name as `import_path` in a Serve config.

Decides nothing about routing. Ray's routers place what goes through a Ray handle, so here each request is a streamed
call, in place of a message of our link; without failover, of which the comparison has no need. Ray's prefix-aware
router is used without its package, whose import wants vLLM or SGLang and more; it compares texts, so it is given one
character per token.
"""

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
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve_app.app import engine_options, ingress_options, use_gpu
from serve_app.core.request import EngineRequest
from serve_app.errors import RequestError
from serve_app.serving import replica_set, routing
from serve_app.serving.attempt import ItemStream, Transport
from serve_app.serving.ingress import Ingress
from serve_app.serving.replica import EngineReplica
from serve_app.serving.router import ReportingMixin
from serve_app.serving.transport import LinkTransport
from serve_app.serving.wire import WireItem, WireRequest, pack_request
from serve_app.settings import Settings

_PACKAGE = "ray.llm._internal.serve.routing_policies.prefix_aware"
_FIRST_SURROGATE, _NUM_SURROGATES = 0xD800, 0x800


def _import_prefix_router() -> Any:
    """Ray's class, from its two files alone; they are sent by value to processes that cannot import them."""
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


class RivalMixin(ReportingMixin):
    """What our ingress needs of any router: it is told who got what."""

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        chosen = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)  # type: ignore[misc]
        replica_set.process_set.note_assigned(_call(pending_request).get("attempt_id", ""), chosen.replica_id.unique_id)
        return chosen


class PowerOfTwoRouter(RivalMixin, PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray Serve's default."""


class PrefixTreeRouter(RivalMixin, _import_prefix_router()):  # type: ignore[misc]
    """Ray Serve LLM's `PrefixCacheAffinityRouter`, with its defaults."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        ids = _call(pending_request).get("prompt_token_ids", ())
        return "".join(chr(i if i < _FIRST_SURROGATE else i + _NUM_SURROGATES) for i in ids)


class CalledReplica(EngineReplica):
    """Takes requests as streamed calls, too."""

    async def call(self, data: WireRequest) -> AsyncGenerator[WireItem, None]:
        try:
            async for item in self.generate(data):
                yield item
        except RequestError as error:
            yield error.to_wire()


class HandleTransport(LinkTransport):
    """Requests go through Ray's handle, heartbeats come by our link."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        super().__init__(replica_set.process_set, routing.policy)
        self._call = engines.options(method_name="call", stream=True)

    def generate(self, request: EngineRequest, attempt_id: str, session: str | None, since: float) -> ItemStream:
        data = pack_request(request, attempt_id)
        # In a context of its own: within that of an HTTP request, all its calls would share one id, by which the
        # router tells waiting calls apart.
        items: ItemStream = contextvars.Context().run(self._call.remote, data)
        return items


class RivalIngress(Ingress):
    """An ingress whose requests Ray's router places."""

    def _open_transport(self, engines: DeploymentHandle[Any]) -> Transport:
        return HandleTransport(engines)


def power_of_two(args: Settings) -> serve.Application:
    """Our application with Ray Serve's default router."""
    return _build(args, PowerOfTwoRouter)


def prefix_tree(args: Settings) -> serve.Application:
    """Our application with Ray Serve LLM's prefix-aware router."""
    return _build(args, PrefixTreeRouter)


def _build(settings: Settings, router: type[RequestRouter]) -> serve.Application:
    options = engine_options(settings) | {
        "request_router_config": RequestRouterConfig(request_router_class=router),
        "max_ongoing_requests": settings.max_ongoing_per_replica,
    }
    engines = serve.deployment(CalledReplica).options(**options).bind(settings, use_gpu=use_gpu(settings))
    ingress = serve.deployment(serve.ingress()(RivalIngress)).options(**ingress_options(settings))
    return ingress.bind(engines, settings)
