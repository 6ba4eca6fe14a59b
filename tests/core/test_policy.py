import math
from typing import Any

import pytest

from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest, Request, make_choices
from serve_app.core.request_queue import RequestQueue
from serve_app.core.sampling_params import SamplingParams
from serve_app.errors import ConfigError

GOOD: dict[str, Any] = {"num_blocks": 10, "block_size": 4, "max_model_len": 30, "vocab_size": 50}
PRIORITY = SchedulerConfig(**GOOD, policy="priority")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_blocks", 1),
        ("block_size", 0),
        ("max_model_len", 1),
        ("vocab_size", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", 2.0),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", 15),
        ("policy", "lifo"),
        ("prefill", "none"),
        ("speculation", "on"),
        ("waiting_served_ratio", -0.1),
        ("waiting_served_ratio", math.nan),
        ("waiting_served_ratio", "1"),
        ("max_wait_s", math.inf),
        ("max_wait_s", False),
        ("max_waiting_steps", 0),
        ("eos_token_ids", (50,)),
        ("eos_token_ids", (-1,)),
    ],
)
def test_a_wrong_setting_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        SchedulerConfig(**GOOD | {key: value})


def test_an_integer_is_a_good_number_of_seconds() -> None:
    assert SchedulerConfig(**GOOD, max_wait_s=3).max_wait_s == 3


def make_request(arrival: int, priority: int = 0) -> Request:
    request = EngineRequest(f"r{arrival}", (1,), SamplingParams(max_tokens=1), priority=priority)
    return make_choices(request, PRIORITY, arrival, float(arrival))[0]


def drain(queue: RequestQueue, *, gate_open: bool = True) -> list[Request]:
    served = []
    while (head := queue.head(gate_open=gate_open)) is not None:
        queue.remove(head)
        served.append(head)
    return served


def test_resuming_requests_are_served_by_the_same_order_and_pass_a_closed_gate() -> None:
    queue = RequestQueue()
    urgent, resumed, normal, late = (make_request(i, p) for i, p in enumerate((0, 1, 1, 2)))
    for request in (late, normal, urgent):
        queue.push(request, resuming=False)
    queue.push(resumed, resuming=True)
    assert queue.head(gate_open=True) is urgent
    assert drain(queue, gate_open=False) == [resumed]
    assert drain(queue) == [urgent, normal, late]
    assert len(queue) == 0


def test_the_oldest_newcomer_need_not_be_the_head() -> None:
    queue = RequestQueue()
    assert queue.oldest_arrival == math.inf
    patient, urgent = make_request(3, priority=9), make_request(5)
    queue.push(patient, resuming=False)
    queue.push(urgent, resuming=False)
    queue.push(make_request(1), resuming=True)
    assert queue.oldest_arrival == 3.0
    queue.remove(patient)
    assert queue.oldest_arrival == 5.0
