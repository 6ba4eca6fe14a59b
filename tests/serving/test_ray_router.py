"""What Ray's router passes on about replicas that are only names. No cluster."""

import asyncio
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.serving import membership
from serve_app.serving.membership import Membership, Replicas

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

    from serve_app.serving.ray_router import EngineRouter

DEPLOYMENT = DeploymentID(name="EngineReplica", app_name="test")
METADATA = {"info": {"block_size": 4, "num_blocks": 64}, "max_num_seqs": 4, "prefix_cache": True}


@dataclass
class NamedReplica:
    """What a router reads of a `RunningReplica`."""

    name: str
    max_ongoing_requests: int = 8

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, DEPLOYMENT)

    @property
    def replica_metadata(self) -> dict[str, Any]:
        return dict(METADATA)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Membership:
    """This test's own, in place of the process's."""
    own = Membership()
    monkeypatch.setattr(membership, "engines", own)
    return own


async def test_an_ingress_hears_who_is_there_before_and_after_it_subscribed(engines: Membership) -> None:
    heard: list[Replicas] = []
    router = EngineRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.update_replicas([NamedReplica("a"), NamedReplica("b")])
    engines.subscribe(heard.append)
    router.update_replicas([NamedReplica("b"), NamedReplica("c")])
    assert heard == [{"a": METADATA, "b": METADATA}, {"b": METADATA, "c": METADATA}]


async def test_updates_from_another_thread_come_in_order(engines: Membership) -> None:
    heard: list[int] = []
    loop = asyncio.get_running_loop()
    engines.subscribe(lambda known: loop.call_soon_threadsafe(heard.append, len(known)))
    for count in range(5):
        await asyncio.to_thread(engines.publish, {str(number): METADATA for number in range(count)})
    assert heard == [0, *range(5)]
