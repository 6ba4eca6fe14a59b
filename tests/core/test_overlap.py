"""Planning a step while the one before it is in flight: what goes on with an unknown token, and
what has to wait."""

import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.scheduler import Scheduler
from serve_app.core.step_plan import SchedulerOutput
from tests.core.fake_model import Driver, expected_output
from tests.core.test_scheduler import make_config, make_request, rows


def in_flight(output: SchedulerOutput) -> set[str]:
    return {row.request_id for row in output.rows if row.token_in_flight}


def stop_token(request: EngineRequest, driver: Driver, index: int) -> int:
    """The `index`-th token that `request` will get, which must not come before."""
    tokens, _ = expected_output(request, 0, driver.config)
    assert tokens[index] not in tokens[:index]
    return tokens[index]


def test_decodes_and_chunks_go_on_from_where_the_step_in_flight_ends() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8), overlap=True)
    driver.add(make_request("a", 4))
    driver.add(make_request("b", 20))
    outputs = [driver.step() for _ in range(4)]
    assert [rows(output) for output in outputs] == [
        {"a": (0, 4), "b": (0, 4)},
        {"a": (4, 1), "b": (4, 7)},
        {"a": (5, 1), "b": (11, 7)},
        {"a": (6, 1), "b": (18, 2)},
    ]
    assert [in_flight(output) for output in outputs] == [set(), {"a"}, {"a"}, {"a"}]
    assert {row.is_prefill for output in outputs for row in output.rows if row.request_id == "b"} == {True}
    assert driver.streams["b", 0].token_ids == []
    driver.drain()
    driver.check_outputs(make_request("a", 4), make_request("b", 20))


def test_no_row_follows_a_token_that_must_be_the_last() -> None:
    driver = Driver(make_config(), overlap=True)
    driver.run(make_request("a", max_tokens=3))
    assert [rows(output) for output in driver.outputs if output.rows] == [{"a": (0, 4)}, {"a": (4, 1)}, {"a": (5, 1)}]


def test_a_row_behind_a_stop_token_is_dropped_and_its_blocks_serve_others() -> None:
    driver = Driver(make_config(num_blocks=17, max_num_seqs=2), overlap=True)
    probe = make_request("a", 6, max_tokens=9)
    stop = stop_token(probe, driver, 2)
    workload = [
        make_request("a", 6, max_tokens=9, stop_token_ids=(stop,)),
        make_request("b", 30, max_tokens=9),
        make_request("c", 30, max_tokens=4),
    ]
    driver.run(*workload)
    driver.check_outputs(*workload)
    assert driver.streams["a", 0].finish_reason is FinishReason.STOP
    computed = [row for output in driver.outputs for row in output.rows if row.request_id == "a"]
    assert len(computed) == 4, "a prefill, two decodes, and one for nothing"


def test_a_step_that_would_preempt_waits_and_may_not_have_to() -> None:
    """`a` ends with the step in flight, and gives `b` the block that it lacks."""
    driver = Driver(
        make_config(num_blocks=6, max_model_len=16, max_num_seqs=2, enable_prefix_cache=False), overlap=True
    )
    probe = make_request("a", 4, max_tokens=8)
    stop = stop_token(probe, driver, 2)
    workload = [
        make_request("a", 4, max_tokens=8, stop_token_ids=(stop,)),
        make_request("b", 10, max_tokens=6),
    ]
    driver.run(*workload)
    driver.check_outputs(*workload)
    assert not any(output.preempted for output in driver.outputs)
    assert [] in [list(output.rows) for output in driver.outputs[:-2]]


def test_preemption_waits_for_the_step_in_flight() -> None:
    driver = Driver(make_config(num_blocks=13, max_num_seqs=2), overlap=True)
    workload = [make_request(name, 4, max_tokens=23) for name in "abc"]
    driver.run(*workload)
    driver.check_outputs(*workload)
    steps = [(bool(output.rows), [name for name, _ in output.preempted]) for output in driver.outputs]
    where = steps.index((True, ["b"]))
    assert steps[where - 1] == (False, [])
    assert sum(len(output.preempted) for output in driver.outputs) == 1


def test_lower_slots_wait_for_the_step_in_flight() -> None:
    driver = Driver(make_config(), overlap=True)
    workload = [make_request(name, max_tokens=6) for name in "ab"]
    for request in workload:
        driver.add(request)
    driver.step()
    driver.reconfigure(make_config(max_num_seqs=1))
    assert driver.step().rows == ()
    assert driver.step().preempted == (("b", 0),)
    driver.drain()
    driver.check_outputs(*workload)


def test_penalties_wait_for_nothing() -> None:
    """The runner counts tokens where they are sampled."""
    driver = Driver(make_config(), overlap=True)
    driver.run(make_request("a", max_tokens=6, frequency_penalty=1.5))
    assert [in_flight(output) for output in driver.outputs if output.rows] == [set(), *[{"a"}] * 5]


