"""Knobs that change while requests run: what happens at once, what is refused, and that nobody
loses a token."""

from typing import Any

import pytest

from serve_app.core.config import SchedulerKnobs
from serve_app.errors import ConfigError
from tests.core.fake_model import Driver
from tests.core.test_scheduler import make_config, make_request, rows


def changed(driver: Driver, **changes: Any) -> SchedulerKnobs:
    return SchedulerKnobs(**driver.config.knobs() | changes)


def test_a_smaller_token_budget_cuts_the_next_prefill_chunk() -> None:
    driver = Driver(make_config(max_num_batched_tokens=16))
    driver.add(make_request("a", 40))
    assert rows(driver.step()) == {"a": (0, 16)}
    driver.reconfigure(changed(driver, max_num_batched_tokens=4))
    assert rows(driver.step()) == {"a": (16, 4)}
    driver.reconfigure(changed(driver, max_num_batched_tokens=16))
    assert rows(driver.step()) == {"a": (20, 16)}


def test_fewer_slots_preempt_the_youngest_and_more_let_them_back() -> None:
    driver = Driver(make_config(max_num_seqs=3))
    requests = [make_request(name, max_tokens=20) for name in "abc"]
    for request in requests:
        driver.add(request)
    driver.step()
    driver.reconfigure(changed(driver, max_num_seqs=1, max_num_batched_tokens=1))
    output = driver.step()
    assert output.preempted == (("c", 0), ("b", 0))
    assert rows(output) == {"a": (4, 1)}
    assert rows(driver.step()) == {"a": (5, 1)}
    driver.reconfigure(changed(driver, max_num_seqs=3, max_num_batched_tokens=32))
    assert {name for name, _ in driver.step().admitted} == {"b", "c"}
    driver.drain()
    driver.check_outputs(*requests)


def test_the_gate_follows_the_new_ratio() -> None:
    driver = Driver(make_config(waiting_served_ratio=2.0, max_wait_s=1000.0, max_waiting_steps=1000))
    driver.add(make_request("a", max_tokens=30))
    driver.step()
    driver.add(make_request("b"))
    assert not driver.step().admitted
    driver.reconfigure(changed(driver, waiting_served_ratio=0.0))
    assert driver.step().admitted == (("b", 0),)


def test_prefill_can_be_separated_while_decodes_run() -> None:
    driver = Driver(make_config())
    requests = [make_request("a", max_tokens=30), make_request("b", 12, max_tokens=6)]
    driver.add(requests[0])
    driver.step()
    driver.reconfigure(changed(driver, prefill="separate"))
    driver.add(requests[1])
    assert [rows(driver.step()) for _ in range(3)] == [{"a": (4, 1)}, {"b": (0, 12)}, {"a": (5, 1), "b": (12, 1)}]
    driver.reconfigure(changed(driver, prefill="fused"))
    driver.drain()
    driver.check_outputs(*requests)


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_num_seqs", 5), ("max_num_batched_tokens", 33), ("policy", "priority"), ("enable_prefix_cache", False)],
)
def test_what_needs_a_restart_is_refused_by_name_and_changes_nothing(key: str, value: Any) -> None:
    driver = Driver(make_config())
    before = driver.config
    with pytest.raises(ConfigError, match=key):
        driver.reconfigure(changed(driver, max_wait_s=9.0, **{key: value}))
    assert driver.scheduler.config == before


def test_what_went_down_may_come_up_again_but_no_higher() -> None:
    driver = Driver(make_config(max_num_seqs=4))
    driver.reconfigure(changed(driver, max_num_seqs=2))
    driver.reconfigure(changed(driver, max_num_seqs=4))
    with pytest.raises(ConfigError, match="at most 4"):
        driver.reconfigure(changed(driver, max_num_seqs=5))
