"""Which engine replica a request goes to: the one with the fewest requests, as far as this process knows."""

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from serve_app.serving import replica_set


class EngineRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]
    """Offers every replica; Ray takes the one with the shortest queue. Tells `replica_set` who is there."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank with all candidates."""
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas that Ray's controller says are running."""
        super().update_replicas(replicas)
        known: dict[str, dict[str, Any]] = {r.replica_id.unique_id: r.replica_metadata for r in replicas}
        replica_set.publish(known)
