"""A request's tokens and log-probabilities are bitwise the same whatever happens around it and to
it, on the real
model in float32: alone, batched, chunked, preempted, with a cached prefix, continued after a
failover."""

from dataclasses import replace

import pytest

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.paged_model import PagedModel
from serve_app.text.tokenizer import load_tokenizer
from tests.engine.harness import Harness, Outcome

pytestmark = pytest.mark.wide

MAX_TOKENS = 12
TEXT = (
    "Continuous batching lets a server put new requests into the batch at every step, instead of waiting until the "
    "longest of the old ones is done. In one sentence, the reason why this helps is that"
)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=3),
    "seeded": SamplingParams(seed=7, temperature=0.9, top_p=0.95, max_tokens=MAX_TOKENS, logprobs=0),
    "whole distribution": SamplingParams(seed=8, max_tokens=MAX_TOKENS, logprobs=1),
    "penalties": SamplingParams(
        seed=9,
        temperature=0.7,
        top_k=50,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        min_tokens=6,
        max_tokens=MAX_TOKENS,
        logprobs=2,
    ),
    "three choices": SamplingParams(
        seed=10,
        n=3,
        temperature=1.2,
        min_p=0.02,
        bad_words=((260,), *((first, last) for first in (28, 30, 198, 253, 282) for last in (216, 253, 260, 339))),
        max_tokens=MAX_TOKENS,
        logprobs=0,
    ),
}
Signature = dict[str, list[tuple[list[int], list[object], object]]]


def subjects(prompt: list[int]) -> list[EngineRequest]:
    return [EngineRequest(name, tuple(prompt), params) for name, params in PARAMS.items()]


def crowd(prompt: list[int], count: int) -> list[EngineRequest]:
    """Other requests, of other lengths; half of them begin like the subjects."""
    requests = []
    for i in range(count):
        ids = prompt[: 9 + 5 * i] if i % 2 else [200 + i, *prompt[: 3 * i]]
        params = SamplingParams(seed=i, temperature=0.8, max_tokens=6 + i)
        requests.append(EngineRequest(f"crowd {i}", tuple(ids), params))
    return requests


def signature(outcomes: dict[tuple[str, int], Outcome], name: str) -> list[tuple[list[int], list[object], object]]:
    """Everything that a client sees; comparing floats with == compares them bitwise (none is nan or
    -0)."""
    return [
        (outcome.token_ids, list(outcome.logprobs), outcome.finish_reason)
        for (request_id, _), outcome in sorted(outcomes.items())
        if request_id == name
    ]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return load_tokenizer("default").encode(TEXT)


@pytest.fixture(scope="module")
def alone(default_model: PagedModel, prompt: list[int]) -> Signature:
    """Each subject with an engine of its own, whole prompt in one step."""
    result = {}
    for request in subjects(prompt):
        harness = Harness(default_model, max_num_batched_tokens=64, enable_prefix_cache=False)
        result[request.request_id] = signature(harness.run([request]).outcomes, request.request_id)
    return result


def check(harness_run: dict[tuple[str, int], Outcome], alone: Signature) -> None:
    for name, expected in alone.items():
        assert signature(harness_run, name) == expected, name


def test_the_subjects_have_something_to_compare(alone: Signature) -> None:
    for name, choices in alone.items():
        assert len(choices) == PARAMS[name].n
        for token_ids, logprobs, _ in choices:
            assert len(token_ids) == len(logprobs) > 0
    assert len({tuple(token_ids) for token_ids, _, _ in alone["three choices"]}) > 1


def test_in_a_batch_of_sixteen(default_model: PagedModel, prompt: list[int], alone: Signature) -> None:
    run = Harness(default_model).run([*crowd(prompt, 9), *subjects(prompt)])
    assert max(len(record.rows) for record in run.records) == 16
    check(run.outcomes, alone)


def test_chunked(default_model: PagedModel, prompt: list[int], alone: Signature) -> None:
    """Chunk lengths change from step to step, with the number of decodes that come first."""
    run = Harness(default_model, max_num_seqs=9, max_num_batched_tokens=13).run([*subjects(prompt), *crowd(prompt, 2)])
    assert len({row.num_tokens for record in run.records for row in record.rows if row.is_prefill}) > 3
    check(run.outcomes, alone)


@pytest.mark.parametrize(
    ("num_blocks", "order", "victims"),
    [(8, 1, {"seeded", "three choices"}), (12, 1, {"whole distribution"}), (8, -1, {"penalties", "greedy"})],
)
def test_preempted(
    default_model: PagedModel,
    prompt: list[int],
    alone: Signature,
    monkeypatch: pytest.MonkeyPatch,
    num_blocks: int,
    order: int,
    victims: set[str],
) -> None:
    """A pool for two or three requests (which takes a short context): the victims lose their blocks
    in mid-output."""
    monkeypatch.setattr(default_model, "max_model_len", 96)
    run = Harness(default_model, num_blocks=num_blocks).run(subjects(prompt)[::order])
    assert victims <= {request_id for record in run.records for request_id, _ in record.preempted}
    check(run.outcomes, alone)


def test_prefix_hit(default_model: PagedModel, prompt: list[int], alone: Signature) -> None:
    harness = Harness(default_model)
    harness.run(crowd(prompt, 6))
    run = harness.run(subjects(prompt))
    assert run.outcomes["greedy", 0].num_cached_tokens
    check(run.outcomes, alone)
    again = harness.run(subjects(prompt))
    assert (again.outcomes["greedy", 0].num_cached_tokens or 0) >= len(prompt) // 16 * 16 - 16
    check(again.outcomes, alone)


@pytest.mark.parametrize("cut", [1, 5, MAX_TOKENS - 1])
def test_after_failover(default_model: PagedModel, prompt: list[int], alone: Signature, cut: int) -> None:
    """Another engine goes on from the first `cut` tokens of every choice, amid other work."""
    requests = []
    for request in subjects(prompt):
        prior = tuple(tuple(token_ids[:cut]) for token_ids, _, _ in alone[request.request_id])
        if all(len(token_ids) > cut for token_ids, _, _ in alone[request.request_id]):
            requests.append(replace(request, prior_output_ids=prior))
    assert len(requests) >= 4
    run = Harness(default_model, max_num_batched_tokens=40).run([*crowd(prompt, 3), *requests])
    for request in requests:
        expected = [(ids[cut:], logprobs[cut:], reason) for ids, logprobs, reason in alone[request.request_id]]
        assert signature(run.outcomes, request.request_id) == expected, request.request_id


def test_prompt_logprobs(default_model: PagedModel, prompt: list[int]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, logprobs=1)
    request = EngineRequest("scored", tuple(prompt), params)
    alone = Harness(default_model, max_num_batched_tokens=64).run([request]).outcomes["scored", 0]
    assert [entry.token_id for entry in alone.prompt_logprobs] == prompt[1:]
    harness = Harness(default_model, max_num_seqs=9, max_num_batched_tokens=13)
    chunked = harness.run([*crowd(prompt, 4), request]).outcomes["scored", 0]
    assert chunked.prompt_logprobs == alone.prompt_logprobs
    assert chunked.logprobs == alone.logprobs
