"""Two replicas that die one after another: who is interrupted, and where the others' streams go.
Real links."""

import asyncio

from load_tests.chaos.two_deaths import SLOTS, Stream, open_fleet
from serve_app.fleet.loss import LossReason
from tests.fleet.replicas import until

REPLICAS, STREAMS, TOKENS = 8, 200, 400
LEFT = (REPLICAS - 2) * SLOTS


async def test_two_deaths_interrupt_only_who_was_there_and_leave_no_slots_empty() -> None:
    streams = [Stream() for _ in range(STREAMS)]
    async with asyncio.timeout(120), open_fleet(REPLICAS, step_s=0.05) as fleet:
        reading = [asyncio.create_task(fleet.read(i, TOKENS, stream)) for i, stream in enumerate(streams)]
        await until(lambda: all(stream.token_ids for stream in streams))
        assert fleet.running == STREAMS

        lost = fleet.engines["0"].running
        fleet.kill("0")
        await until(lambda: fleet.running == STREAMS)
        lost += fleet.engines["1"].running
        fleet.kill("1")
        await until(lambda: fleet.running == LEFT)
        await until(lambda: len(fleet.replicas.waiting) == STREAMS - LEFT)
        assert fleet.waiting == 0, "what has no slot waits at the ingress"

        fleet.replace("0")
        await fleet.add("8")
        await until(lambda: fleet.running == STREAMS)
        assert fleet.waiting == 0
        assert fleet.losses == {LossReason.UNAVAILABLE: lost}
        assert not any(replica.reserved for replica in fleet.replicas.replicas())
        assert all(len(set(stream.visited)) == len(stream.visited) for stream in streams)
        assert all(name in "01" for stream in streams for name in stream.visited)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    assert all(stream.token_ids == list(range(len(stream.token_ids))) for stream in streams)
