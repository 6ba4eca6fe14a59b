"""Tickets in an event loop: turns, cancellation, deadlines. Bounds and refusals are
`tests/core`'s."""

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.admission import AsyncAdmissionQueue, Caller, Ticket
from serve_app.errors import InvalidRequestError, OverloadedError, RequestTimeoutError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def caller(name: str, priority: int = 0) -> Caller:
    return Caller((name, ""), priority)


async def test_turns_come_in_order_of_arrival() -> None:
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=3)
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
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=2)
    taken = [queue.reserve()[0] for _ in range(2)]
    with pytest.raises(OverloadedError):
        queue.reserve(2)
    assert (queue.ongoing, queue.queued) == (1, 1)
    for ticket in taken:
        ticket.close()
    assert (queue.ongoing, queue.queued) == (0, 0)


@pytest.mark.parametrize("ends", ["released", "reclaimed"])
async def test_slots_that_are_not_needed_for_a_while_go_to_others(ends: str) -> None:
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=3)
    [first], [second], [third] = queue.reserve(), queue.reserve(), queue.reserve()
    second.release()  # it has none yet
    second.reclaim()
    async with first:
        first.release()
        first.release()
        async with asyncio.timeout(30), second:
            assert (queue.ongoing, queue.queued) == (1, 1)
            if ends == "reclaimed":
                first.reclaim()
                first.reclaim()
                assert queue.ongoing == 2
        assert third.turn.done() == (ends == "released")
    third.close()
    assert (queue.ongoing, queue.queued) == (0, 0)


async def test_leaving_while_queued_frees_the_entry_and_keeps_the_order() -> None:
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=2)
    [first], [second], [third] = queue.reserve(), queue.reserve(), queue.reserve()
    waiting = asyncio.create_task(second.__aenter__())
    await asyncio.sleep(0)
    waiting.cancel()
    second.close()
    second.close()
    assert queue.queued == 1
    first.close()
    first.close()
    await third.turn
    assert (queue.ongoing, queue.queued) == (1, 0)


async def test_a_turn_that_comes_to_a_cancelled_waiter_is_passed_on() -> None:
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=2)
    [first], [second], [third] = queue.reserve(), queue.reserve(), queue.reserve()

    async def use() -> None:
        try:
            async with second:
                pass
        finally:
            second.close()

    waiting = asyncio.create_task(use())
    await asyncio.sleep(0)
    waiting.cancel()
    first.close()  # grants `second` before its task has seen the cancellation
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await third.turn
    assert queue.ongoing == 1


async def test_a_waiter_is_told_at_its_deadline_and_leaves() -> None:
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=2)
    queue.reserve()
    [late] = queue.reserve(caller=Caller(deadline=queue.clock() + 0.01))
    with pytest.raises(RequestTimeoutError, match="in the queue"):
        async with late:
            pass
    late.close()
    assert (queue.ongoing, queue.queued) == (1, 0)


async def test_a_turn_before_the_deadline_is_kept() -> None:
    clock = Clock()
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=2, clock=clock)
    [ticket] = queue.reserve(caller=Caller(deadline=1.0))
    clock.now = 2.0
    async with ticket:  # running requests are ended by whoever runs them
        assert ticket.waited_s == 0


async def test_capacity_follows_the_replicas() -> None:
    queue = AsyncAdmissionQueue(max_ongoing=2, max_queued=10)
    tickets = [queue.reserve()[0] for _ in range(6)]

    def turns() -> list[bool]:
        return [ticket.turn.done() for ticket in tickets]

    queue.set_capacity(4)
    assert turns() == [True] * 4 + [False] * 2
    queue.set_capacity(0)
    for ticket in tickets[:4]:
        ticket.close()
    assert (queue.ongoing, turns()[4:]) == (0, [False] * 2)
    queue.set_capacity(1)
    assert turns()[4:] == [True, False]


