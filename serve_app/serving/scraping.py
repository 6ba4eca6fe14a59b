"""Prometheus service discovery: lists the metrics port of every process.

Every process serves its own metrics, and any ingress lists them all. Decides which processes are
listed (the running replicas of both deployments, from Serve's controller) and their labels.
`observability.metrics` defines the metrics.
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
"""Key in a replica's metadata: `host:port` of its metrics port."""
METRICS_KEY = "metrics_key"
"""Key in an engine replica's metadata: the API key with which the ingress reads its metrics port.
"""

_TIMEOUT_S = 2.0


def open_metrics_port(
    registry: CollectorRegistry,
    metrics_host: str,
    pages: Mapping[str, Page] | None = None,
    admits: Admits | None = None,
) -> str:
    """Serve `registry`, and `pages` by path, on a free port. Returns the address as `host:port`.

    `metrics_host` "node" means the address of the Ray node. Adds the process's memory and CPU
    metrics to `registry`. `admits`: the check for API keys, see `auth`.
    """
    ProcessCollector(registry=registry)
    host = node_address() if metrics_host == "node" else metrics_host
    return f"{host}:{serve_registry(registry, host, pages, admits)}"


async def metrics_targets(application: str) -> list[dict[str, Any]]:
    """Return every metrics port of the application, as Prometheus' HTTP service discovery.

    Raises `UnavailableError` while the controller does not answer; Prometheus then keeps its
    targets.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            # Asks the controller, because this ingress does not know the other ingress replicas.
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
