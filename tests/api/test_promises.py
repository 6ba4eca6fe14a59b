"""Return times that hold: the book alone, and the whole queue simulated at ten times its capacity."""

import math
from typing import Any

import pytest

from serve_app.api.promises import MAX_WAIT_S, PromiseBook, ServiceRate
from tests.api.overload import Simulation


def name(number: int) -> bytes:
    return b"%d" % number


def test_return_times_are_spaced_by_the_service_rate() -> None:
    book = PromiseBook()
    waits = [book.make("a", name(i), cost=1, missing=0, rate=4.0, now=0.0) for i in range(400)]
    assert all(wait == int(wait) >= 1 for wait in waits)
    for seconds in (10, 30, 60, 90):
        returning = sum(wait <= seconds for wait in waits)
        assert returning <= 4.0 * seconds
        assert seconds < 20 or returning >= 4.0 * 0.9 * (seconds - 10)


def test_a_burst_of_refusals_does_not_come_back_as_bursts() -> None:
    book = PromiseBook()
    waits = [book.make("a", name(i), cost=1, missing=0, rate=100.0, now=0.0) for i in range(4000)]
    assert max(waits.count(second) for second in range(60)) <= 120


def test_a_promise_is_kept_from_its_time_on_once_and_for_nobody_else() -> None:
    book = PromiseBook()
    wait = book.make("a", b"x", cost=3, missing=0, rate=1.0, now=100.0)
    assert book.held(100.0) == 3
    assert not book.redeem(b"x", 100.0 + wait - 0.01)
    assert not book.redeem(b"y", 100.0 + wait)
    assert book.redeem(b"x", 100.0 + wait)
    assert not book.redeem(b"x", 100.0 + wait)
    assert (book.held(100.0 + wait), book.outstanding) == (0, 0)


def test_places_are_held_about_the_return_time_only() -> None:
    book = PromiseBook()
    wait = book.make("a", b"x", cost=2, missing=1000, rate=10.0, now=0.0)
    assert [book.held(at) for at in (0.0, wait - 11, wait - 9, wait + 14)] == [0, 0, 2, 2]
    assert (book.held(wait + 16), book.outstanding, book.lapsed) == (0, 0, 1)
    assert not book.redeem(b"x", wait + 16)


def test_the_same_request_refused_twice_is_promised_two_places() -> None:
    book = PromiseBook()
    waits = sorted(book.make("a", b"x", cost=1, missing=0, rate=0.1, now=0.0) for _ in range(2))
    assert waits[0] < waits[1]
    assert book.redeem(b"x", waits[0])
    assert not book.redeem(b"x", waits[0])
    assert book.redeem(b"x", waits[1])


def test_promises_of_the_same_moment_are_told_apart() -> None:
    """The same bytes sent to both endpoints: one identity, two costs, and by chance one return time."""
    book = PromiseBook()
    waits = {cost: book.make("a", b"x", cost, missing=0, rate=1e6, now=0.0) for cost in (1, 4)}
    assert waits == {1: 1.0, 4: 1.0}
    assert book.held(1.0) == 5
    assert book.redeem(b"x", 1.0)
    assert book.held(1.0) == 4
    assert book.held(100.0) == book.outstanding == 0


def test_memory_is_bounded_and_no_client_takes_all_of_it() -> None:
    book = PromiseBook(max_promised=1000)
    greedy = sum(book.make("greedy", name(i), 1, 0, 1e3, 0.0) < math.inf for i in range(5000))
    assert (greedy, book.outstanding) == (500, 500)
    modest = sum(book.make("modest", b"m%d" % i, 1, 0, 1e3, 0.0) < math.inf for i in range(5000))
    assert modest == 250
    assert book.held(1000.0) == book.outstanding == 0
    assert book.lapsed == 750


