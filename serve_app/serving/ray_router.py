"""Ray Serve's request router, as far as we need one: it is how the ingress learns where the replicas are.

Each process with a handle of a deployment has a router, which Ray's controller keeps informed. Ray copies this module
by value, so it holds no state; what it imports from our other modules must be modules or classes.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve_app.serving import membership


class ReportingMixin:
    """Passes on what Ray's controller tells a router about replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas that Ray's controller says are running."""
        super().update_replicas(replicas)  # type: ignore[misc]
        membership.engines.publish({r.replica_id.unique_id: r.replica_metadata for r in replicas})


class EngineRouter(ReportingMixin, RequestRouter):  # type: ignore[misc]
    """Calls through a handle go to any replica. Requests go by `LinkTransport`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, one rank."""
        return [candidate_replicas]
