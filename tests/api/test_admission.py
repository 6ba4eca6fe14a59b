import asyncio

import pytest

from serve_app.api.admission import AdmissionQueue
from serve_app.errors import InvalidRequestError, OverloadedError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_turns_come_in_order_of_arrival() -> None:
    queue = AdmissionQueue(max_ongoing=1, max_queued=3)
    order: list[int] = []

    async def request(i: int) -> None:
        [ticket] = queue.reserve()
        async with ticket:
            order.append(i)
            await asyncio.sleep(0)

    await asyncio.gather(*(request(i) for i in range(4)))
    assert order == [0, 1, 2, 3]
    assert (queue.ongoing, queue.queued) == (0, 0)


async def test_beyond_the_bound_requests_are_refused_and_nothing_is_taken() -> None:
    queue = AdmissionQueue(max_ongoing=1, max_queued=2)
    taken = [queue.reserve()[0] for _ in range(2)]
    with pytest.raises(OverloadedError):
        queue.reserve(2)
    assert (queue.ongoing, queue.queued) == (1, 1)
    taken += queue.reserve()
    with pytest.raises(OverloadedError) as refused:
        queue.reserve()
    assert refused.value.retry_after_s is not None
    for ticket in taken:
        ticket.release()
    assert len(queue.reserve(3)) == 3


async def test_what_never_fits_is_not_told_to_retry() -> None:
    with pytest.raises(InvalidRequestError, match="at most 3"):
        AdmissionQueue(max_ongoing=1, max_queued=2).reserve(4)


async def test_leaving_while_queued_frees_the_place_and_keeps_the_order() -> None:
    queue = AdmissionQueue(max_ongoing=1, max_queued=2)
    [first], [second], [third] = queue.reserve(), queue.reserve(), queue.reserve()
    waiting = asyncio.create_task(second.__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    second.release()
    second.release()
    assert queue.queued == 1
    first.release()
    first.release()
    await third.turn
    assert (queue.ongoing, queue.queued) == (1, 0)


async def test_a_turn_that_comes_to_a_cancelled_waiter_is_passed_on() -> None:
    queue = AdmissionQueue(max_ongoing=1, max_queued=2)
    [first], [second], [third] = queue.reserve(), queue.reserve(), queue.reserve()

    async def use() -> None:
        try:
            async with second:
                pass
        finally:
            second.release()

    waiting = asyncio.create_task(use())
    await asyncio.sleep(0)
    waiting.cancel()
    first.release()  # grants `second` before its task has seen the cancellation
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await third.turn
    assert queue.ongoing == 1


async def test_retry_after_is_the_backlog_over_the_rate() -> None:
    clock = Clock()
    queue = AdmissionQueue(max_ongoing=2, max_queued=10, clock=clock)
    for _ in range(50):  # each request takes 4 s, two at a time: one place every 2 s
        tickets = queue.reserve(2)
        clock.now += 4.0
        for ticket in tickets:
            ticket.release()
    queue.reserve(2 + 9)
    assert queue.retry_after_s() == pytest.approx(10 * 2.0)
