"""Joins Ray Serve's request router to what we know of the replicas.

Each process with a handle of a deployment has a router, which Ray's controller keeps informed: it is how the ingress
learns where the replicas are. Ray copies this module by value, so it holds no state; what it imports from our other
modules must be modules or classes.
"""

import time
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve_app.serving import replica_set, routing


class ReportingMixin:
    """Passes on what Ray's controller tells a router about replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas that Ray's controller says are running, and of how full they last were."""
        super().update_replicas(replicas)  # type: ignore[misc]
        known: dict[str, dict[str, Any]] = {r.replica_id.unique_id: r.replica_metadata for r in replicas}
        routing.policy.update({name: routing.ReplicaInfo.from_metadata(known[name]) for name in known})
        replica_set.process_set.publish(known)
        for replica in replicas:
            if replica.routing_stats:
                replica_set.process_set.note_load(replica.replica_id.unique_id, _load(replica.routing_stats))


class EngineRouter(ReportingMixin, RequestRouter):  # type: ignore[misc]
    """Calls through a handle go to any replica. Requests go by `LinkTransport`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, one rank."""
        return [candidate_replicas]


def _load(stats: Mapping[str, Any]) -> replica_set.ReplicaLoad:
    """`record_routing_stats`, whose `time` is the replica's wall clock."""
    values = dict(stats)
    age_s = max(0.0, time.time() - values.pop("time"))
    return replica_set.ReplicaLoad(**values, at=time.monotonic() - age_s)
