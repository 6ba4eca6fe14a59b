"""Builds the Serve application from `Settings` (`import_path: serve_app.app:build`).

Decides the two deployments' options: places, limits, health checks, updates, shutdown, autoscaling. Annotations stay
real classes here (no postponed evaluation): Ray looks at the builder's to validate `args`.
"""

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig

from serve_app.checkpoints.model_files import pin_model
from serve_app.environment import haproxy_enabled
from serve_app.serving.autoscaling import EnginePolicy, IngressPolicy
from serve_app.serving.gpus import use_gpu
from serve_app.serving.ingress import Ingress
from serve_app.serving.ray_router import EngineRouter
from serve_app.serving.replica import EngineReplica
from serve_app.settings import Settings

# Requests that arrive in one burst wait in Ray's queue until the ingress queues each or refuses it with a typed error,
# which takes time. Ray refuses what exceeds this number: an ingress that falls behind by seconds fails its health
# checks, and its streams would end with it. On Ray's default path they wait in the proxy, which refuses in plain text.
_MAX_QUEUED_AT_INGRESS = 1024
_MAX_QUEUED_AT_PROXY = 4096
# On Ray's default path, requests that the ingress has no place for wait in the proxy's router. Once some were refused a
# place, Ray 2.60 hands out places one by one and sleeps for its longest back-off after each, however many are free: by
# default half a second, and a crowd's last request waited for two minutes (s).
_ROUTER_BACKOFF = {"initial_backoff_s": 0.005, "max_backoff_s": 0.01}
# A replica that dies while an update reaches it counts as one that fails to start. A deployment that has used all of
# these up is given up: from then on, nobody replaces its dead replicas. A wrong model uses them up within seconds.
_MAX_FAILED_STARTS = 3
# Longer than any request may take: an ingress that is replaced serves its streams to their end, and so does an engine
# whose streams no other can continue, until the last such ingress has ended (s).
_SHUTDOWN_MARGIN_S = 10.0
# How many more replicas there may be during an update; one at least.
_SURGE_PERCENT = 25
# Serve takes figures each fifth of this, and answers by their mean over it (s). It warns below 10.
_LOOK_BACK_S = 11.0

# A replica that does not answer three checks in a row is replaced: 16 s after it froze, 6 s after its engine's step
# has become too old. Its requests have gone elsewhere before.
_COMMON_OPTIONS: dict[str, Any] = {
    "max_constructor_retry_count": _MAX_FAILED_STARTS,
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 5.0,
    "graceful_shutdown_wait_loop_s": 0.2,
}


def build(args: Settings) -> serve.Application:
    """The application: one ingress in front of the engine replicas, all of one commit of a model on the hub."""
    args = args.model_copy(update={"model": pin_model(args.model)})
    engine = serve.deployment(EngineReplica).options(**engine_options(args))
    engines = engine.bind(args, use_gpu=use_gpu(args))
    ingress = serve.deployment(serve.ingress()(Ingress)).options(**ingress_options(args))
    return ingress.bind(engines, args)


def engine_options(settings: Settings) -> dict[str, Any]:
    """Deployment options of the engine."""
    options = _COMMON_OPTIONS | {
        "name": "EngineReplica",
        "ray_actor_options": {"num_cpus": 0, "num_gpus": int(use_gpu(settings))},
        "graceful_shutdown_timeout_s": settings.ingress.request_timeout_s + 2 * _SHUTDOWN_MARGIN_S,
        # In an update a new replica comes before an old one goes. Not on GPUs: without a spare one it would never come.
        "max_surge_percent": 0 if use_gpu(settings) else _SURGE_PERCENT,
        "request_router_config": RequestRouterConfig(request_router_class=EngineRouter),
    }
    limits = settings.autoscaling
    if limits is None:
        return options | {"num_replicas": settings.num_replicas}
    policy = AutoscalingPolicy(policy_function=EnginePolicy)
    return options | {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=limits.min_replicas,
            max_replicas=limits.max_replicas,
            upscale_delay_s=limits.upscale_delay_s,
            downscale_delay_s=limits.downscale_delay_s,
            look_back_period_s=_LOOK_BACK_S,
            policy=policy,
        )
    }


def ingress_options(settings: Settings) -> dict[str, Any]:
    """Deployment options of the ingress, whose own queue decides what may wait; Ray's limits lie beyond it."""
    options = _COMMON_OPTIONS | {
        "name": "Ingress",
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": settings.ingress_requests,
        "max_queued_requests": _MAX_QUEUED_AT_INGRESS if haproxy_enabled() else _MAX_QUEUED_AT_PROXY,
        "backpressure_config": BackpressureConfig(status_code=429),
        "request_router_config": RequestRouterConfig(**_ROUTER_BACKOFF),
        "graceful_shutdown_timeout_s": settings.ingress.request_timeout_s + _SHUTDOWN_MARGIN_S,
        "max_surge_percent": _SURGE_PERCENT,
    }
    if settings.autoscaling is None:
        return options | {"num_replicas": 1}
    policy = AutoscalingPolicy(policy_function=IngressPolicy)
    return options | {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=1, max_replicas=1, look_back_period_s=_LOOK_BACK_S, policy=policy
        )
    }
