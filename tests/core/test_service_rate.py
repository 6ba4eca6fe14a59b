import math

import pytest

from serve_app.core.service_rate import RetryAfter, ServiceRate


def test_the_rate_counts_only_while_every_place_is_taken() -> None:
    rate = ServiceRate()
    rate.taken(0, 0.0)
    rate.ended(1, 500.0)
    assert (rate.per_slot(500.0), rate.known) == (1.0, False)
    rate.taken(4, 1000.0)
    for second in range(1, 500):
        rate.ended(2, 1000.0 + second)
    assert rate.known
    assert rate.per_slot(1499.0) == pytest.approx(0.5, rel=0.02)  # two a second from four slots
    rate.taken(0, 1499.0)
    assert rate.per_slot(9999.0) == rate.per_slot(1499.0)
    rate.taken(4, 9999.0)
    assert rate.per_slot(10999.0) < 0.25, "nothing ends any more"


def test_before_anything_has_ended_the_running_ones_are_taken_to_be_half_done() -> None:
    rate = ServiceRate()
    rate.taken(10, 0.0)
    assert rate.per_slot(0.0) == 1.0
    assert rate.per_slot(50.0) == pytest.approx(1 / 100, rel=0.02)


@pytest.mark.parametrize(("estimate", "low", "high"), [(20.0, 16, 24), (0.1, 1, 1), (1e5, 40, 60), (math.inf, 40, 60)])
def test_retry_after_is_spread_and_bounded(estimate: float, low: float, high: float) -> None:
    retry_after = RetryAfter()
    told = [retry_after.spread(estimate) for _ in range(200)]
    assert low <= min(told) <= max(told) <= high


def test_a_burst_of_refusals_does_not_come_back_as_a_burst() -> None:
    retry_after = RetryAfter()
    told = [math.floor(retry_after.spread(1000.0)) for _ in range(400)]
    # 20 seconds, from 40 to 60
    assert max(told.count(second) for second in range(61)) <= 1.5 * 400 / 20
