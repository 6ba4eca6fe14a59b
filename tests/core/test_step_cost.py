import pytest

from serve_app.core.step_cost import ModelCost
from serve_app.core.step_plan import ScheduledRequest


def row(start: int, count: int, samples: bool, drafts: tuple[int, ...] = ()) -> ScheduledRequest:
    return ScheduledRequest(0, "r", 0, start, count, (), samples, not samples, drafts)


@pytest.mark.parametrize(
    ("rows", "num_bytes", "num_flops"),
    [
        ([row(9, 1, True)], 1000 + 10 * 10, 2 * (100 + 7) + 3 * 10),
        # A chunk's queries see 5, 6 and 7 keys; nothing is sampled.
        ([row(4, 3, False)], 1000 + 10 * 7, 2 * 3 * 100 + 3 * (5 + 6 + 7)),
        ([row(9, 3, True, (1, 2))], 1000 + 10 * 12, 2 * 3 * (100 + 7) + 3 * (10 + 11 + 12)),
        ([row(9, 1, True), row(0, 2, True)], 1000 + 10 * 12, 2 * (3 * 100 + 2 * 7) + 3 * (10 + 1 + 2)),
    ],
)
def test_a_step_reads_the_weights_once_and_every_rows_keys(
    rows: list[ScheduledRequest], num_bytes: int, num_flops: int
) -> None:
    cost = ModelCost(weight_bytes=1000, kv_bytes=10, layer_weights=100, head_weights=7, pair_flops=3)
    assert cost.of(rows) == (num_bytes, num_flops)
