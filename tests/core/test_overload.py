"""The whole queue simulated at ten times its capacity, with clients that come back when they are
told to."""

from typing import Any

import pytest

from tests.core.simulated_server import SimulatedServer


@pytest.mark.parametrize(
    ("setup", "clients"),
    [
        ({"slots": 16, "max_queued": 64, "service_s": 8.0}, ["a"]),
        ({"slots": 16, "max_queued": 64, "service_s": 8.0}, [f"client {i}" for i in range(4)]),
        ({"slots": 8, "max_queued": 64, "service_s": 4.0}, ["a"]),
        ({"slots": 32, "max_queued": 32, "service_s": 8.0, "return_part": 0.0}, ["a"]),
    ],
    ids=["one client", "four clients", "few slots", "no client returns"],
)
def test_ten_times_the_capacity_leaves_no_place_idle_and_no_client_behind(
    setup: dict[str, Any], clients: list[str]
) -> None:
    seconds = 240
    server = SimulatedServer(**setup)
    for client in clients:
        server.arrivals(client, 10 * server.capacity / len(clients), until=seconds)
    server.run(until=seconds)
    assert server.idle_slot_s <= 0.05 * server.slots * seconds
    assert len(server.retry_after_s) > seconds
    assert 1 <= min(server.retry_after_s) <= max(server.retry_after_s) <= 60
    shares = [server.ended[client] for client in clients]
    assert min(shares) >= 0.8 * max(shares)


def test_a_greedy_client_does_not_delay_a_modest_one() -> None:
    server = SimulatedServer(slots=16, max_queued=64, service_s=8.0)
    server.arrivals("greedy", 10 * server.capacity, until=240)
    server.arrivals("modest", 0.3 * server.capacity, until=240)
    server.run(until=240)
    assert server.refused["modest"] == 0
    assert max(server.waits["modest"]) < 0.5 * 64 / server.capacity
    assert server.ended["modest"] >= 0.25 * server.capacity * 240


def test_after_a_flood_of_clients_that_vanished_an_honest_one_has_the_whole_queue() -> None:
    server = SimulatedServer(slots=4, max_queued=128, service_s=1.0, return_part=0.0)
    for i in range(500):
        server.arrive(f"flood {i}")
    assert sum(server.refused.values()) == 500 - 4 - 128
    server.run(until=120.0)
    assert server.queue.ongoing == server.queue.queued == 0
    for _ in range(4 + 128):
        server.arrive("honest")
    assert server.refused["honest"] == 0
