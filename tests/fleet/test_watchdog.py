"""What the watchdog finds, and what becomes of the streams: real engines, heartbeats and ticks by
hand."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.fleet.loss import LossReason
from serve_app.fleet.watchdog import SILENCE_S, TICK_S, Watchdog
from serve_app.fleet.wire import WireLoad
from tests.engine.streams import StreamEngine
from tests.fleet.replicas import Fault, Fleet, Told, told, until

STALL_TIMEOUT_S = 3.0
TICKS_OF_SILENCE = int(SILENCE_S / TICK_S) + 1
REQUEST = EngineRequest("r", (5, 6, 7, 8), SamplingParams(max_tokens=20, seed=1, ignore_eos=True))


def load(step_age_s: float | None = None) -> WireLoad:
    return 1, 0, 90, 100, 7, step_age_s


@pytest.fixture
async def fleet(tiny_engine: StreamEngine) -> Fleet:
    """Two names for one engine: which of them has a request matters here, not what it computes."""
    return Fleet({"a": tiny_engine, "b": tiny_engine})


@pytest.fixture
async def watchdog(fleet: Fleet) -> AsyncIterator[Watchdog]:
    """Has heard one heartbeat of each replica; ticks only when told to."""
    fleet.replicas.publish({name: {"stall_timeout_s": STALL_TIMEOUT_S} for name in fleet.engines})
    watchdog = Watchdog(fleet, fleet.replicas)
    watchdog.tick()
    for name in fleet.engines:
        fleet.heart(name).put_nowait(load())
    await until(lambda: set(fleet.replicas.loads()) == set(fleet.engines))
    yield watchdog
    task = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def start(fleet: Fleet) -> "asyncio.Task[list[Told]]":
    """A request that hangs after a few items, on replica a."""
    fleet.faults = [Fault(3, None)]
    task = asyncio.create_task(told(fleet.failover, REQUEST))
    await until(lambda: fleet.num_hanging == 1)
    return task


async def test_a_silent_replica_loses_its_requests_until_it_is_heard(fleet: Fleet, watchdog: Watchdog) -> None:
    expected = await told(Fleet(fleet.engines).failover, REQUEST)
    task = await start(fleet)
    for _ in range(TICKS_OF_SILENCE - 1):
        watchdog.tick()
    assert "a" in fleet.routable()
    fleet.heart("b").put_nowait(load())
    await until(fleet.heart("b").empty)
    watchdog.tick()
    assert "a" not in fleet.routable()
    assert "b" in fleet.routable()
    assert [choice.token_ids for choice in await task] == [choice.token_ids for choice in expected]
    assert [reason for reason, _ in fleet.losses] == [LossReason.STALLED]
    fleet.heart("a").put_nowait(load())
    await until(lambda: "a" in fleet.routable())


async def test_a_step_that_does_not_end(fleet: Fleet, watchdog: Watchdog) -> None:
    task = await start(fleet)
    fleet.heart("a").put_nowait(load(STALL_TIMEOUT_S - 0.1))
    await until(fleet.heart("a").empty)
    watchdog.tick()
    assert "a" in fleet.routable()
    fleet.heart("a").put_nowait(load(STALL_TIMEOUT_S + 0.1))
    await until(fleet.heart("a").empty)
    watchdog.tick()
    await task
    assert [name for _, name in fleet.placed] == ["a", "b"]
    fleet.heart("a").put_nowait(load(STALL_TIMEOUT_S + 1.1))
    await until(fleet.heart("a").empty)
    assert "a" not in fleet.routable()
    fleet.heart("a").put_nowait(load(0.1))
    await until(lambda: "a" in fleet.routable())


async def test_each_replica_says_how_long_its_steps_may_take_and_false_alarms_are_told(fleet: Fleet) -> None:
    alarms: list[None] = []
    watchdog = Watchdog(fleet, fleet.replicas, on_false_alarm=lambda: alarms.append(None))
    fleet.replicas.publish({"a": {"stall_timeout_s": 60.0}, "b": {}})
    listening = asyncio.create_task(watchdog.run())
    for name in "ab":
        fleet.heart(name).put_nowait(load(30.0))
    await until(lambda: len(fleet.replicas.loads()) == 2)
    watchdog.tick()
    assert fleet.routable() == ["a"]
    assert not alarms
    for name in "ab":
        fleet.heart(name).put_nowait(load())
    await until(lambda: len(fleet.routable()) == 2)
    assert len(alarms) == 1
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_a_replica_that_is_being_stopped_hands_its_requests_over(fleet: Fleet, watchdog: Watchdog) -> None:
    task = await start(fleet)
    fleet.replicas.publish({"b": {}})
    watchdog.tick()
    await asyncio.sleep(0.01)
    assert not fleet.losses, "it may only be changing its configuration"
    watchdog.tick()
    await task
    assert [reason for reason, _ in fleet.losses] == [LossReason.LEFT]
    assert [name for _, name in fleet.placed] == ["a", "b"]
    assert [replica.replica_id for replica in fleet.replicas.replicas()] == ["b"]


async def test_alone_it_keeps_them_until_another_one_comes(fleet: Fleet, watchdog: Watchdog) -> None:
    task = await start(fleet)
    fleet.replicas.publish({})
    for _ in range(3 * TICKS_OF_SILENCE):
        watchdog.tick()
    await asyncio.sleep(0.01)
    assert not fleet.losses
    fleet.replicas.publish({"b": {}})
    watchdog.tick()
    await asyncio.sleep(0.01)
    assert not fleet.losses, "the other one has not been heard yet"
    fleet.heart("b").put_nowait(load())
    await until(fleet.heart("b").empty)
    watchdog.tick()
    await task
    assert [reason for reason, _ in fleet.losses] == [LossReason.LEFT]


@pytest.mark.parametrize("why", [LossReason.UNAVAILABLE, LossReason.ENGINE_DIED])
async def test_a_link_that_ends(fleet: Fleet, watchdog: Watchdog, why: LossReason) -> None:
    task = await start(fleet)
    fleet.heart("a").put_nowait(why)
    await until(lambda: "a" not in fleet.routable())
    await task
    assert [name for _, name in fleet.placed] == ["a", "b"]
    assert fleet.losses[0][0] is why
    fleet.replicas.trust("a")
    assert "a" in fleet.routable()


async def test_a_replica_that_has_just_left_is_no_suspect(fleet: Fleet, watchdog: Watchdog) -> None:
    fleet.heart("a").put_nowait(LossReason.LEFT)
    await until(fleet.heart("a").empty)
    assert "a" in fleet.routable()


async def test_a_replica_that_leaves_is_heard_until_its_last_attempt_is_over(fleet: Fleet, watchdog: Watchdog) -> None:
    task = await start(fleet)
    fleet.replicas.publish({"b": {}})
    watchdog.tick()
    fleet.heart("a").put_nowait(load())
    await until(fleet.heart("a").empty)
    watchdog.tick()
    await task
    assert [reason for reason, _ in fleet.losses] == [LossReason.LEFT]
    watchdog.tick()
    await asyncio.sleep(0)
    fleet.heart("a").put_nowait(load())
    await asyncio.sleep(0.01)
    assert not fleet.heart("a").empty()


async def test_what_no_replica_could_take_is_routed_again(fleet: Fleet, watchdog: Watchdog) -> None:
    fleet.replicas.publish({"c": {}})
    task = asyncio.create_task(told(fleet.failover, REQUEST))
    await until(lambda: len(fleet.requests) == 1)
    for _ in range(TICKS_OF_SILENCE):
        watchdog.tick()
    await asyncio.sleep(0.01)
    assert len(fleet.requests) == 1, "it waits for room while there is a replica"
    fleet.replicas.publish({})
    for _ in range(TICKS_OF_SILENCE):
        assert not fleet.placed
        watchdog.tick()
    fleet.replicas.publish({"a": {}})
    await task
    assert [name for _, name in fleet.placed] == ["a"]
    assert not fleet.losses


async def test_a_replica_that_leaves_keeps_what_only_its_revision_can_continue(
    fleet: Fleet, watchdog: Watchdog
) -> None:
    task = await start(fleet)
    fleet.replicas.publish({"a": {"revision": "old"}, "b": {"revision": "new"}})
    fleet.replicas.publish({"b": {"revision": "new"}})
    for _ in range(3 * TICKS_OF_SILENCE):
        fleet.heart("b").put_nowait(load())
        await until(fleet.heart("b").empty)
        watchdog.tick()
    await asyncio.sleep(0.01)
    assert not fleet.losses
    assert [name for _, name in fleet.placed] == ["a"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reserved_replica_sends_its_streams_away(fleet: Fleet, watchdog: Watchdog) -> None:
    task = await start(fleet)
    fleet.replicas.reserve("a")
    watchdog.tick()
    await task
    assert [reason for reason, _ in fleet.losses] == [LossReason.QUARANTINE]
    assert [name for _, name in fleet.placed] == ["a", "b"]
