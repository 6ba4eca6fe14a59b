"""Builds the Serve application from `Settings` (`import_path: serve_app.app:build`).

Decides the two deployments' options: places, limits, health checks, shutdown. Annotations stay real classes here (no
postponed evaluation): Ray looks at the builder's to validate `args`.
"""

from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from serve_app.serving.ingress import Ingress
from serve_app.serving.replica import EngineReplica
from serve_app.serving.router import EngineRouter
from serve_app.settings import Settings

# Requests that take no place in an engine (health, metrics, models, tokenize), and calls of Ray's own.
_SPARE_REQUESTS = 256


def build(args: Settings) -> serve.Application:
    """The application: one ingress in front of `num_replicas` engine replicas."""
    engine = serve.deployment(EngineReplica).options(**engine_options(args))
    engines = engine.bind(args, use_gpu=use_gpu(args))
    ingress = serve.deployment(serve.ingress()(Ingress)).options(**ingress_options(args))
    return ingress.bind(engines, args)


def engine_options(settings: Settings) -> dict[str, Any]:
    """Deployment options of the engine. A wrong model fails the deployment at its first try, not its twentieth."""
    return {
        "name": "EngineReplica",
        "num_replicas": settings.num_replicas,
        "ray_actor_options": {"num_cpus": 0, "num_gpus": int(use_gpu(settings))},
        "max_ongoing_requests": settings.max_ongoing_per_replica + _SPARE_REQUESTS,
        "max_queued_requests": settings.max_ongoing_requests + _SPARE_REQUESTS,
        "max_constructor_retry_count": 1,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": 60.0,
        "request_router_config": RequestRouterConfig(request_router_class=EngineRouter),
    }


def ingress_options(settings: Settings) -> dict[str, Any]:
    """Deployment options of the ingress, whose own queue decides what may wait; Ray's limits lie beyond it."""
    return {
        "name": "Ingress",
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": settings.max_ongoing_requests + settings.ingress.max_queued_requests + _SPARE_REQUESTS,
        "max_queued_requests": _SPARE_REQUESTS,
        "max_constructor_retry_count": 1,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": 60.0,
    }


def use_gpu(settings: Settings) -> bool:
    """Whether each replica takes a GPU: as told, or if Ray's cluster has any."""
    if settings.device == "auto":
        return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1)
    return settings.device == "cuda"
