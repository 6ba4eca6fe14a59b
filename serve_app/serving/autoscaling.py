"""Autoscaling: how many engine replicas the load needs. A pure function and Ray Serve's policies.

Computes the number only. Limits and delays are set in Serve's `AutoscalingConfig`: Serve calls a
policy a few times a second, and acts once the result has stayed above (or below) the current number
for the whole delay.

Most requests queue at the ingress, but Serve passes a policy only its own deployment's metrics. So
the ingress, which has one replica, also has a policy. It scales nothing, but stores the queue
length in the process where both policies run. Serve copies this module by value, so that state is
in a separate module, `ingress_queues`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve_app.serving import ingress_queues

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# Add a replica only when more than one sequence waits per four that run; below that, slots become
# free soon.
_MAX_WAITING_SERVED_RATIO = 0.25
# A KV pool fuller than this is about to preempt.
_MAX_KV_USAGE = 0.9
# Remove replicas only if the remaining ones would be at most this full, so that a small increase in
# load does not add them back.
_COMFORTABLE_USAGE = 0.6


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """Load of all replicas, in sequences.

    `kv_pools`: KV blocks in use, in units of one replica's pool.
    """

    queued: float
    """Sequences waiting at the ingress."""
    waiting: float
    """Sequences waiting in the engines."""
    running: float
    kv_pools: float

    @property
    def waiting_served_ratio(self) -> float:
        """Waiting sequences, at the ingress or in engines, per running sequence."""
        return (self.queued + self.waiting) / max(self.running, 1.0)


def desired_replicas(load: FleetLoad, replicas: int, max_num_seqs: float) -> int:
    """Return how many replicas `load` needs, at least 1.

    `replicas`: the current number. `max_num_seqs`: mean slots per replica.

    If too many sequences wait, returns enough replicas for all of them. If fewer replicas would not
    be too full, returns fewer. Otherwise returns the current number. Assumes that waiting sequences
    need as many KV blocks as running ones.
    """
    demand = load.queued + load.waiting + load.running
    slots = demand / max_num_seqs
    pools = load.kv_pools * (1.0 + load.waiting_served_ratio)
    needed = max(1, math.ceil(max(slots, pools / _MAX_KV_USAGE)))
    comfortable = max(1, math.ceil(max(slots, pools) / _COMFORTABLE_USAGE))
    if needed > replicas and load.waiting_served_ratio > _MAX_WAITING_SERVED_RATIO:
        return needed
    return min(replicas, comfortable)


class EnginePolicy:
    """Autoscaling policy of the engine deployment.

    Replicas report `waiting`, `running`, `kv_usage` and `slots`.
    """

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state.

        Keeps the number until a replica has reported.
        """
        reported = context.aggregated_metrics or {}
        slots = reported.get("slots")
        if not slots:
            return context.target_num_replicas, {}
        load = FleetLoad(
            queued=ingress_queues.length(context.app_name),
            waiting=sum(reported.get("waiting", {}).values()),
            running=sum(reported.get("running", {}).values()),
            kv_pools=sum(reported.get("kv_usage", {}).values()),
        )
        return desired_replicas(load, context.target_num_replicas, sum(slots.values()) / len(slots)), {}


class IngressPolicy:
    """Autoscaling policy of the ingress deployment: stores the reported `queued`, never scales."""

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """Return the current number of replicas, and no state."""
        reported = context.aggregated_metrics or {}
        ingress_queues.note(context.app_name, sum(reported.get("queued", {}).values()))
        return context.target_num_replicas, {}