async def test_a_full_queue_takes_those_who_have_less_of_it() -> None:
    queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=4)
    greedy = [queue.reserve(caller=caller("greedy"))[0] for _ in range(5)]
    modest = [queue.reserve(caller=caller("modest"))[0] for _ in range(2)]
    for client in ("greedy", "modest"):
        with pytest.raises(OverloadedError):
            queue.reserve(caller=caller(client))
    assert queue.queued == 4
    for newest in greedy[3:]:
        with pytest.raises(OverloadedError) as refused:
            async with newest:
                pass
        newest.close()
        assert refused.value.code == "queue_share"
        assert refused.value.retry_after_s is not None
    order: list[Ticket] = []
    waiting = [*greedy[:3], *modest]
    while waiting:
        [turn] = [ticket for ticket in waiting if ticket.turn.done()]
        waiting.remove(turn)
        order.append(turn)
        turn.close()
    assert order == [greedy[0], greedy[1], modest[0], greedy[2], modest[1]]
    assert (queue.ongoing, queue.queued) == (0, 0)


async def test_priority_counts_only_where_the_operator_says_so() -> None:
    for by_priority in (False, True):
        queue = AsyncAdmissionQueue(max_ongoing=1, max_queued=2, by_priority=by_priority)
        [running], [low] = queue.reserve(), queue.reserve(caller=caller("a", priority=5))
        [high] = queue.reserve(caller=caller("a", priority=-5))
        running.close()
        assert (high.turn.done(), low.turn.done()) == (by_priority, not by_priority)


class Plan:
    """A random life of a queue: `hypothesis` draws who comes, who leaves or ends, and what becomes
    of the capacity."""

    def __init__(self, max_ongoing: int, max_queued: int) -> None:
        self.clock = Clock()
        self.queue = AsyncAdmissionQueue(max_ongoing, max_queued, by_priority=True, clock=self.clock)
        self.max_ongoing = self.most_ongoing = max_ongoing
        self.held: list[Ticket] = []

    def arrive(self, client: int, count: int, cost: int, priority: int) -> None:
        with contextlib.suppress(OverloadedError, InvalidRequestError):
            self.held += self.queue.reserve(count, cost, caller(str(client), priority))

    def set_capacity(self, max_ongoing: int) -> None:
        self.queue.set_capacity(max_ongoing)
        self.max_ongoing = max_ongoing
        self.most_ongoing = max(self.most_ongoing, max_ongoing)

    def leave(self, which: int) -> None:
        if self.held:
            self.held.pop(which % len(self.held)).close()

    def check(self) -> None:
        queue = self.queue
        ongoing = [ticket for ticket in self.held if ticket.granted_at is not None]
        waiting = [ticket for ticket in self.held if not ticket.turn.done()]
        evicted = [ticket for ticket in self.held if ticket.refusal is not None]
        assert len(ongoing) + len(waiting) + len(evicted) == len(self.held)
        assert queue.ongoing == sum(ticket.entry.cost for ticket in ongoing)
        assert queue.queued == sum(ticket.entry.cost for ticket in waiting)
        assert not waiting or queue.ongoing >= self.max_ongoing
        last = max((ticket.entry.cost for ticket in ongoing), default=0)
        assert queue.ongoing < self.most_ongoing + max(last, 1)


STEP = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, 3), st.integers(1, 3), st.integers(1, 4), st.integers(0, 1)),
    st.tuples(st.just("leave"), st.integers(0, 99)),
    st.tuples(st.just("capacity"), st.integers(0, 6)),
    st.tuples(st.just("time"), st.integers(0, 30)),
)


@given(st.integers(0, 5), st.integers(0, 12), st.lists(STEP, max_size=60))
def test_no_place_is_lost_or_idle_whoever_leaves_when(
    max_ongoing: int, max_queued: int, steps: list[tuple[Any, ...]]
) -> None:
    async def live() -> None:
        plan = Plan(max_ongoing, max_queued)
        for kind, *arguments in steps:
            match kind:
                case "arrive":
                    plan.arrive(*arguments)
                case "leave":
                    plan.leave(*arguments)
                case "capacity":
                    plan.set_capacity(*arguments)
                case _:
                    plan.clock.now += arguments[0]
            plan.check()
        plan.queue.set_capacity(1)
        for ticket in plan.held:
            ticket.close()
        assert (plan.queue.ongoing, plan.queue.queued) == (0, 0)
        plan.clock.now += 1e6
        [ticket] = plan.queue.reserve()
        assert ticket.turn.done()

    asyncio.run(live())
