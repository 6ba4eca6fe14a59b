"""Gauges of the bytes that a process buffers for slow readers and bodies, with their limits."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Gauge


class HeldBytes(NamedTuple):
    """A buffer's size in bytes and its limit. `held` is called on each scrape, in any thread."""

    held: Callable[[], float]
    limit: float


def register_held_bytes(registry: CollectorRegistry, kinds: Mapping[str, HeldBytes]) -> None:
    """Register gauges of size and limit for each kind of buffer."""
    held = Gauge(
        "serve_app_held_bytes", "Bytes held in buffers for slow readers and bodies", ["kind"], registry=registry
    )
    limit = Gauge("serve_app_held_bytes_limit", "Limit of these bytes", ["kind"], registry=registry)
    for kind, bounded in kinds.items():
        held.labels(kind).set_function(bounded.held)
        limit.labels(kind).set(bounded.limit)
