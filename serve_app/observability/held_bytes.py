"""What a process holds for others who may be slow, in bytes, beside the bound of each."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Gauge


class HeldBytes(NamedTuple):
    """How much is held now, asked when somebody looks, from any thread; `limit`: how much may be."""

    held: Callable[[], float]
    limit: float


def register_held_bytes(registry: CollectorRegistry, kinds: Mapping[str, HeldBytes]) -> None:
    """A gauge for each kind of buffer and one for its bound."""
    held = Gauge(
        "serve_app_held_bytes", "Bytes held in buffers for slow readers and bodies", ["kind"], registry=registry
    )
    limit = Gauge("serve_app_held_bytes_limit", "Limit of these bytes", ["kind"], registry=registry)
    for kind, bounded in kinds.items():
        held.labels(kind).set_function(bounded.held)
        limit.labels(kind).set(bounded.limit)