def test_nobody_is_told_to_come_back_after_hours() -> None:
    book = PromiseBook()
    waits = [book.make("a", name(i), 1, 0, rate=0.1, now=0.0) for i in range(1000)]
    assert max(wait for wait in waits if wait < math.inf) <= MAX_WAIT_S
    assert waits.count(math.inf) > 600


def test_a_client_with_few_promises_does_not_return_after_one_with_many() -> None:
    book = PromiseBook()
    for i in range(600):
        book.make("greedy", name(i), 1, 0, 1.0, 0.0)
    assert book.make("modest", b"m", 1, 0, 1.0, 0.0) <= 5


def test_the_rate_counts_only_while_every_place_is_taken() -> None:
    rate = ServiceRate()
    rate.taken(0, 0.0)
    rate.ended(1, 500.0)
    assert (rate.per_place(500.0), rate.known) == (1.0, False)
    rate.taken(4, 1000.0)
    for second in range(1, 500):
        rate.ended(2, 1000.0 + second)
    assert rate.known
    assert rate.per_place(1499.0) == pytest.approx(0.5, rel=0.02)  # two a second from four places
    rate.taken(0, 1499.0)
    assert rate.per_place(9999.0) == rate.per_place(1499.0)
    rate.taken(4, 9999.0)
    assert rate.per_place(10999.0) < 0.25, "nothing ends any more"


def test_before_anything_has_ended_the_running_ones_are_taken_to_be_half_through() -> None:
    rate = ServiceRate()
    rate.taken(10, 0.0)
    assert rate.per_place(0.0) == 1.0
    assert rate.per_place(50.0) == pytest.approx(1 / 100, rel=0.02)


@pytest.mark.parametrize(
    ("server", "clients"),
    [
        ({"places": 32, "max_queued": 128, "service_s": 8.0}, ["a"]),
        ({"places": 32, "max_queued": 128, "service_s": 8.0}, [f"client {i}" for i in range(10)]),
        ({"places": 8, "max_queued": 64, "service_s": 1.0}, ["a"]),
        ({"places": 32, "max_queued": 32, "service_s": 8.0, "late_s": 3.0}, ["a"]),
    ],
    ids=["one client", "ten clients", "fast", "small queue, late clients"],
)
async def test_at_ten_times_the_capacity_those_who_come_back_in_time_are_taken(
    server: dict[str, Any], clients: list[str]
) -> None:
    """They come back among ten times as many newcomers as there are places; and no place is idle for their sake."""
    seconds = 240
    simulation = Simulation(**server)
    for client in clients:
        simulation.arrivals(client, 10 * simulation.capacity / len(clients), until=seconds)
    await simulation.run(until=seconds)
    taken, refused = simulation.returns[True], simulation.returns[False]
    assert taken > 0.5 * simulation.capacity * seconds
    assert taken >= 0.8 * (taken + refused)
    assert simulation.idle_place_s <= 0.05 * simulation.places * seconds
    shares = [simulation.ended[client] for client in clients]
    assert min(shares) >= 0.8 * max(shares)


async def test_promises_that_nobody_redeems_cost_nothing() -> None:
    simulation = Simulation(places=32, max_queued=32, service_s=8.0, return_part=0.0)
    simulation.arrivals("a", 10 * simulation.capacity, until=240)
    await simulation.run(until=240)
    assert simulation.queue.promises.lapsed > 100
    assert simulation.idle_place_s <= 0.05 * simulation.places * 240


async def test_a_greedy_client_does_not_delay_a_modest_one() -> None:
    simulation = Simulation(places=32, max_queued=128, service_s=8.0)
    simulation.arrivals("greedy", 10 * simulation.capacity, until=240)
    simulation.arrivals("modest", 0.3 * simulation.capacity, until=240)
    await simulation.run(until=240)
    assert simulation.refused["modest"] == 0
    assert max(simulation.waits["modest"]) < 0.5 * 128 / simulation.capacity
    assert simulation.ended["modest"] >= 0.25 * simulation.capacity * 240
