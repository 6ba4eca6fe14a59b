"""With draft tokens every request's tokens, log-probabilities and end are bitwise those without, on
real models: the C kernels in both modes and plain torch, alone and among others, and whatever
happens to the request meanwhile.

Drafts are taken to be cheap here, so that how many there are depends on no clock.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from serve_app.text.tokenizer import load_tokenizer
from tests.engine.harness import Harness, Outcome, Run
from tests.models import needs_compiler, tiny_model

pytestmark = pytest.mark.usefixtures("cheap_drafts")

FEW = tuple((token_id, 12.0) for token_id in (20, 21, 22))
"""A bias that leaves little but three tokens, so that sampled text repeats itself."""
PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=48, logprobs=3),
    "seeded": SamplingParams(seed=7, temperature=0.8, logit_bias=FEW, max_tokens=48, logprobs=0),
    "top p": SamplingParams(seed=8, temperature=0.9, top_p=0.7, top_k=5, logit_bias=FEW, max_tokens=48, logprobs=2),
    "penalties": SamplingParams(
        seed=9,
        temperature=0.4,
        logit_bias=FEW,
        repetition_penalty=1.1,
        frequency_penalty=0.3,
        presence_penalty=0.2,
        max_tokens=48,
        logprobs=1,
    ),
    "stop": SamplingParams(
        seed=10, logit_bias=(*FEW, (23, 9.0)), stop_token_ids=(23,), min_tokens=17, max_tokens=90, logprobs=0
    ),
    "choices": SamplingParams(seed=11, n=2, temperature=0.7, logit_bias=FEW, max_tokens=40, logprobs=0),
}


def subjects() -> list[EngineRequest]:
    prompt = (5, *(20, 21, 22) * 6, 9)
    return [EngineRequest(name, (3 + i, *prompt), params) for i, (name, params) in enumerate(PARAMS.items())]


def counts(run: Run) -> tuple[int, int]:
    """Draft tokens computed, and accepted."""
    return (
        sum(record.num_draft_tokens for record in run.records),
        sum(record.num_accepted_tokens for record in run.records),
    )


@pytest.fixture(
    scope="module", params=[*(pytest.param(name, marks=needs_compiler) for name in ("kernels", "int8")), "torch"]
)
def model(request: pytest.FixtureRequest, tiny_llama: PagedModel) -> PagedModel:
    if request.param == "kernels":
        return tiny_llama
    options: dict[str, Any] = {"quantization": "int8"} if request.param == "int8" else {"attention_backend": "cpu"}
    return from_module(tiny_model("llama", torch.float32), max_model_len=256, **options)


@pytest.fixture(scope="module")
def plain(model: PagedModel) -> dict[tuple[str, int], Outcome]:
    """Each subject alone, a token per step."""
    harness = Harness(model, speculation="off")
    outcomes: dict[tuple[str, int], Outcome] = {}
    for request in subjects():
        run = harness.run([request])
        assert counts(run) == (0, 0)
        outcomes |= run.outcomes
    return outcomes


def check(outcomes: dict[tuple[str, int], Outcome], plain: dict[tuple[str, int], Outcome]) -> None:
    for key, outcome in outcomes.items():
        if key in plain:
            # Comparing floats with == compares them bitwise (none is nan or -0).
            assert replace(outcome, num_cached_tokens=None) == replace(plain[key], num_cached_tokens=None), key


def test_alone(model: PagedModel, plain: dict[tuple[str, int], Outcome]) -> None:
    harness = Harness(model)
    accepted_by = {}
    for request in subjects():
        run = harness.run([request])
        check(run.outcomes, plain)
        drafted, accepted = counts(run)
        accepted_by[request.request_id] = accepted
        assert accepted < drafted or request.request_id == "greedy"
        num_tokens = sum(len(outcome.token_ids) for outcome in run.outcomes.values())
        assert accepted <= sum(record.num_decode_tokens for record in run.records)
        assert sum(record.num_output_tokens for record in run.records) == num_tokens
    assert all(accepted_by.values()), accepted_by


def test_the_default_model_copies(default_model: PagedModel) -> None:
    """Its heads, groups and tables of several blocks; penalties come and go with what is
    accepted."""
    text = " red, green, blue, yellow, black, white, red, green, blue, yellow, black, white, red,"
    prompt = tuple(load_tokenizer("default").encode(f"Again and again:{text}{text}{text}"))
    greedy = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    warm = SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.05, max_tokens=40, logprobs=0)
    requests = [EngineRequest("greedy", prompt, greedy), EngineRequest("warm", prompt[5:], warm)]
    requests += [EngineRequest(f"plain {i}", prompt[i:], replace(greedy, logprobs=None)) for i in range(7)]
    plain, drafting = (Harness(default_model, speculation=how).run(requests) for how in ("off", "auto"))
    assert drafting.outcomes == plain.outcomes
    assert counts(drafting)[1] > 30
    assert len(drafting.records) < 0.7 * len(plain.records)


def test_the_subjects_end_in_both_ways(plain: dict[tuple[str, int], Outcome]) -> None:
    assert plain["stop", 0].finish_reason is FinishReason.STOP
    assert 17 <= len(plain["stop", 0].token_ids) < 90
    assert len({tuple(outcome.token_ids) for outcome in plain.values()}) == len(plain)


@pytest.mark.parametrize("together", [["greedy", "seeded"], ["penalties", "stop"], ["choices"], [*PARAMS]])
def test_among_others(model: PagedModel, plain: dict[tuple[str, int], Outcome], together: list[str]) -> None:
    """In chunks, with a long prompt among them, the second time from the prefix cache."""
    requests = [request for request in subjects() if request.request_id in together]
    late = EngineRequest("late", tuple(range(2, 150)), SamplingParams(max_tokens=3, seed=1))
    harness = Harness(model, max_num_batched_tokens=24)
    for _ in range(2):
        run = harness.run([*requests, late])
        assert counts(run)[1] > 0
        check(run.outcomes, plain)


def test_preempted(model: PagedModel, plain: dict[tuple[str, int], Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool for one and a half (which takes a short context); both run at once all the same."""
    monkeypatch.setattr(model, "max_model_len", 96)
    run = Harness(model, num_blocks=8).run(subjects()[:2])
    assert any(record.preempted for record in run.records)
    assert counts(run)[1] > 0
    check(run.outcomes, plain)


