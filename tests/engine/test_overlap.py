"""With overlap every request's tokens, log-probabilities and end are bitwise those without, on real
models and the real runner, whatever happens to the request meanwhile."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from serve_app.model.token_samplers import DeviceSampler
from tests.engine.harness import Harness, Run
from tests.engine.test_speculation import subjects
from tests.examples import examples
from tests.models import tiny_model

FEW = tuple((token_id, 12.0) for token_id in (20, 21, 22, 1))
"""A bias that leaves little but three tokens and the end of the sequence."""


def num_ahead(run: Run) -> int:
    """Rows that were launched before their token was known."""
    return sum(row.token_in_flight for record in run.records for row in record.rows)


@st.composite
def requests(draw: st.DrawFn) -> EngineRequest:
    stem = draw(st.sampled_from([(5,), (20, 21) * 9, tuple(range(30, 70))]))
    return EngineRequest(
        "",
        (*stem, *draw(st.lists(st.integers(2, 190), max_size=20))),
        SamplingParams(
            n=draw(st.sampled_from([1, 1, 3])),
            seed=draw(st.integers(0, 5)),
            max_tokens=draw(st.integers(1, 24)),
            min_tokens=draw(st.sampled_from([0, 0, 1])),
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_p=draw(st.sampled_from([1.0, 0.8])),
            logit_bias=draw(st.sampled_from([(), FEW])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.2])),
            stop_token_ids=draw(st.sampled_from([(), (22,)])),
            allowed_token_ids=draw(st.sampled_from([(), (), (1, 20, 21, 22, 23)])),
            bad_words=draw(st.sampled_from([(), (), ((20,),), ((20, 21), (21, 20, 22), (20, 20), (21, 21))])),
            logprobs=draw(st.sampled_from([None, 2])),
            prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        ),
        priority=draw(st.integers(0, 1)),
    )


@given(
    st.lists(requests(), min_size=1, max_size=6),
    st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([18, 24, 64]),
            "max_num_seqs": st.integers(1, 6),
            "max_num_batched_tokens": st.sampled_from([8, 24, 512]),
            "policy": st.sampled_from(["fcfs", "priority", "static"]),
            "prefill": st.sampled_from(["fused", "separate"]),
            "max_wait_s": st.just(0.0),
            "enable_prefix_cache": st.booleans(),
        }
    ),
)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_as_one_request_alone_without_overlap(
    tiny_llama: PagedModel, workload: list[EngineRequest], config: dict[str, Any]
) -> None:
    workload = [replace(request, request_id=f"r{i}") for i, request in enumerate(workload)]
    together = Harness(tiny_llama, overlap="on", **config).run(workload)
    alone = Harness(tiny_llama, overlap="off", speculation="off", enable_prefix_cache=False)
    for request in workload:
        for key, expected in alone.run([request]).outcomes.items():
            assert replace(together.outcomes[key], num_cached_tokens=None) == replace(expected, num_cached_tokens=None)


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 24}, {"prefill": "separate"}, {"num_blocks": 18}])
def test_rows_are_launched_before_their_token_is_known(tiny_llama: PagedModel, changes: dict[str, Any]) -> None:
    workload = subjects()
    off = Harness(tiny_llama, speculation="off", **changes).run(workload)
    on = Harness(tiny_llama, overlap="on", **changes).run(workload)
    assert on.outcomes == off.outcomes
    assert num_ahead(off) == 0
    assert num_ahead(on) > 100
    assert any(record.preempted for record in on.records) == ("num_blocks" in changes)


def test_off_on_a_cpu_unless_asked_for(tiny_llama: PagedModel) -> None:
    assert num_ahead(Harness(tiny_llama).run(subjects())) == 0


def test_times_of_overlapping_steps_do_not_overlap(tiny_llama: PagedModel) -> None:
    harness = Harness(tiny_llama, overlap="on")
    records = harness.run(subjects()).records
    assert [record.step for record in records] == list(range(len(records)))
    for before, after in zip(records, records[1:], strict=False):
        assert before.started_at + before.model_s + before.update_s <= after.started_at
        assert min(after.schedule_s, after.model_s, after.update_s) >= 0


def test_aborts_with_a_step_in_flight(tiny_llama: PagedModel) -> None:
    """The last step computes what nobody wants any more; then the engine is at rest."""
    core = Harness(tiny_llama, overlap="on").core
    workload = subjects()
    for request in workload:
        core.add(request)
    assert core.step() == []
    core.abort("greedy")
    assert {delta.request_id for delta in core.step() or []} >= {"seeded", "stop"}
    for request in workload:
        core.abort(request.request_id)
        core.check_invariants()
    assert core.stats().blocks_used == 0
    assert core.has_unfinished
    assert core.step() == []
    assert not core.has_unfinished
    assert core.step() is None


def test_a_slot_changes_hands_while_its_last_row_is_in_flight(tiny_llama: PagedModel) -> None:
    """One slot: whoever ends by a stop token leaves a row in flight, and the next one starts in the
    same slot."""
    base = subjects()[1]
    first = Harness(tiny_llama, speculation="off").run([base]).outcomes["seeded", 0].token_ids
    stops = [
        replace(base, request_id=f"r{i}", params=replace(base.params, stop_token_ids=(first[i],), max_tokens=30))
        for i in range(4)
    ]
    off = Harness(tiny_llama, max_num_seqs=1, speculation="off").run(stops)
    on = Harness(tiny_llama, max_num_seqs=1, overlap="on").run(stops)
    assert {key: replace(o, num_cached_tokens=None) for key, o in on.outcomes.items()} == {
        key: replace(o, num_cached_tokens=None) for key, o in off.outcomes.items()
    }
    assert {outcome.finish_reason for outcome in on.outcomes.values()} == {FinishReason.STOP}


def test_a_row_that_breaks_with_a_step_in_flight_ends_alone(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are run again from the ids that the step before left on the device."""
    good = subjects()
    expected = Harness(tiny_llama, speculation="off").run(good).outcomes
    harness = Harness(tiny_llama, overlap="on")
    forward, calls = tiny_llama.forward, 0

    def break_on_poison(input_ids: Tensor, positions: Tensor, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if 199 in input_ids or (calls == 30 and len(batch.kv_lens) > 1):
            raise RuntimeError("poisoned")
        return forward(input_ids, positions, batch)

    monkeypatch.setattr(tiny_llama, "forward", break_on_poison)
    bad = EngineRequest("bad", (4, 199, 9), SamplingParams(max_tokens=5, seed=1))
    outcomes = harness.run([good[0], bad, *good[1:]]).outcomes
    assert outcomes.pop(("bad", 0)).error == "the model failed on this request"
    assert outcomes == expected
    assert calls > 30


def test_not_a_number_is_said_of_a_row_whose_next_one_is_in_flight(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = subjects()[0]
    bad = replace(subjects()[1], request_id="bad")
    expected = Harness(tiny_llama, speculation="off").run([good]).outcomes
    harness = Harness(tiny_llama, overlap="on")
    compute_logits, calls = tiny_llama.executor.compute_logits, 0

    def spoil(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        logits = compute_logits(hidden)
        if calls == 7:
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(tiny_llama.executor, "compute_logits", spoil)
    outcomes = harness.run([good, bad]).outcomes
    assert "finite" in (outcomes.pop(("bad", 0)).error or "")
    assert outcomes == expected


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the sampling kernels need Triton")
@pytest.mark.usefixtures("cheap_drafts")
def test_penalties_are_counted_where_tokens_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels, whose tokens the host reads a step late; where drafts stand before a place,
    with them."""
    hot = {"frequency_penalty": 1.0, "presence_penalty": 0.3, "repetition_penalty": 1.3, "max_tokens": 14}
    circling = {"temperature": 0.0, "max_tokens": 12, "logit_bias": ((9, 60.0), (8, 60.0)), "frequency_penalty": 2.0}
    workload = [
        EngineRequest("greedy", (5, 6, 7) * 4, SamplingParams(temperature=0.0, ignore_eos=True, **hot)),
        EngineRequest("circling", (5, 6, 7) * 4, SamplingParams(**circling, ignore_eos=True)),
        EngineRequest("drawn", (8, 9), SamplingParams(seed=3, top_k=20, n=2, logprobs=1, ignore_eos=True, **hot)),
        EngineRequest("plain", (20, 21), SamplingParams(seed=4, max_tokens=9, ignore_eos=True)),
    ]
    model = from_module(tiny_model("llama", torch.float32), max_model_len=64, attention_backend="reference")
    expected = Harness(model, speculation="off").run(workload).outcomes
    from serve_app.model.gpu.sampling import choose

    def choose_from(hidden: Tensor, parameters: Tensor) -> Tensor:
        return choose(model.compute_logits(hidden), parameters)

    on_device = DeviceSampler(model.executor, model.eos_token_ids, choose_from)
    monkeypatch.setattr(model, "_sampler", on_device)
    ahead = Harness(model, overlap="on", max_num_seqs=3).run(workload)
    drafted = Harness(model, overlap="off", max_num_seqs=3).run(workload)
    for key, outcome in expected.items():
        assert ahead.outcomes[key].token_ids == outcome.token_ids
        assert drafted.outcomes[key].token_ids == outcome.token_ids
    assert num_ahead(ahead) > 30
    assert sum(record.num_accepted_tokens for record in drafted.records) > 3