def test_drafts_need_a_known_token_and_are_committed_before_the_next_plan() -> None:
    driver = Driver(make_config(speculation="auto", max_num_seqs=3, prefill="separate"), overlap=True)
    workload = [make_request(name, (1, 2) * 6, max_tokens=20) for name in "abc"]
    driver.run(*workload)
    driver.check_outputs(*workload)
    for before, output in zip(driver.outputs, driver.outputs[1:], strict=False):
        assert not any(row.draft_token_ids and row.token_in_flight for row in output.rows)
        if any(row.draft_token_ids for row in before.rows):
            assert not output.rows


def test_forks_start_once_the_prompt_is_committed() -> None:
    driver = Driver(make_config(enable_prefix_cache=False), overlap=True)
    request = make_request("a", 10, max_tokens=6, n=3)
    driver.run(request)
    driver.check_outputs(request)
    planned = [[(row.choice, row.start, row.num_tokens) for row in output.rows] for output in driver.outputs]
    assert planned[:3] == [[(0, 0, 10)], [(0, 10, 1)], [(0, 11, 1), (1, 9, 1), (2, 9, 1)]]


def test_abort_with_two_steps_in_flight_leaks_nothing_and_inherits_nothing() -> None:
    driver = Driver(make_config(num_blocks=17), overlap=True)
    driver.add(make_request("a", 9, max_tokens=20))
    other = make_request("b", 5, max_tokens=8)
    driver.add(other)
    driver.step()
    again = make_request("a", 7, max_tokens=5)

    def meanwhile() -> None:
        driver.abort("a")
        driver.add(again)

    driver.step(meanwhile=meanwhile)
    driver.drain()
    driver.check_outputs(again, other)


def test_a_failure_ends_the_request_whose_next_row_is_already_in_flight() -> None:
    driver = Driver(make_config(), overlap=True)
    other = make_request("b")
    driver.add(make_request("a", n=2))
    driver.add(other)
    driver.step(lambda output: [0])
    assert "a" in in_flight(driver.step())
    ends = [driver.streams["a", choice].finish_reason for choice in range(2)]
    assert ends == [FinishReason.ERROR, FinishReason.ERROR]
    driver.drain()
    driver.check_outputs(other)


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_steps_whose_results_never_come_take_their_requests_with_them(num_in_flight: int) -> None:
    """And nobody else's, and leave the books balanced."""
    scheduler = Scheduler(make_config(max_num_seqs=2))
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name), 0.0)
    for step in range(num_in_flight):
        assert scheduler.schedule(float(step)).rows
    scheduler.abort("a")
    scheduler.abandon()
    scheduler.check_invariants()
    assert (scheduler.stats().running, scheduler.stats().waiting) == (0, 1)
    assert [row.request_id for row in scheduler.schedule(9.0).rows] == ["c"]


def test_rows_whose_tokens_a_grammar_decides_go_on_like_others() -> None:
    """And say that they are to be sampled after the commit. A bad word of one token needs nothing
    of the kind."""
    driver = Driver(make_config(), overlap=True)
    workload = [
        make_request("plain", max_tokens=6),
        make_request("word", max_tokens=6, bad_words=((1, 1, 1),)),
        make_request("letter", max_tokens=6, bad_words=((9,),)),
    ]
    driver.run(*workload)
    steps = [output for output in driver.outputs if output.rows]
    assert [in_flight(output) for output in steps] == [set(), *[{"plain", "word", "letter"}] * 5]
    assert [{row.request_id for row in output.rows if row.waits} for output in steps] == [set(), *[{"word"}] * 5]


def test_a_row_that_sits_out_is_computed_again_in_the_next_step() -> None:
    """Without waiting for a commit: every start is planned once, and once more where the row sat
    out."""
    driver = Driver(make_config(), overlap=True)
    request = make_request("a", max_tokens=20, grammar="any", ignore_eos=False)
    driver.run(request)
    driver.check_outputs(request)
    starts = [row.start for output in driver.outputs for row in output.rows]
    again = [
        start for before, start in zip(starts, starts[1:], strict=False) if start == before or before == 0 == start
    ]
    assert starts == sorted(starts)
    assert len(again) >= 2
    assert all(output.rows for output in driver.outputs[:-1])


def test_what_a_grammar_forces_is_drafted_behind_a_token_in_flight() -> None:
    driver = Driver(make_config(speculation="auto"), overlap=True)
    workload = [
        make_request(name, 5 + i, max_tokens=24, grammar="any", ignore_eos=False) for i, name in enumerate("abc")
    ]
    driver.run(*workload)
    driver.check_outputs(*workload)
    drafted = [row for output in driver.outputs for row in output.rows if row.draft_token_ids and row.token_in_flight]
    assert drafted
    assert all(row.forced and row.waits for row in drafted)
