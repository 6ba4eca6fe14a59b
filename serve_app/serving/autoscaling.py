"""How many engine replicas the load needs: the rule, a pure function, and the policies through which Ray Serve asks it.

Decides the number alone. Limits and delays are Serve's (`AutoscalingConfig`); it asks some times a second, and acts on
an answer that has stayed on the same side of the present number for the whole delay.

The long queue stands at the ingress, and Serve shows a policy its own deployment's figures only. So the ingress, of
which there is one, has a policy too, which scales nothing: it notes the queue's length in the process where both
policies run. Serve copies this module by value, which is why `ingress_queues` is a module of its own.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serve_app.serving import ingress_queues

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# A replica is worth adding when, for every four sequences that run, one waits; below that, slots become free soon.
_MAX_WAITING_SERVED_RATIO = 0.25
# A pool beyond this is about to preempt.
_MAX_KV_USAGE = 0.9
# Replicas go when the rest would be this full at most, so that the next ripple does not call them back.
_COMFORTABLE_USAGE = 0.6


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """All replicas together, in sequences; `kv_pools` is the KV blocks in use, in pools of one replica."""

    queued: float
    """At the ingress."""
    waiting: float
    """In the engines."""
    running: float
    kv_pools: float

    @property
    def waiting_served_ratio(self) -> float:
        """Waiting sequences, wherever they wait, per running one."""
        return (self.queued + self.waiting) / max(self.running, 1.0)


def desired_replicas(load: FleetLoad, replicas: int, max_num_seqs: float) -> int:
    """How many replicas of `max_num_seqs` slots (a mean) `load` needs, when there are `replicas`; at least 1.

    More if too many wait, and then so many that nobody has to; fewer if the rest would be comfortable. Between the two
    it stays as it is. Waiting sequences are taken to need as many KV blocks as the running ones do.
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
    """The engine deployment's policy. Its replicas report `waiting`, `running`, `kv_usage` and their `slots`."""

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state. While no replica has reported yet, the number stays."""
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
    """The ingress deployment's policy: pass on the `queued` that the ingress reports; the number of replicas stays."""

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        """The number there is, and no state."""
        reported = context.aggregated_metrics or {}
        ingress_queues.note(context.app_name, sum(reported.get("queued", {}).values()))
        return context.target_num_replicas, {}
