"""What an ingress waits for when it starts. No cluster."""

import asyncio
import warnings

import pytest

from serve_app.fleet.replica_set import ReplicaSet

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    from serve_app.serving.ingress import wait_for_replica

NEW, OLD = {"revision": "new"}, {"revision": "old"}


async def test_an_ingress_waits_for_replicas_of_its_own_revision() -> None:
    replicas = ReplicaSet(revision="new")
    replicas.publish({"a": OLD})
    waiting = asyncio.create_task(wait_for_replica(replicas, 20))
    await asyncio.sleep(0)
    replicas.publish({"a": OLD, "b": OLD})
    await asyncio.sleep(0)
    assert not waiting.done()
    replicas.publish({"b": OLD, "c": NEW})
    assert await waiting is NEW


async def test_an_ingress_says_what_it_waited_for_in_vain() -> None:
    replicas = ReplicaSet(revision="new")
    replicas.publish({"a": OLD})
    with pytest.raises(TimeoutError, match="no engine replica of revision new within 0 s"):
        await wait_for_replica(replicas, 0)
