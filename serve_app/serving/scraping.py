"""Where Prometheus finds the metrics: every process of the application serves its own, and any ingress lists them all.

Decides who is listed (the running replicas of both deployments, as Serve's controller knows them) and the labels that
tell their series apart. What is measured is decided in `observability.metrics`.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from ray.exceptions import RayError

from serve_app.errors import UnavailableError
from serve_app.observability.metrics_port import Admits, Page, serve_registry
from serve_app.serving.ray_patches import node_address, running_replicas

METRICS_ADDRESS = "metrics"
"""In a replica's metadata: `host:port` of its metrics port."""
METRICS_KEY = "metrics_key"
"""In an engine replica's metadata: with what the ingress is admitted to its metrics port."""

_TIMEOUT_S = 2.0


def open_metrics_port(
    registry: CollectorRegistry,
    metrics_host: str,
    pages: Mapping[str, Page] | None = None,
    admits: Admits | None = None,
) -> str:
    """Serve `registry`, and `pages` by their paths, on a free port of this process; returns its address.

    `metrics_host` "node" is the address of the Ray node. The process's own memory and processor time come with it.
    `admits` as `auth` has it.
    """
    ProcessCollector(registry=registry)
    host = node_address() if metrics_host == "node" else metrics_host
    return f"{host}:{serve_registry(registry, host, pages, admits)}"


async def metrics_targets(application: str) -> list[dict[str, Any]]:
    """Every metrics port of the application, in the form of Prometheus' HTTP service discovery.

    Raises `UnavailableError` while the controller does not answer; Prometheus then keeps the targets that it has.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            # Not from this ingress's own picture: it knows the engines, but not the other ingress replicas.
            running = await running_replicas()
    except (RayError, TimeoutError):
        raise UnavailableError("Serve's controller does not answer", retry_after_s=_TIMEOUT_S) from None
    return [
        {
            "targets": [replica.replica_metadata[METRICS_ADDRESS]],
            "labels": {
                "deployment": deployment.name,
                "replica": replica.replica_id.unique_id,
                "node": replica.node_ip or "",
            },
        }
        for deployment, replicas in running.items()
        for replica in replicas
        if deployment.app_name == application and METRICS_ADDRESS in replica.replica_metadata
    ]
