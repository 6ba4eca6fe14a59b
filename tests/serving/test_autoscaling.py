"""The autoscaling rule: what holds for every load, what a few loads mean, and how the policies read
Serve's figures."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.serving.autoscaling import EnginePolicy, FleetLoad, IngressPolicy, desired_replicas

SLOTS = 16


@st.composite
def loads(draw: st.DrawFn) -> FleetLoad:
    """Any fleet: the pools in use may be few or many for what runs."""
    running = draw(st.floats(0, 2000))
    return FleetLoad(
        queued=draw(st.floats(0, 5000)),
        waiting=draw(st.floats(0, 2000)),
        running=running,
        kv_pools=draw(st.floats(0, 64)) if running else 0.0,
    )


replicas = st.integers(1, 64)


def demand(load: FleetLoad) -> float:
    return load.queued + load.waiting + load.running


@given(loads(), replicas)
def test_the_answer_stays_when_it_has_been_followed(load: FleetLoad, present: int) -> None:
    """No load calls replicas and sends them away again."""
    answer = desired_replicas(load, present, SLOTS)
    assert answer >= 1
    assert desired_replicas(load, answer, SLOTS) == answer


@given(loads(), replicas)
def test_more_come_only_if_too_many_wait_and_then_everybody_has_a_slots(load: FleetLoad, present: int) -> None:
    answer = desired_replicas(load, present, SLOTS)
    if answer > present:
        assert load.queued + load.waiting > load.running / 4
        assert answer * SLOTS >= demand(load)
        assert answer == 1 or (answer - 1) * SLOTS < demand(load) or load.kv_pools > 0


@given(loads(), replicas)
def test_fewer_are_left_only_if_those_have_room(load: FleetLoad, present: int) -> None:
    answer = desired_replicas(load, present, SLOTS)
    if answer < present:
        assert demand(load) <= 0.6 * answer * SLOTS + 1e-6
        assert load.kv_pools <= 0.6 * answer + 1e-6


@given(loads(), replicas, st.floats(0, 100))
def test_a_longer_queue_never_means_fewer(load: FleetLoad, present: int, more: float) -> None:
    longer = FleetLoad(load.queued + more, load.waiting, load.running, load.kv_pools)
    assert desired_replicas(longer, present, SLOTS) >= desired_replicas(load, present, SLOTS)


@pytest.mark.parametrize(
    ("load", "present", "expected"),
    [
        (FleetLoad(0, 0, 0, 0), 4, 1),
        (FleetLoad(0, 0, 16, 0.5), 1, 1),  # full, and nobody waits
        (FleetLoad(0, 3, 16, 0.5), 1, 1),  # a few wait: slots free themselves
        (FleetLoad(0, 16, 16, 0.5), 1, 2),
        (FleetLoad(100, 16, 16, 0.5), 1, 9),  # the queue at the ingress counts
        (FleetLoad(0, 4, 8, 0.95), 1, 2),  # slots are free, the KV pool is not
        (FleetLoad(0, 0, 20, 1.9), 2, 2),
        (FleetLoad(0, 0, 10, 0.3), 3, 2),
        (FleetLoad(0, 0, 10, 1.7), 3, 3),  # few run, but long ones
    ],
)
def test_what_some_loads_mean(load: FleetLoad, present: int, expected: int) -> None:
    assert desired_replicas(load, present, SLOTS) == expected


class Context:
    """What the policies read of Serve's context."""

    def __init__(self, target: int, metrics: dict[str, dict[Any, float]] | None, app: str = "app") -> None:
        self.app_name = app
        self.target_num_replicas = target
        self.aggregated_metrics = metrics


def test_the_policies_add_up_replicas_and_hear_of_the_ingress_queue() -> None:
    engine, ingress = EnginePolicy(), IngressPolicy()
    metrics = {
        "waiting": {"a": 2.0, "b": 2.0},
        "running": {"a": 16.0, "b": 16.0},
        "kv_usage": {"a": 0.5, "b": 0.5},
        "slots": {"a": SLOTS - 4.0, "b": SLOTS + 4.0},
    }
    assert engine(Context(2, metrics, "one")) == (2, {})
    assert ingress(Context(1, {"queued": {"i": 28.0}}, "one")) == (1, {})
    assert engine(Context(2, metrics, "one")) == (4, {})
    assert engine(Context(2, metrics, "another")) == (2, {})
    ingress(Context(1, {}, "one"))
    assert engine(Context(2, metrics, "one")) == (2, {})


@pytest.mark.parametrize("metrics", [None, {}, {"running": {"a": 99.0}, "slots": {}}])
def test_without_reports_the_number_stays(metrics: dict[str, dict[Any, float]] | None) -> None:
    assert EnginePolicy()(Context(3, metrics)) == (3, {})


def test_a_fleet_that_follows_the_answers_settles() -> None:
    """Closed loop without noise: up to what the load needs in one go, then still."""
    offered = 3.3 * SLOTS
    present, history = 1, []
    for _ in range(5):
        running = min(offered, present * SLOTS)
        present = desired_replicas(FleetLoad(offered - running, 0, running, present * 0.3), present, SLOTS)
        history.append(present)
    assert history == [4] * 5
