"""Draft tokens in the scheduler: what they may take, and that they change no answer."""

from typing import Any

import pytest

from serve_app.core.autosize import DraftCost
from serve_app.core.config import SchedulerConfig
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import SchedulerOutput
from tests.core.fake_model import Driver, expected_output

ROUND = (4, 5, 6)
"""The model mostly says what it said three tokens before."""


def make_config(**changes: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "num_blocks": 101,
        "block_size": 4,
        "max_model_len": 128,
        "vocab_size": 50,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
    }
    return SchedulerConfig(**(defaults | changes))


def make_request(name: str, max_tokens: int = 60, **params: Any) -> EngineRequest:
    """A prompt that repeats itself; the name makes it another one."""
    prompt = (sum(name.encode()) % 50, *ROUND * 4)
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **params}))


def num_drafts(output: SchedulerOutput) -> int:
    return sum(len(row.draft_token_ids) for row in output.rows)


def test_accepted_drafts_save_steps_and_change_nothing() -> None:
    request = make_request("a")
    driver = Driver(make_config())
    driver.run(request)
    driver.check_outputs(request)
    plain = Driver(make_config(speculation="off"))
    plain.run(request)
    assert not any(map(num_drafts, plain.outputs))
    assert len(plain.outputs) == 60
    assert len(driver.outputs) < 40
    assert max(map(num_drafts, driver.outputs)) > 3


@pytest.mark.parametrize(
    ("draft_s", "most_decodes"), [(0.01, 6), (0.24, 4), (2.0, 0)], ids=["cheap", "as long as few decode", "dear"]
)
def test_the_more_decode_the_surer_drafts_must_be(draft_s: float, most_decodes: int) -> None:
    """A step takes a second here, so that with 6 decodes a draft of 0.24 s would have to be surer
    than sure."""
    driver = Driver(make_config(draft_cost=DraftCost(draft_s=(draft_s,))))
    requests = [make_request(name, 20 + 8 * i) for i, name in enumerate("abcdef")]
    driver.run(*requests)
    driver.check_outputs(*requests)
    numbers = [sum(not row.is_prefill for row in output.rows) for output in driver.outputs if num_drafts(output)]
    assert max(numbers, default=0) <= most_decodes
    assert bool(numbers) == bool(most_decodes)
    assert most_decodes < 6 or 6 in numbers


def test_drafts_of_all_together_leave_half_of_a_step() -> None:
    driver = Driver(make_config(max_num_batched_tokens=30, draft_cost=DraftCost(draft_s=(0.0,))))
    requests = [make_request(name) for name in "abcdef"]
    driver.run(*requests)
    driver.check_outputs(*requests)
    decode_tokens = [sum(row.num_tokens for row in o.rows if not row.is_prefill) for o in driver.outputs]
    assert max(decode_tokens) == 15


def test_prompts_come_before_drafts() -> None:
    driver = Driver(make_config(max_num_batched_tokens=10))
    driver.add(make_request("a"))
    while not num_drafts(driver.step()):
        pass
    late = EngineRequest("late", tuple(range(40)), SamplingParams(max_tokens=2))
    driver.add(late)
    for _ in range(40 // 9):
        output = driver.step()
        assert num_drafts(output) == 0
        assert max(row.num_tokens for row in output.rows if row.is_prefill) == 9
    assert num_drafts(driver.step()) > 0, "beside the last four tokens of the prompt"
    driver.drain()
    driver.check_outputs(late)


def test_drafts_preempt_nobody() -> None:
    """A pool that is just large enough for both without drafts."""
    requests = [make_request("a", 27), make_request("b", 27)]
    driver = Driver(make_config(num_blocks=21, max_model_len=40))
    driver.run(*requests)
    driver.check_outputs(*requests)
    assert any(map(num_drafts, driver.outputs))
    assert not any(output.preempted for output in driver.outputs)


@pytest.mark.parametrize("num_blocks", range(13, 21))
def test_drafts_take_no_block_of_the_last(num_blocks: int) -> None:
    """One for each running request is left: its next token may need it."""
    driver = Driver(make_config(num_blocks=num_blocks, max_model_len=40))
    for request in (make_request("a", 27), make_request("b", 27)):
        driver.add(request)
    grown = []
    while driver.scheduler.has_unfinished:
        output = driver.step()
        # A decode that begins a block takes it for itself, all others for drafts.
        if any(len(row.new_block_ids) > (row.start % 4 == 0) for row in output.rows if row.draft_token_ids):
            stats = driver.scheduler.stats()
            grown.append(stats.blocks_total - stats.blocks_used)
            assert grown[-1] >= stats.running
    assert grown


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_the_length_limit_holds_to_the_token(max_tokens: int) -> None:
    request = make_request("a", max_tokens)
    driver = Driver(make_config(max_model_len=13 + max_tokens, num_blocks=2 + (12 + max_tokens) // 4))
    driver.run(request)
    driver.check_outputs(request)
    assert driver.streams["a", 0].finish_reason is FinishReason.LENGTH
    last = max(row.start + row.num_tokens for output in driver.outputs for row in output.rows)
    assert last == 13 + max_tokens - 1, "the last token is never computed"


@pytest.mark.parametrize("min_tokens", [0, 17, 41])
@pytest.mark.parametrize("stop", range(50))
def test_a_stop_token_among_accepted_drafts_is_the_last(stop: int, min_tokens: int) -> None:
    request = make_request("a", stop_token_ids=(stop,), min_tokens=min_tokens)
    driver = Driver(make_config())
    driver.run(request)
    driver.check_outputs(request)


def test_choices_speculate_each_for_itself() -> None:
    request = make_request("a", 40, n=3)
    driver = Driver(make_config())
    driver.run(request)
    driver.check_outputs(request)
    assert any(row.choice == 2 and row.draft_token_ids for output in driver.outputs for row in output.rows)


def test_a_change_of_the_knob_holds_from_the_next_step_on() -> None:
    request = make_request("a")
    driver = Driver(make_config())
    driver.add(request)
    while not num_drafts(driver.step()):
        pass
    driver.reconfigure(make_config(speculation="off"))
    assert not any(num_drafts(driver.step()) for _ in range(5))
    driver.reconfigure(make_config())
    assert any(num_drafts(driver.step()) for _ in range(5))
    driver.drain()
    driver.check_outputs(request)


@pytest.mark.parametrize("count", [0, 9])
def test_a_runner_that_returns_what_cannot_be_ends_the_request(count: int) -> None:
    driver = Driver(make_config())
    driver.add(make_request("a"))
    while True:
        output = driver.scheduler.schedule(0.0)
        result = driver.runner.execute(output)
        if num_drafts(output):
            break
        driver.scheduler.update(output, result)
    wrong = type(result)(token_ids=((7,) * count,))
    (delta,) = driver.scheduler.update(output, wrong)
    assert delta.finish_reason is FinishReason.ERROR
    assert f"returned {count} tokens" in str(delta.error)


def test_expected_outputs_repeat_themselves() -> None:
    """Or the tests above would test nothing."""
    token_ids, _ = expected_output(make_request("a"), 0, make_config())
    assert sum(a == b for a, b in zip(token_ids, token_ids[3:], strict=False)) > len(token_ids) // 2