@pytest.mark.parametrize("cut", [1, 20, 39])
def test_after_failover(model: PagedModel, plain: dict[tuple[str, int], Outcome], cut: int) -> None:
    harness = Harness(model)
    for request in subjects():
        known = [plain[request.request_id, choice].token_ids for choice in range(request.params.n)]
        if any(len(token_ids) <= cut for token_ids in known):
            continue
        run = harness.run([replace(request, prior_output_ids=tuple(tuple(ids[:cut]) for ids in known))])
        for key, outcome in run.outcomes.items():
            assert outcome.token_ids == plain[key].token_ids[cut:], key
            assert outcome.logprobs == plain[key].logprobs[cut:], key


def test_an_abort_in_mid_speculation_leaves_nothing(tiny_llama: PagedModel) -> None:
    harness = Harness(tiny_llama)
    harness.core.add(subjects()[0])
    while not harness.records or not harness.records[-1].num_draft_tokens:
        harness.core.step()
    harness.core.abort("greedy")
    harness.core.check_invariants()
    assert harness.core.stats().blocks_used == 0


def test_what_fails_behind_a_draft_is_none_of_its_concern(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits after drafts that are not numbers end the draft, not the request, which never asked
    for them."""
    request = subjects()[0]
    expected = Harness(tiny_llama, speculation="off").run([request]).outcomes
    harness = Harness(tiny_llama)
    compute_logits, spoilt = tiny_llama.executor.compute_logits, 0

    def spoil_all_but_the_first(hidden: Tensor) -> Tensor:
        nonlocal spoilt
        logits = compute_logits(hidden)
        logits[1:] = torch.nan
        spoilt += len(logits) - 1
        return logits

    monkeypatch.setattr(tiny_llama.executor, "compute_logits", spoil_all_but_the_first)
    run = harness.run([request])
    assert spoilt > 0
    assert counts(run)[1] == 0
    assert run.outcomes == expected


def test_a_step_with_drafts_that_breaks_is_repeated_row_by_row(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [subjects()[0], subjects()[3]]
    expected = Harness(tiny_llama, speculation="off").run(requests).outcomes
    harness = Harness(tiny_llama)
    forward, broken = tiny_llama.forward, 0

    def fail_with_two_rows(input_ids: Tensor, positions: Tensor, batch: Any) -> Tensor:
        nonlocal broken
        if len(batch.kv_lens) > 1:
            broken += 1
            raise RuntimeError("too much at once")
        return forward(input_ids, positions, batch)

    monkeypatch.setattr(tiny_llama, "forward", fail_with_two_rows)
    run = harness.run(requests)
    assert broken > 5
    assert counts(run)[1] > 0
    assert run.outcomes == expected
