"""Ray Serve's request router, used only to inform the ingress of the replicas.

Each process with a handle of a deployment has a router, which Ray's controller updates. Ray copies
this module by value, so it has no state, and it must import only modules or classes from our other
modules.
"""

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve_app.serving import membership


class ReportingMixin:
    """Publishes the replicas that Ray's controller reports to a router."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Publish the replicas that Ray's controller reports as running."""
        super().update_replicas(replicas)  # type: ignore[misc]
        membership.engines.publish({r.replica_id.unique_id: r.replica_metadata for r in replicas})


class EngineRouter(ReportingMixin, RequestRouter):  # type: ignore[misc]
    """Router for calls through a handle, to any replica. Requests use `LinkTransport` instead."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas, with equal rank."""
        return [candidate_replicas]
