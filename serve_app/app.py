"""Builds the Serve application from `Settings` (`import_path: serve_app.app:build`).

Sets the two deployments' options: slots, limits, health checks, updates, shutdown, autoscaling.
Annotations remain real classes here (no postponed evaluation), because Ray uses the builder's
annotations to validate `args`.
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

# A burst of requests waits in Ray's queue until the ingress queues each or refuses it with a typed
# error, which takes time. Ray refuses requests beyond this number. Without a limit, an ingress that
# falls seconds behind would fail its health checks, and its streams would end. On Ray's default
# path, requests wait in the proxy, which refuses in plain text.
_MAX_QUEUED_AT_INGRESS = 1024
_MAX_QUEUED_AT_PROXY = 4096
# On Ray's default path, requests without a slot in the ingress wait in the proxy's router. After a
# request was refused a slot, Ray 2.60 assigns slots one by one and sleeps for its longest back-off
# after each, however many are free. With the default of 0.5 s, the last request of a crowd waited
# for two minutes. Values are in seconds.
_ROUTER_BACKOFF = {"initial_backoff_s": 0.005, "max_backoff_s": 0.01}
# A replica that dies during an update counts as a failed start. After this many, Serve gives up the
# deployment, and its dead replicas are no longer replaced. A wrong model uses them up within
# seconds.
_MAX_FAILED_STARTS = 3
# Added to the longest request time, in seconds. A replaced ingress finishes its streams. So does an
# engine whose streams no other engine can continue, until the last such ingress has ended.
_SHUTDOWN_MARGIN_S = 10.0
# How many more replicas there may be during an update, in percent; at least one.
_SURGE_PERCENT = 25
# Serve collects metrics five times in this period (seconds), and uses their mean over it. It warns
# below 10.
_LOOK_BACK_S = 11.0

# A replica that does not answer three checks in a row is replaced: 16 s after it froze, 6 s after
# its engine's step exceeded its time limit. Its requests have moved to other replicas before.
_COMMON_OPTIONS: dict[str, Any] = {
    "max_constructor_retry_count": _MAX_FAILED_STARTS,
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 5.0,
    "graceful_shutdown_wait_loop_s": 0.2,
}


def build(args: Settings) -> serve.Application:
    """Return the application: one ingress and the engine replicas.

    A model on the hub is pinned to one commit for all replicas.
    """
    args = args.model_copy(update={"model": pin_model(args.model)})
    engine = serve.deployment(EngineReplica).options(**engine_options(args))
    engines = engine.bind(args, use_gpu=use_gpu(args))
    ingress = serve.deployment(serve.ingress()(Ingress)).options(**ingress_options(args))
    return ingress.bind(engines, args)


def engine_options(settings: Settings) -> dict[str, Any]:
    """Return the deployment options of the engine."""
    options = _COMMON_OPTIONS | {
        "name": "EngineReplica",
        "ray_actor_options": {"num_cpus": 0, "num_gpus": int(use_gpu(settings))},
        "graceful_shutdown_timeout_s": settings.ingress.request_timeout_s + 2 * _SHUTDOWN_MARGIN_S,
        # An update starts a new replica before it stops an old one. Not on GPUs: without a spare
        # GPU the new one would never start.
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
    """Return the deployment options of the ingress.

    Its own queue decides which requests may wait; Ray's limits are higher.
    """
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
