"""The queue's bounds, refusals and estimates; the order of its lines is `test_fair_queue`'s."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.core.admission_queue import AdmissionQueue
from serve_app.core.fair_queue import Entry
from serve_app.errors import InvalidRequestError, OverloadedError

Queue = AdmissionQueue[Entry]


def add(queue: Queue, count: int = 1, cost: int = 1, client: str = "a", wait: float = math.inf) -> Entry:
    """At time 0; everybody who can goes on."""
    entry = Entry((client, ""), cost, count)
    queue.add(entry, wait, 0.0)
    queue.admit(0.0)
    return entry


def refusal(queue: Queue, count: int = 1, cost: int = 1, client: str = "a", wait: float = math.inf) -> OverloadedError:
    before = queue.ongoing, queue.queued
    with pytest.raises(OverloadedError) as refused:
        add(queue, count, cost, client, wait)
    assert (queue.ongoing, queue.queued) == before, "all or nothing"
    return refused.value


def busy_queue(max_ongoing: int, max_queued: int, seconds_each: float) -> Queue:
    """With all slots taken up to time 0, for so long that the rate is known."""
    queue: Queue = AdmissionQueue(max_ongoing, max_queued)
    now = -300 * seconds_each
    for _ in range(300):
        entry = Entry(("a", ""), remaining=max_ongoing)
        queue.add(entry, math.inf, now)
        queue.admit(now)
        now += seconds_each
        for _ in range(max_ongoing):
            queue.end(entry, now)
    return queue


def test_what_never_fits_is_not_told_to_retry() -> None:
    queue: Queue = AdmissionQueue(max_ongoing=1, max_queued=2)
    queue.set_capacity(0)  # the replica is being replaced
    with pytest.raises(InvalidRequestError, match="at most 3"):
        add(queue, 4)
    add(queue)
    add(queue)


def test_choices_count_and_a_request_of_more_than_there_is_starts_all_the_same() -> None:
    queue: Queue = AdmissionQueue(max_ongoing=4, max_queued=6)
    large = add(queue, cost=6)
    assert queue.ongoing == 6
    small, huge, middle = add(queue), add(queue, cost=3), add(queue, cost=2)
    refusal(queue)
    queue.end(large, 0.0)
    assert queue.admit(0.0) == [small, huge]
    for entry in (small, huge):
        queue.end(entry, 0.0)
    assert queue.admit(0.0) == [middle]
    queue.end(middle, 0.0)
    add(queue, cost=100)
    refusal(queue, cost=5)
    assert (queue.ongoing, queue.queued) == (100, 0)


def test_who_leaves_makes_room() -> None:
    queue: Queue = AdmissionQueue(max_ongoing=1, max_queued=2)
    add(queue)
    waiting, _ = add(queue), add(queue)
    refusal(queue)
    queue.withdraw(waiting)
    add(queue)
    assert (queue.ongoing, queue.queued) == (1, 2)


def test_a_lent_place_is_anothers_until_it_is_taken_back() -> None:
    queue: Queue = AdmissionQueue(max_ongoing=2, max_queued=9)
    first, second = add(queue, cost=2), add(queue)
    assert (queue.ongoing, queue.queued) == (2, 1)
    queue.release(first)
    assert queue.admit(0.0) == [second]
    queue.reclaim(first)
    third = add(queue)
    assert (queue.ongoing, queue.queued) == (3, 1)
    queue.end(first, 0.0)
    assert queue.admit(0.0) == [third]


def test_the_newest_of_the_longest_line_gives_way() -> None:
    queue: Queue = AdmissionQueue(max_ongoing=1, max_queued=4)
    greedy = [add(queue, client="greedy") for _ in range(5)]
    for expected in greedy[:2:-1]:
        [(evicted, why)] = queue.add(Entry(("modest", "")), math.inf, 0.0)
        assert (evicted, why.code) == (expected, "queue_share")
        assert why.retry_after_s
    assert refusal(queue, client="modest").code == refusal(queue, client="greedy").code == "queue_full"
    assert queue.queued == 4


def test_what_cannot_be_in_time_is_refused_at_once() -> None:
    # two slots: one turn every two seconds
    queue = busy_queue(max_ongoing=2, max_queued=100, seconds_each=4.0)
    add(queue, 2 + 10)
    refused = refusal(queue, wait=19)
    assert (refused.message, refused.code) == (
        "the request would wait about 20 seconds, but its timeout leaves 19",
        "wait_exceeds_timeout",
    )
    assert refused.retry_after_s == 1
    assert add(queue, wait=21)
    assert add(queue, client="modest", wait=3)  # its turn is the next but one


def test_retry_after_is_the_time_in_which_the_queue_is_served() -> None:
    queue = busy_queue(max_ongoing=2, max_queued=10, seconds_each=4.0)
    for count in (2, 5, 5):
        add(queue, count)
    told = [refusal(queue).retry_after_s or 0 for _ in range(100)]
    assert 15 < min(told) < 17 < 23 < max(told) < 25


@given(
    max_ongoing=st.integers(1, 8),
    max_queued=st.integers(0, 20),
    before=st.lists(st.integers(1, 3), max_size=8),
    count=st.integers(1, 20),
    cost=st.integers(1, 20),
)
def test_one_request_has_at_most_half_of_the_queue(
    max_ongoing: int, max_queued: int, before: list[int], count: int, cost: int
) -> None:
    """However its sequences are made up of prompts and choices; what goes on at once waits for
    nothing."""
    queue: Queue = AdmissionQueue(max_ongoing, max_queued)
    with contextlib.suppress(OverloadedError, InvalidRequestError):
        for each in before:
            add(queue, cost=each)
    queued, ongoing = queue.queued, queue.ongoing
    try:
        add(queue, count, cost)
    except (OverloadedError, InvalidRequestError):
        assert (queue.ongoing, queue.queued) == (ongoing, queued)
    else:
        assert queue.queued - queued <= max(math.ceil(max_queued / 2), 1)


def test_a_request_that_would_fill_the_queue_reads_how_much_it_may_have() -> None:
    queue: Queue = AdmissionQueue(max_ongoing=16, max_queued=128)
    add(queue, cost=16)
    for count, cost in ((1, 128), (128, 1), (13, 5)):
        refused = refusal(queue, count, cost)
        assert f"{count * cost} sequences of this request would wait, but at most 64" in refused.message
        assert (refused.code, bool(refused.retry_after_s)) == ("queue_share", True)
    assert add(queue, cost=64)
