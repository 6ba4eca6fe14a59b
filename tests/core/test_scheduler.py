"""One rule of the scheduler per test."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.core.config import SchedulerConfig, SchedulerKnobs
from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason, ModelRunnerOutput
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import SchedulerOutput
from serve_app.errors import InvalidRequestError
from tests.core.fake_model import Driver, expected_output


def make_config(**changes: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "num_blocks": 101,
        "block_size": 4,
        "max_model_len": 64,
        "vocab_size": 50,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "speculation": "off",
    }
    return SchedulerConfig(**(defaults | changes))


def make_request(
    request_id: str, prompt: int | tuple[int, ...] = 4, max_tokens: int = 4, **changes: Any
) -> EngineRequest:
    """A request with a prompt of its own (`prompt` is its length) that never stops by itself."""
    params = {name: changes.pop(name) for name in list(changes) if name in SamplingParams.__slots__}
    if isinstance(prompt, int):
        prompt = tuple((sum(request_id.encode()) + i * i) % 50 for i in range(prompt))
    params = SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True} | params))
    return EngineRequest(request_id, prompt, params, **changes)


def rows(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    return {row.request_id: (row.start, row.num_tokens) for row in output.rows}


def test_prefill_chunks_ride_along_with_decodes_within_the_budget() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    driver.add(make_request("a", 4))
    driver.step()
    driver.add(make_request("b", 20))
    assert [rows(driver.step()) for _ in range(3)] == [
        {"a": (4, 1), "b": (0, 7)},
        {"a": (5, 1), "b": (7, 7)},
        {"a": (6, 1), "b": (14, 6)},
    ]


def test_decodes_come_before_an_older_request_that_still_prefills() -> None:
    driver = Driver(make_config(max_num_batched_tokens=4, policy="priority"))
    driver.add(make_request("low", 4, priority=1))
    driver.step()
    driver.add(make_request("high", 12, priority=0))
    assert rows(driver.step()) == {"low": (4, 1), "high": (0, 3)}
    assert rows(driver.step()) == {"low": (5, 1), "high": (3, 3)}


def test_slots_lowest_free_first() -> None:
    driver = Driver(make_config(max_num_seqs=3))
    for name, max_tokens in (("a", 2), ("b", 9), ("c", 2), ("d", 2)):
        driver.add(make_request(name, max_tokens=max_tokens))
    first = driver.step()
    assert [(row.request_id, row.slot) for row in first.rows] == [("a", 0), ("b", 1), ("c", 2)]
    driver.step()
    assert [(start.request_id, start.slot) for start in driver.step().slot_starts] == [("d", 0)]


def test_priority_is_served_first_then_arrival() -> None:
    driver = Driver(make_config(max_num_seqs=1, policy="priority"))
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", 0)):
        driver.add(make_request(name, priority=priority))
    driver.drain()
    assert [name for output in driver.outputs for name, _ in output.admitted] == ["d", "b", "a", "c"]


def test_fcfs_ignores_priority() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.run(make_request("a", priority=5), make_request("b", priority=0))
    assert [name for output in driver.outputs for name, _ in output.admitted] == ["a", "b"]


def test_a_full_pool_preempts_the_youngest_and_resumes_it_first() -> None:
    # 12 blocks; each request grows to (4 + 23 - 1 + 4) / 4 = 7 of them.
    driver = Driver(make_config(num_blocks=13, max_num_seqs=2))
    workload = [make_request(name, 4, max_tokens=23) for name in "abc"]
    driver.run(*workload)
    driver.check_outputs(*workload)
    preempted = [name for output in driver.outputs for name, _ in output.preempted]
    admitted = [name for output in driver.outputs for name, _ in output.admitted]
    assert preempted == ["b"]
    assert admitted == ["a", "b", "b", "c"]


def test_the_youngest_preempts_itself_when_it_is_the_one_without_a_block() -> None:
    driver = Driver(make_config(num_blocks=12, max_num_seqs=2))
    workload = [make_request("a", 5, max_tokens=24), make_request("b", 4, max_tokens=24)]
    driver.run(*workload)
    driver.check_outputs(*workload)
    step = next(output for output in driver.outputs if output.preempted)
    assert step.preempted == (("b", 0),)
    assert rows(step).keys() == {"a"}
    assert step.rows[0].new_block_ids == ()


def test_a_full_pool_preempts_the_lowest_priority() -> None:
    driver = Driver(make_config(num_blocks=13, max_num_seqs=2, policy="priority"))
    workload = [make_request("old", 4, max_tokens=23, priority=1), make_request("young", 4, max_tokens=23, priority=0)]
    driver.run(*workload)
    driver.check_outputs(*workload)
    assert {name for output in driver.outputs for name, _ in output.preempted} == {"old"}


def test_a_preempted_request_hits_its_own_published_blocks() -> None:
    driver = Driver(make_config(num_blocks=13, max_num_seqs=2))
    driver.run(*(make_request(name, 4, max_tokens=23) for name in "ab"))
    resumed = [output for output in driver.outputs if output.admitted][-1]
    assert resumed.admitted == (("b", 0),)
    assert 0 < resumed.prefix_hit_tokens < resumed.prefix_queried_tokens


def test_a_preempted_request_passes_a_closed_gate() -> None:
    config = make_config(num_blocks=19, waiting_served_ratio=9.0, max_wait_s=99.0, max_waiting_steps=999)
    driver = Driver(config)
    driver.run(*(make_request(name, 4, max_tokens=n) for name, n in (("a", 40), ("b", 23), ("c", 30))))
    resumed = [output for output in driver.outputs if output.admitted][-1]
    assert resumed.admitted == (("c", 0),)
    assert not resumed.gate_open
    assert rows(resumed).keys() == {"a", "c"}


def test_the_whole_prompt_must_fit_before_its_first_chunk_runs_and_nobody_overtakes() -> None:
    driver = Driver(make_config(num_blocks=11, max_num_batched_tokens=8))
    driver.add(make_request("a", 20, max_tokens=12))
    driver.step()
    driver.add(make_request("b", 20))
    driver.add(make_request("c", 1))
    driver.step()
    assert set(rows(driver.step())) == {"a"}
    driver.drain()
    assert [name for output in driver.outputs for name, _ in output.admitted] == ["a", "b", "c"]


def test_a_published_prefix_is_shared_and_one_token_is_left_to_compute() -> None:
    driver = Driver(make_config())
    prompt = tuple(range(8))
    first = driver.run(make_request("a", prompt))["a", 0]
    output = driver.outputs[0]
    assert (output.prefix_hit_tokens, output.prefix_queried_tokens) == (0, 8)
    second = driver.run(make_request("b", prompt))["b", 0]
    start = next(output for output in driver.outputs if ("b", 0) in output.admitted)
    assert rows(start) == {"b": (4, 4)}
    assert (start.prefix_hit_tokens, start.prefix_queried_tokens) == (4, 8)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    assert first.token_ids == second.token_ids


def test_nothing_is_shared_before_the_step_that_computes_it_is_committed() -> None:
    driver = Driver(make_config())
    prompt = tuple(range(8))
    driver.add(make_request("a", prompt))
    driver.add(make_request("b", prompt))
    assert rows(driver.step()) == {"a": (0, 8), "b": (0, 8)}
    driver.drain()


@pytest.mark.parametrize(
    "changes",
    [{"cache_salt": "other"}, {"prompt_logprobs": 0}, {"pooling": "mean", "max_tokens": 1}],
    ids=["another tenant", "prompt logprobs", "a mean"],
)
def test_who_may_not_hit(changes: dict[str, Any]) -> None:
    driver = Driver(make_config())
    prompt = tuple(range(8))
    driver.run(make_request("a", prompt))
    assert driver.run(make_request("b", prompt, **changes))["b", 0].num_cached_tokens == 0


@pytest.mark.parametrize(("first", "hit"), [(1, 0), (4, 0), (5, 4), (9, 8), (20, 8)])
def test_only_tokens_in_front_of_the_logprobs_wanted_come_out_of_the_prefix_cache(first: int, hit: int) -> None:
    driver = Driver(make_config())
    prompt = tuple(range(12))
    driver.run(make_request("a", prompt))
    again = make_request("b", prompt, prompt_logprobs=0, prompt_logprobs_from=first)
    assert driver.run(again)["b", 0].num_cached_tokens == hit
    driver.check_outputs(again)


def test_the_prefix_cache_can_be_switched_off() -> None:
    driver = Driver(make_config(enable_prefix_cache=False))
    prompt = tuple(range(8))
    driver.run(make_request("a", prompt))
    assert driver.run(make_request("b", prompt))["b", 0].num_cached_tokens == 0
    assert driver.scheduler.stats().blocks_cached == 0
    assert {output.prefix_queried_tokens for output in driver.outputs} == {0}


def test_conversations_that_share_a_system_prompt_do_not_evict_each_other_from_a_pool_with_room() -> None:
    driver = Driver(make_config(num_blocks=653, block_size=16, max_model_len=2048, max_num_batched_tokens=256))
    system = tuple(range(50)) + tuple(range(14))
    histories = [system + tuple((own + i * i) % 50 for i in range(900)) for own in range(4)]
    for number, history in enumerate(histories):
        driver.run(make_request(f"first {number}", history))
    for number, history in enumerate(histories):
        assert driver.run(make_request(f"again {number}", history))[f"again {number}", 0].num_cached_tokens == 960


@pytest.mark.parametrize(("prompt", "copies"), [(8, 3), (10, 3), (9, 0)])
def test_forks_share_the_prompt_and_copy_only_the_block_they_write(prompt: int, copies: int) -> None:
    driver = Driver(make_config(enable_prefix_cache=False))
    request = make_request("a", prompt, max_tokens=6, n=4)
    driver.add(request)
    assert rows(driver.step()) == {"a": (0, prompt)}
    fork = driver.step()
    assert [(row.choice, row.start, row.num_tokens) for row in fork.rows] == [
        (0, prompt, 1),
        *((choice, prompt - 1, 1) for choice in (1, 2, 3)),
    ]
    assert len(fork.block_copies) == copies
    shared = (prompt - 1) // 4
    tables = [start.block_ids for start in fork.slot_starts]
    assert len({table[:shared] for table in tables}) == 1
    assert len({table[shared] for table in tables}) == 3
    driver.drain()
    driver.check_outputs(request)
    assert len({tuple(driver.streams["a", choice].token_ids) for choice in range(4)}) == 4


def test_forks_fall_back_to_the_prefix_cache_when_the_first_choice_is_gone() -> None:
    driver = Driver(make_config())
    request = make_request("a", 9, max_tokens=1, n=3)
    driver.run(request)
    driver.check_outputs(request)
    assert not any(output.block_copies for output in driver.outputs)
    assert driver.streams["a", 2].num_cached_tokens == 8


def test_only_the_first_choice_reports_the_prompt() -> None:
    driver = Driver(make_config(num_blocks=13))
    # choices 1 and 2 cannot fork
    request = make_request("a", 9, max_tokens=1, n=3, prompt_logprobs=0)
    driver.run(request)
    driver.check_outputs(request)


def test_forks_join_before_newcomers_and_pass_a_closed_gate() -> None:
    driver = Driver(make_config(max_num_seqs=3, waiting_served_ratio=9.0, max_wait_s=99.0))
    driver.add(make_request("a", n=2, max_tokens=8))
    driver.step()
    driver.add(make_request("b"))
    output = driver.step()
    assert output.admitted == (("a", 1),)
    assert not output.gate_open


def test_abort_drops_what_is_in_flight_and_frees_everything() -> None:
    driver = Driver(make_config(enable_prefix_cache=False))
    driver.add(make_request("a", n=3))
    driver.add(make_request("b"))
    driver.step()
    driver.step(meanwhile=lambda: driver.abort("a"))
    assert driver.scheduler.stats().running == 1
    driver.abort("b")
    driver.abort("b")
    driver.abort("never seen")
    stats = driver.scheduler.stats()
    assert (stats.waiting, stats.running, stats.blocks_used, stats.blocks_total) == (0, 0, 0, 100)
    assert not driver.scheduler.has_unfinished


def test_an_aborted_id_that_returns_at_once_gets_nothing_of_the_old_one() -> None:
    driver = Driver(make_config())
    request = make_request("a", 6)
    driver.add(request)

    def again() -> None:
        driver.abort("a")
        driver.add(request)

    driver.step(meanwhile=again)
    assert driver.streams["a", 0].token_ids == []
    driver.drain()
    driver.check_outputs(request)


def test_a_duplicate_id_is_refused_and_the_first_lives_on() -> None:
    driver = Driver(make_config())
    request = make_request("a")
    driver.add(request)
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        driver.scheduler.add(request, 0.0)
    driver.drain()
    driver.check_outputs(request)
    driver.run(request)  # once finished, the id is free again


def test_a_failed_row_ends_its_request_with_all_choices_and_no_other() -> None:
    driver = Driver(make_config(max_num_seqs=3))
    other = make_request("b")
    driver.add(make_request("a", n=4))
    driver.add(other)
    driver.step()
    driver.step(failing=lambda output: [i for i, row in enumerate(output.rows) if row.choice == 1])
    ends = [driver.streams["a", choice] for choice in range(4)]
    assert {stream.finish_reason for stream in ends} == {FinishReason.ERROR}
    assert {stream.error for stream in ends} == {"injected"}
    driver.drain()
    driver.check_outputs(other)


def test_a_failure_says_nothing_more_about_a_choice_that_ended_before() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_request("a", max_tokens=1, n=2))
    driver.step()
    driver.step(failing=lambda output: [0])
    ends = [driver.streams["a", choice].finish_reason for choice in range(2)]
    assert ends == [FinishReason.LENGTH, FinishReason.ERROR]
    assert not driver.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [((50,), "token id 50"), ((-1,), "token id -1"), ((), "returned 0 tokens"), ((1, 2), "returned 2 tokens")],
)
def test_nonsense_from_the_runner_ends_that_request(token_ids: tuple[int, ...], error: str) -> None:
    driver = Driver(make_config())
    scheduler = driver.scheduler
    scheduler.add(make_request("a"), 0.0)
    scheduler.add(make_request("b"), 0.0)
    deltas = scheduler.update(scheduler.schedule(0.0), ModelRunnerOutput((token_ids, (7,))))
    assert [(d.request_id, d.finish_reason, d.token_ids) for d in deltas] == [
        ("a", FinishReason.ERROR, ()),
        ("b", None, (7,)),
    ]
    assert error in str(deltas[0].error)
    scheduler.check_invariants()
    assert scheduler.stats().running == 1


def test_failover_continues_where_the_other_replica_stopped() -> None:
    config = make_config()
    request = make_request("a", 6, max_tokens=8, n=3)
    expected = [expected_output(request, choice, config)[0] for choice in range(3)]
    prior = (tuple(expected[0]), tuple(expected[1][:5]), ())  # choice 0 is complete
    driver = Driver(config)
    resumed = replace(request, prior_output_ids=prior)
    driver.run(resumed)
    driver.check_outputs(request)
    assert driver.outputs[0].rows[0].choice == 1
    assert rows(driver.outputs[0]) == {"a": (0, 11)}
    with pytest.raises(InvalidRequestError, match="no choice is left to generate"):
        driver.add(replace(request, prior_output_ids=tuple(map(tuple, expected))))


def test_the_end_of_a_complete_choice_is_not_reported_after_an_abort() -> None:
    driver = Driver(make_config())
    request = make_request("a", max_tokens=2, n=2)
    complete = expected_output(request, 0, driver.config)[0]
    driver.add(replace(request, prior_output_ids=(tuple(complete), ())))
    driver.abort("a")
    driver.run(make_request("b"))
    assert {key[0] for key in driver.streams} == {"b"}


def test_static_batches_are_closed() -> None:
    driver = Driver(make_config(policy="static", max_num_seqs=2, max_wait_s=5.0))
    workload = [make_request(name, max_tokens=max_tokens) for name, max_tokens in (("a", 2), ("b", 6), ("c", 2))]
    driver.add(workload[0])
    assert driver.step().rows == ()
    assert driver.scheduler.wake_time == 5.0
    driver.now = 4.999
    assert driver.step().rows == ()
    driver.add(workload[1])
    assert set(rows(driver.step())) == {"a", "b"}
    driver.now = 100.0
    driver.add(workload[2])
    driver.now = 200.0  # however long it waits
    steps = 0
    while driver.streams["b", 0].finish_reason is None:
        assert "c" not in rows(driver.step())
        steps += 1
    assert steps == 5
    driver.add(make_request("d"))
    assert set(rows(driver.step())) == {"c", "d"}
    driver.drain()
    driver.check_outputs(*workload)


def test_a_preempted_request_keeps_its_static_batch_open() -> None:
    driver = Driver(make_config(policy="static", num_blocks=13, max_num_seqs=2))
    driver.run(*(make_request(name, 4, max_tokens=23) for name in "abcd"))
    admitted = [name for output in driver.outputs for name, _ in output.admitted]
    assert admitted[:4] == ["a", "b", "b", "c"]
    last_of_first_batch = max(output.step for output in driver.outputs if "b" in rows(output))
    first_of_second = min(output.step for output in driver.outputs if "c" in rows(output))
    assert first_of_second > last_of_first_batch


def test_a_static_batch_is_admitted_over_several_steps_when_its_prompts_exceed_the_budget() -> None:
    driver = Driver(make_config(policy="static", max_num_seqs=3, max_num_batched_tokens=10))
    for name in "abcd":
        driver.add(make_request(name, 10, max_tokens=9))
    admitted = [driver.step().admitted for _ in range(5)]
    assert [name for names in admitted for name, _ in names] == ["a", "b", "c"]


def test_separate_prefill_pauses_decodes_until_the_group_is_in() -> None:
    driver = Driver(make_config(prefill="separate", max_num_batched_tokens=8, max_num_seqs=4))
    workload = [make_request("a", 4, max_tokens=5), make_request("b", 12), make_request("c", 6)]
    driver.add(workload[0])
    driver.step()
    assert rows(driver.step()) == {"a": (4, 1)}
    driver.add(workload[1])
    driver.add(workload[2])
    assert [rows(driver.step()) for _ in range(4)] == [
        {"b": (0, 8)},
        {"b": (8, 4), "c": (0, 4)},
        {"c": (4, 2)},
        {"a": (5, 1), "b": (12, 1), "c": (6, 1)},
    ]
    driver.drain()
    driver.check_outputs(*workload)


def test_the_rest_of_a_group_starts_before_who_came_after_it() -> None:
    """With separate prefill: whoever came later waits until there have been decodes."""
    driver = Driver(make_config(prefill="separate", max_num_batched_tokens=8, max_num_seqs=4))
    driver.add(make_request("a", 4, max_tokens=5))
    driver.step()
    driver.step()
    driver.add(make_request("b", 8))
    driver.add(make_request("c", 2))
    driver.step()
    driver.add(make_request("d", 2))
    steps = [driver.step() for _ in range(3)]
    assert [rows(step) for step in steps[:2]] == [{"c": (0, 2)}, {"a": (5, 1), "b": (8, 1), "c": (2, 1)}]
    assert steps[2].admitted == (("d", 0),)


def steps_between_decodes(driver: Driver, arrivals: Callable[[int], list[EngineRequest]]) -> int:
    """The most steps that a running request waits for its next token while `arrivals(step)`
    come."""
    driver.add(make_request("victim", 3, max_tokens=40))
    driver.step()
    last = longest = 0
    for step in range(1, 200):
        driver.now += 0.02
        for request in arrivals(step):
            driver.add(request)
        if "victim" in rows(driver.step()):
            longest, last = max(longest, step - last), step
    return max(longest, 200 - last) if driver.streams["victim", 0].finish_reason is None else longest


@pytest.mark.parametrize("changes", [{}, {"waiting_served_ratio": 1.2}, {"max_wait_s": 0.0}, {"max_waiting_steps": 1}])
def test_separate_prefill_does_not_starve_decodes_under_a_steady_load(changes: dict[str, Any]) -> None:
    driver = Driver(make_config(prefill="separate", **changes))
    assert steps_between_decodes(driver, lambda step: [make_request(f"x{step}", 3, max_tokens=1)]) == 2
    driver.drain()


def test_separate_prefill_does_not_starve_decodes_by_a_long_queue_that_leaves_slots_free() -> None:
    driver = Driver(make_config(prefill="separate", max_num_seqs=4, max_num_batched_tokens=8))
    queue = [make_request(f"x{i}", 8, max_tokens=1) for i in range(40)]
    assert steps_between_decodes(driver, lambda step: queue if step == 1 else []) == 4 + 1


def test_separate_prefill_does_not_starve_decodes_by_forks() -> None:
    driver = Driver(make_config(prefill="separate"))
    assert steps_between_decodes(driver, lambda step: [make_request(f"x{step}", 3, max_tokens=1, n=40)]) <= 4 + 1


def test_separate_prefill_does_not_starve_decodes_by_preemption() -> None:
    driver = Driver(make_config(prefill="separate", num_blocks=17, max_num_batched_tokens=16))
    assert steps_between_decodes(driver, lambda step: [make_request(f"x{step}", 9, max_tokens=6)]) <= 4 + 1
    assert any(output.preempted for output in driver.outputs)
    driver.drain()


def test_separate_prefill_lets_newcomers_in_at_once_while_nothing_decodes() -> None:
    driver = Driver(make_config(prefill="separate", max_num_batched_tokens=8, max_num_seqs=8))
    admitted = []
    for step in range(5):
        driver.add(make_request(f"x{step}", 3, max_tokens=1))
        admitted.append(driver.step().admitted)
    assert admitted == [((f"x{step}", 0),) for step in range(5)]


@pytest.mark.parametrize("prefill", ["fused", "separate"])
def test_a_higher_ratio_admits_in_groups(prefill: str) -> None:
    config = make_config(
        prefill=prefill, waiting_served_ratio=1.0, max_num_seqs=8, max_wait_s=99.0, max_waiting_steps=50
    )
    driver = Driver(config)
    for name in "ab":
        driver.add(make_request(name, max_tokens=40))
    driver.step()
    driver.add(make_request("c"))
    assert driver.step().admitted == ()  # 1 waits, 2 run
    driver.add(make_request("d"))
    assert driver.step().admitted == (("c", 0), ("d", 0))


def test_a_group_stays_together_when_the_budget_splits_it() -> None:
    config = make_config(waiting_served_ratio=1.0, max_wait_s=99.0, max_waiting_steps=50, max_num_batched_tokens=10)
    driver = Driver(config)
    driver.add(make_request("a", max_tokens=40))
    driver.step()
    for name in "bc":
        driver.add(make_request(name, 9))
    assert driver.step().admitted == (("b", 0),)
    driver.add(make_request("d", 4))
    assert driver.step().admitted == (("c", 0),)
    assert driver.step().admitted == ()  # d came after the gate opened: 1 waits, 3 run


def test_a_group_ends_when_slots_run_out() -> None:
    config = make_config(waiting_served_ratio=1.0, max_wait_s=99.0, max_waiting_steps=50, max_num_seqs=3)
    driver = Driver(config)
    driver.add(make_request("a", max_tokens=3))
    driver.step()
    for name in "bcd":
        driver.add(make_request(name, max_tokens=9))
    assert driver.step().admitted == (("b", 0), ("c", 0))
    driver.step()
    assert driver.streams["a", 0].finish_reason is not None
    assert driver.step().admitted == ()  # there is a slot, but 1 waits and 2 run


def test_behind_a_group_the_next_may_follow_in_the_same_step() -> None:
    """They found room, and the gate open: slots were few when the group was made."""
    knobs = SchedulerKnobs(max_num_seqs=1, max_num_batched_tokens=1)
    driver = Driver(make_config(max_num_seqs=4, max_num_batched_tokens=16))
    driver.reconfigure(knobs)
    for name in "ab":
        driver.add(make_request(name, 1, max_tokens=9))
    assert driver.step().admitted == (("a", 0),)
    driver.abort("a")
    for name in "cd":
        driver.add(make_request(name, 1, max_tokens=9))
    driver.reconfigure(replace(knobs, max_num_seqs=4, max_num_batched_tokens=16))
    assert driver.step().admitted == (("b", 0), ("c", 0), ("d", 0))


def test_nobody_inherits_the_place_of_an_aborted_member_of_a_group() -> None:
    config = make_config(waiting_served_ratio=1.0, max_wait_s=99.0, max_waiting_steps=50, max_num_batched_tokens=10)
    driver = Driver(config)
    driver.add(make_request("a", max_tokens=40))
    driver.step()
    for name in "bc":
        driver.add(make_request(name, 9))
    assert driver.step().admitted == (("b", 0),)
    driver.abort("c")
    driver.step()
    driver.add(make_request("d"))
    assert driver.step().admitted == ()


def test_a_static_batch_has_at_most_max_num_seqs_members() -> None:
    driver = Driver(make_config(policy="static", max_num_seqs=2, max_num_batched_tokens=10))
    driver.add(make_request("a", 10, max_tokens=1))  # done, and its slot free, before b is in
    for name in "bc":
        driver.add(make_request(name, 10, max_tokens=5))
    admitted = [driver.step().admitted for _ in range(5)]
    assert admitted == [(("a", 0),), (("b", 0),), (), (), ()]


@pytest.mark.parametrize("queued", [4, 6])
def test_nobody_joins_a_static_batch_in_place_of_an_aborted_member(queued: int) -> None:
    driver = Driver(make_config(policy="static", max_num_batched_tokens=8))
    for i in range(queued):
        driver.add(make_request(f"g{i}", 20, max_tokens=20))
    driver.step()
    driver.abort("g3")
    driver.add(make_request("newcomer", 3))
    admitted = [name for _ in range(15) for name, _ in driver.step().admitted]
    assert admitted == ["g1", "g2"]
    driver.drain()
    assert driver.streams["newcomer", 0].finish_reason is FinishReason.LENGTH


def test_an_urgent_latecomer_is_not_shut_out_by_an_open_group() -> None:
    config = make_config(policy="priority", waiting_served_ratio=1.0, max_wait_s=99.0, max_num_batched_tokens=10)
    driver = Driver(config)
    for name in "ab":
        driver.add(make_request(name, 10, priority=1))
    assert driver.step().admitted == (("a", 0),)
    driver.add(make_request("urgent", 4, priority=0))
    assert driver.step().admitted == (("urgent", 0), ("b", 0))


@pytest.mark.parametrize("prefill", ["fused", "separate"])
def test_max_waiting_steps_opens_the_gate(prefill: str) -> None:
    config = make_config(prefill=prefill, waiting_served_ratio=9.0, max_wait_s=99.0, max_waiting_steps=3)
    driver = Driver(config)
    driver.add(make_request("a", max_tokens=40))
    driver.step()
    driver.add(make_request("b"))
    assert [(output.gate_open, output.admitted) for output in (driver.step() for _ in range(3))] == [
        (False, ()),
        (False, ()),
        (True, (("b", 0),)),
    ]


@pytest.mark.parametrize("prefill", ["fused", "separate"])
def test_max_wait_s_opens_the_gate(prefill: str) -> None:
    driver = Driver(make_config(prefill=prefill, waiting_served_ratio=9.0, max_wait_s=2.0, max_waiting_steps=50))
    driver.add(make_request("a", max_tokens=40))
    driver.step()
    driver.add(make_request("b"))
    driver.now = 1.9
    assert driver.step().admitted == ()
    driver.now = 2.0
    assert driver.step().admitted == (("b", 0),)


def test_prompt_logprobs_come_once_in_spite_of_chunks_and_preemption() -> None:
    driver = Driver(make_config(num_blocks=7, max_num_seqs=2, max_num_batched_tokens=2))
    workload = [make_request("a", 2, max_tokens=20), make_request("b", 14, max_tokens=10, prompt_logprobs=0)]
    driver.run(*workload)
    driver.check_outputs(*workload)
    preempted_at = next(output.step for output in driver.outputs if output.preempted)
    assert any(row.is_prefill for row in driver.outputs[preempted_at - 1].rows), "b was in the middle of its prompt"


def test_calls_out_of_order_are_refused() -> None:
    driver = Driver(make_config())
    scheduler = driver.scheduler
    scheduler.add(make_request("a"), 0.0)
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="two steps are in flight"):
        scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="not the newest in flight"):
        scheduler.sit_out(first, {0})
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        scheduler.update(second, ModelRunnerOutput(((1,),)))
    scheduler.update(first, ModelRunnerOutput(((1,),)))
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        scheduler.update(first, ModelRunnerOutput(((1,),)))
    scheduler.update(second, ModelRunnerOutput(((1,),)))
    with pytest.raises(RuntimeError, match="not the oldest in flight"):
        scheduler.update(second, ModelRunnerOutput(((1,),)))


def test_stats_and_ratio() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for name in "abcde":
        driver.add(make_request(name))
    assert driver.scheduler.stats().waiting_served_ratio == 5.0
    driver.step()
    stats = driver.scheduler.stats()
    assert (stats.waiting, stats.running, stats.blocks_used, stats.waiting_served_ratio) == (3, 2, 2, 1.5)
    driver.drain()
    assert driver.scheduler.stats().blocks_cached == 5


def test_an_idle_scheduler_plans_nothing() -> None:
    driver = Driver(make_config())
    assert driver.step().rows == ()


def test_time_alone_opens_only_a_static_gate() -> None:
    scheduler = Driver(make_config()).scheduler
    scheduler.add(make_request("a"), 0.0)
    assert scheduler.wake_time is None
