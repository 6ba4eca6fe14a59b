"""A server with another routing policy: every request goes to the next replica that has a free
slot.

`PYTHONPATH=. serve-app serve examples/routing_policy.yaml` starts it. The default policy is
`serve_app.fleet.prefix_routing.PrefixRouting`; `serve_app.fleet.routing_policy` documents the
protocol.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.app import engine_options, ingress_options
from serve_app.fleet.attempt import Transport
from serve_app.fleet.load import ReplicaLoad
from serve_app.fleet.routing_policy import ReplicaInfo, RoutingRequest
from serve_app.fleet.transport import LinkTransport
from serve_app.serving.gpus import use_gpu
from serve_app.serving.ingress import Ingress
from serve_app.serving.replica import EngineReplica
from serve_app.settings import Settings


class RoundRobin:
    """A `RoutingPolicy`. It counts the sequences that it has placed, since heartbeats come only
    once a second."""

    def __init__(self) -> None:
        self._infos: Mapping[str, ReplicaInfo] = {}
        self._placed: dict[str, int] = {}
        self._turns: dict[str, int] = {}  # when each replica had its last turn
        self._turn = 0

    def update(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """Remember the replicas and their sizes."""
        self._infos = dict(replicas)

    def rank(
        self, request: RoutingRequest, candidates: Iterable[str], loads: Mapping[str, ReplicaLoad], now: float
    ) -> list[str]:
        """The candidates with a free slot, the one whose last turn is longest ago first."""
        free = [name for name in candidates if self._has_room(name, request.num_sequences)]
        return sorted(free, key=lambda name: self._turns.get(name, -1))

    def _has_room(self, name: str, num_sequences: int) -> bool:
        info, placed = self._infos.get(name), self._placed.get(name, 0)
        return info is not None and (placed == 0 or placed + num_sequences <= info.max_num_seqs)

    def place(self, request: RoutingRequest, replica_id: str) -> "Turn":
        """Count the request."""
        self._turn += 1
        self._turns[replica_id] = self._turn
        return Turn(self._placed, replica_id, request.num_sequences)

    def account(self, replica_id: str) -> dict[str, float | None]:
        """Shown by `/debug/replicas`."""
        return {"placed": float(self._placed.get(replica_id, 0)), "last_turn": self._turns.get(replica_id)}


class Turn:
    """A `Placement`: one attempt at one replica."""

    def __init__(self, placed: dict[str, int], replica_id: str, num_sequences: int) -> None:
        self._placed, self._replica_id, self._num_sequences = placed, replica_id, num_sequences
        placed[replica_id] = placed.get(replica_id, 0) + num_sequences

    def started(self, num_cached_tokens: int) -> None:
        """Round robin does not use cache hits."""

    def refused(self, now: float) -> None:
        """The replica was full; the next `rank` offers another one first."""

    def ended(self) -> None:
        """Give the slots back, once."""
        self._placed[self._replica_id] -= self._num_sequences
        self._num_sequences = 0


class RoundRobinIngress(Ingress):
    """The ingress with this policy."""

    def _open_transport(self, engines: DeploymentHandle[Any]) -> Transport:
        return LinkTransport(self._replicas, RoundRobin())


def build(args: Settings) -> serve.Application:
    """The application, as `serve_app.app:build` makes it, with another ingress."""
    engines = serve.deployment(EngineReplica).options(**engine_options(args)).bind(args, use_gpu=use_gpu(args))
    ingress = serve.deployment(serve.ingress()(RoundRobinIngress)).options(**ingress_options(args))
    return ingress.bind(engines, args)
