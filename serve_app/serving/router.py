"""Joins Ray Serve's request router to our policy.

Tells `replica_set` and `routing.policy` who is there, and places each request where the policy wants it, as soon as one
may have it. Ray copies this module by value into the processes that route, so it holds no state; what it imports from
our other modules must be modules or classes.
"""

import time
from collections.abc import Mapping
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serve_app.serving import replica_set, routing


class ReportingMixin:
    """Passes on what Ray's controller and failed calls tell a router about replicas."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas that Ray's controller says are running, and of how full they last were."""
        super().update_replicas(replicas)  # type: ignore[misc]
        self._publish(replicas)
        for replica in replicas:
            if replica.routing_stats:
                replica_set.note_load(replica.replica_id.unique_id, _load(replica.routing_stats))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop the replica at once; the controller may need seconds to notice."""
        super().on_replica_actor_died(replica_id)  # type: ignore[misc]
        replica_set.suspect(replica_id.unique_id, dead=True)
        self._publish(list(self.curr_replicas.values()))  # type: ignore[attr-defined]

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Send nothing more to the replica until it gives a sign of life: on the fast path this is how death looks."""
        super().on_replica_actor_unavailable(replica_id)  # type: ignore[misc]
        replica_set.suspect(replica_id.unique_id, "unavailable")

    def _publish(self, replicas: list[RunningReplica]) -> None:
        known: dict[str, dict[str, Any]] = {r.replica_id.unique_id: r.replica_metadata for r in replicas}
        routing.policy.update({name: routing.ReplicaInfo.from_metadata(known[name]) for name in known})
        replica_set.publish(known)


class EngineRouter(ReportingMixin, RequestRouter):  # type: ignore[misc]
    """Sends each request to the first replica in the policy's order that is not full."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas that may have the request, best first, each a rank of its own."""
        data = _wire_request(pending_request)
        return [[replica] for replica in self._in_order(candidate_replicas, data, _routing_request(data))]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Wait until a replica may have the request, and count it there.

        Ray's own version has a few tasks work off a queue. A request that must wait for one certain replica would hold
        up all others there, and asking replicas how full they are takes longer than being refused now and then.
        """
        data = _wire_request(pending_request)
        request = _routing_request(data)
        tries = 0
        while True:
            in_order = self._in_order(self._replicas_list, data, request)
            chosen = next((replica for replica in in_order if not self._is_full(replica)), None)
            if chosen is not None:
                break
            await self._backoff(tries)
            tries += 1
        if request is not None:
            routing.policy.routed(request, chosen.replica_id.unique_id)
        # Before it has accepted: one that is stopped never will, and someone should know whom the request waits for.
        attempt_id = data.get("attempt_id", "")
        replica_set.note_assigned(attempt_id, chosen.replica_id.unique_id)
        if replica_set.process_set.replica_of(attempt_id) is None:
            # It was cancelled meanwhile: nobody would take it off the replica's account any more.
            routing.policy.ended(attempt_id)
        return chosen

    def _in_order(
        self, replicas: list[RunningReplica], data: Mapping[str, Any], request: routing.RoutingRequest | None
    ) -> list[RunningReplica]:
        by_id = {replica.replica_id.unique_id: replica for replica in replicas}
        allowed = replica_set.routable(list(by_id), data.get("attempt_id", ""))
        if request is not None:
            allowed = routing.policy.rank(request, allowed, replica_set.loads(), time.monotonic())
        return [by_id[name] for name in allowed]

    def _is_full(self, replica: RunningReplica) -> bool:
        """Whether Ray's own limit is reached, as far as is known; the engine's limit is the ingress queue's matter."""
        ongoing = self.replica_queue_len_cache.get(replica.replica_id)
        return ongoing is not None and ongoing >= replica.max_ongoing_requests


def _wire_request(pending: PendingRequest | None) -> dict[str, Any]:
    """The dict that every call from the failover carries; empty for other calls."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, dict) else {}


def _routing_request(data: Mapping[str, Any]) -> routing.RoutingRequest | None:
    """What matters of a `pack_request` dict; None for calls without a prompt."""
    if "prompt_token_ids" not in data:
        return None
    prompt, params = data["prompt_token_ids"], data["params"]
    prior: list[int] = max(data["prior_output_ids"], key=len, default=[])
    return routing.RoutingRequest(
        attempt_id=data["attempt_id"],
        token_ids=[*prompt, *prior],
        num_prompt_tokens=len(prompt),
        num_sequences=params.get("n", 1),
        cache_salt=data["cache_salt"],
        session=data["session"],
        reads_cache=params.get("prompt_logprobs") is None,
    )


def _load(stats: Mapping[str, Any]) -> replica_set.ReplicaLoad:
    """`record_routing_stats`, whose `time` is the replica's wall clock."""
    values = dict(stats)
    age_s = max(0.0, time.time() - values.pop("time"))
    return replica_set.ReplicaLoad(**values, at=time.monotonic() - age_s)
