"""Which sampled stacks count as failover's."""

import pytest

from load_tests.chaos.profile_share import failover_function

LOOP = "<module> (main.py:1);run_forever (asyncio/base_events.py:608)"
RAY = "_next (ray/serve/_private/replica_result.py:80)"


@pytest.mark.parametrize(
    ("frames", "function"),
    [
        (["generate (serve_app/serving/failover.py:80)", "accept (serve_app/serving/journal.py:60)"], "journal.accept"),
        (
            ["_next_item (serve_app/serving/attempt.py:150)", "__aenter__ (asyncio/timeouts.py:70)"],
            "attempt._next_item",
        ),
        (["feed (/site-packages/serve_app/serving/replica.py:90)"], "replica.feed"),
        (["_next_item (serve_app/serving/attempt.py:150)", RAY], None),
        (["generate (serve_app/serving/failover.py:80)", "unpack_item (serve_app/serving/wire.py:60)"], None),
        (["generate (serve_app/serving/replica.py:80)"], None),
        ([RAY], None),
        ([], None),
    ],
)
def test_the_innermost_frame_of_ours_decides(frames: list[str], function: str | None) -> None:
    assert failover_function(";".join([LOOP, *frames])) == function
