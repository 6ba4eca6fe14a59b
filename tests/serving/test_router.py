"""What Ray's router passes on about replicas that are only names. No cluster."""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve_app.serving import replica_set, routing
from serve_app.serving.replica_set import ReplicaSet
from serve_app.serving.routing import RoutingPolicy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

    from serve_app.serving.router import EngineRouter

DEPLOYMENT = DeploymentID(name="EngineReplica", app_name="test")
METADATA = {"info": {"block_size": 4, "num_blocks": 64}, "max_num_seqs": 4, "prefix_cache": True}


@dataclass
class NamedReplica:
    """What a router reads of a `RunningReplica`."""

    name: str
    max_ongoing_requests: int = 8
    routing_stats: dict[str, Any] = field(default_factory=dict)

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    @property
    def replica_metadata(self) -> dict[str, Any]:
        return dict(METADATA)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> ReplicaSet:
    """This test's own, in place of the process's; the policy too."""
    own = ReplicaSet()
    monkeypatch.setattr(replica_set, "process_set", own)
    monkeypatch.setattr(routing, "policy", RoutingPolicy())
    return own


@pytest.fixture
async def router(replicas: ReplicaSet) -> EngineRouter:
    router = EngineRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.update_replicas([NamedReplica("a"), NamedReplica("b")])
    return router


async def test_set_and_policy_know_who_is_there(router: EngineRouter, replicas: ReplicaSet) -> None:
    assert replicas.current() == {"a": METADATA, "b": METADATA}
    assert set(routing.policy._replicas) == {"a", "b"}
    router.update_replicas([NamedReplica("b"), NamedReplica("c")])
    assert replicas.alive() == ["b", "c"]
    assert set(routing.policy._replicas) == {"b", "c"}


async def test_routing_stats_tell_the_load(router: EngineRouter, replicas: ReplicaSet) -> None:
    stats = {"running": 3, "waiting": 1, "free_blocks": 9, "total_blocks": 63, "step": 5, "step_age_s": None}
    router.update_replicas([NamedReplica("a", routing_stats=stats | {"time": time.time() - 2}), NamedReplica("b")])
    load = replicas.loads()["a"]
    assert (load.running, load.waiting) == (3, 1)
    assert 2 <= time.monotonic() - load.at < 30
