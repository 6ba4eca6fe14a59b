"""The adapter between Ray's router and our policy, with replicas that are only names. No cluster."""

import asyncio
import time
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.serving import replica_set, routing
from serve_app.serving.replica_set import ReplicaSet
from serve_app.serving.routing import RoutingPolicy
from serve_app.serving.wire import pack_request

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own modules
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve.request_router import PendingRequest

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

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> ReplicaSet:
    """This test's own, in place of the process's; the policy too."""
    own = ReplicaSet()
    monkeypatch.setattr(replica_set, "process_set", own)
    for name in ("publish", "note_assigned", "note_load", "loads", "suspect", "routable"):
        monkeypatch.setattr(replica_set, name, getattr(own, name))
    monkeypatch.setattr(routing, "policy", RoutingPolicy())
    return own


@pytest.fixture
async def router(replicas: ReplicaSet) -> AsyncIterator[EngineRouter]:
    router = EngineRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.update_replicas([NamedReplica("a"), NamedReplica("b")])
    yield router
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def call(attempt_id: str, prompt: range = range(200), session: str | None = None) -> PendingRequest:
    request = EngineRequest(attempt_id, tuple(prompt), SamplingParams(max_tokens=1))
    return pending(pack_request(request, attempt_id, session))


def pending(*args: Any) -> PendingRequest:
    return PendingRequest(list(args), {}, RequestMetadata("request", "internal"))


async def place(router: EngineRouter, what: PendingRequest) -> str:
    return str((await router._choose_replica_for_request(what)).replica_id.unique_id)


def sequences() -> dict[str, int]:
    return {name: replica.sequences for name, replica in routing.policy._replicas.items()}


async def test_a_shared_prefix_goes_to_one_replica_and_the_set_knows_where(
    router: EngineRouter, replicas: ReplicaSet
) -> None:
    for attempt in ("1", "2"):
        replicas.begin(attempt)
    first = await place(router, call("1"))
    assert await place(router, call("2")) == first
    assert replicas.in_flight(first) == 2
    assert sequences()[first] == 2


async def test_a_session_stays_with_unlike_prompts(router: EngineRouter, replicas: ReplicaSet) -> None:
    homes = set()
    for number in range(3):
        replicas.begin(str(number))
        homes.add(await place(router, call(str(number), range(100 * number, 100 * number + 9), session="s")))
    assert len(homes) == 1


async def test_an_attempt_that_is_over_when_it_is_placed_counts_nowhere(router: EngineRouter) -> None:
    await place(router, call("never begun"))
    assert sequences() == {"a": 0, "b": 0}


async def test_a_request_that_must_wait_holds_up_no_other(router: EngineRouter, replicas: ReplicaSet) -> None:
    """Ray's own would stop after two requests per replica that wait."""
    held = []
    for number in range(12):
        replicas.begin(f"held-{number}")
        replicas.pin(f"held-{number}", "c")
        held.append(asyncio.ensure_future(place(router, call(f"held-{number}"))))
    replicas.begin("free")
    assert await asyncio.wait_for(place(router, call("free")), 5) in "ab"
    assert not any(task.done() for task in held)
    router.update_replicas([NamedReplica(name) for name in "abc"])
    assert await asyncio.wait_for(asyncio.gather(*held), 20) == ["c"] * 12


@pytest.mark.parametrize(
    "lose",
    [
        lambda router, name: router.on_replica_actor_died(ReplicaID(name, DEPLOYMENT)),
        lambda router, name: router.on_replica_actor_unavailable(ReplicaID(name, DEPLOYMENT)),
        lambda router, name: router.update_replicas([NamedReplica(other) for other in "ab" if other != name]),
        lambda router, name: replica_set.suspect(name),
    ],
    ids=["died", "unavailable", "left", "suspected"],
)
async def test_a_lost_replica_gets_nothing_more_though_it_has_the_prefix(
    router: EngineRouter, replicas: ReplicaSet, lose: Callable[[EngineRouter, str], None]
) -> None:
    for number in range(5):
        replicas.begin(str(number))
    home = await place(router, call("0"))
    lose(router, home)
    assert {await place(router, call(str(number))) for number in range(1, 5)} == {"ab".replace(home, "")}


async def test_a_replica_that_refused_is_passed_over_and_the_attempt_moves(
    router: EngineRouter, replicas: ReplicaSet
) -> None:
    replicas.begin("1")
    what = call("1")
    first = await place(router, what)
    router.on_new_queue_len_info(ReplicaID(first, DEPLOYMENT), 8)
    second = await router._choose_replica_for_request(what, is_retry=True)
    assert second.replica_id.unique_id != first
    assert sequences() == {first: 0, second.replica_id.unique_id: 1}


async def test_calls_without_a_prompt_are_placed_too(router: EngineRouter, replicas: ReplicaSet) -> None:
    assert await place(router, pending()) in "ab"
    replicas.begin("heartbeat")
    replicas.pin("heartbeat", "b")
    assert await place(router, pending({"attempt_id": "heartbeat"})) == "b"
    assert sequences() == {"a": 0, "b": 0}


async def test_routing_stats_tell_the_load(router: EngineRouter, replicas: ReplicaSet) -> None:
    stats = {"running": 3, "waiting": 1, "free_blocks": 9, "total_blocks": 63, "step": 5, "step_age_s": None}
    router.update_replicas([NamedReplica("a", routing_stats=stats | {"time": time.time() - 2}), NamedReplica("b")])
    load = replicas.loads()["a"]
    assert (load.running, load.waiting) == (3, 1)
    assert 2 <= time.monotonic() - load.at < 30
    assert await router.choose_replicas(router._replicas_list, call("x")) == [
        [router.curr_replicas[ReplicaID(name, DEPLOYMENT)]] for name in "ba"
    ]
