"""A replica's process above its model: its tasks and frames do not grow with the streams."""

from load_tests.bench.stub_engine import STREAMS, experiment


async def test_a_replica_has_as_many_tasks_with_one_stream_as_with_256() -> None:
    costs = await experiment(step_s=0.01, seconds=0.5)
    assert [cost.streams for cost in costs] == list(STREAMS)
    assert {cost.tasks for cost in costs} == {1}, "what waits for the end of the process"
    assert all(cost.tokens_per_s > cost.streams for cost in costs)
    assert all(cost.frames_per_s < cost.tokens_per_s for cost in costs if cost.streams > 1)
