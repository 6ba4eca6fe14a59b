import pytest
import torch
from torch import Tensor

from serve_app.core.request import EngineRequest
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.model import runner as runner_module
from serve_app.model.attention_backend import AttentionBatch
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from tests.engine.harness import Harness
from tests.models import tiny_model

POISON = 199


def make_requests(count: int, **fields: object) -> list[EngineRequest]:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **{"seed": 1, **fields})
    return [EngineRequest(f"r{i}", tuple(range(2 + i, 12 + 3 * i)), params) for i in range(count)]


def test_prompt_logprobs_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices of three positions, so that their borders are crossed, and in chunks."""
    monkeypatch.setattr(runner_module, "_LOGITS_PER_SLICE", 3 * 200)
    module = tiny_model("qwen2")
    prompt = torch.randint(2, 199, (37,), generator=torch.Generator().manual_seed(2)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=4, logprobs=4)
    harness = Harness(from_module(module, max_model_len=64), max_num_batched_tokens=16)
    outcome = harness.run([EngineRequest("r", tuple(prompt), params)]).outcomes["r", 0]
    with torch.inference_mode():
        expected = module(torch.tensor([[*prompt, *outcome.token_ids]])).logits[0].log_softmax(-1)
    entries = [*outcome.prompt_logprobs, *outcome.logprobs]
    assert [entry.token_id for entry in entries] == [*prompt[1:], *outcome.token_ids]
    for row, entry in zip(expected, entries, strict=False):
        best = row.topk(4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-9)


def test_prompt_logprobs_of_choices_and_cached_prompts_are_complete(tiny_llama: PagedModel) -> None:
    request = make_requests(1, n=2, prompt_logprobs=1)[0]
    harness = Harness(tiny_llama)
    first, second = (harness.run([request]).outcomes for _ in range(2))
    assert len(first["r0", 0].prompt_logprobs) == 9
    assert first["r0", 0].prompt_logprobs == second["r0", 0].prompt_logprobs


@pytest.mark.parametrize("cached", [False, True])
def test_prompt_logprobs_from_a_token_on_are_the_last_ones_of_all(tiny_llama: PagedModel, cached: bool) -> None:
    prompt = tuple(range(2, 60))
    whole = EngineRequest("whole", prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
    expected = Harness(tiny_llama).run([whole]).outcomes["whole", 0].prompt_logprobs
    harness = Harness(tiny_llama, max_num_batched_tokens=16, enable_prefix_cache=cached)
    harness.run([whole])
    for first in (2, 16, 17, 40, 57, 58):
        params = SamplingParams(max_tokens=1, prompt_logprobs=1, prompt_logprobs_from=first)
        outcome = harness.run([EngineRequest("r", prompt, params)]).outcomes["r", 0]
        assert outcome.prompt_logprobs == expected[first - 1 :]
        assert outcome.num_cached_tokens == cached * min(48, (first - 1) // 16 * 16)


def test_not_a_number_fails_the_row_that_has_it(tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model breaks on one request's first token only, and it is the third row of that step."""
    expected = Harness(tiny_llama).run(make_requests(5)).outcomes
    compute_logits = tiny_llama.executor.compute_logits
    calls = 0

    def broken_once(hidden: Tensor) -> Tensor:
        nonlocal calls
        logits = compute_logits(hidden)
        if hidden.shape[0] == 5:
            calls += 1
            if calls == 1:
                logits[2] = torch.nan
        return logits

    harness = Harness(tiny_llama, max_num_seqs=8)
    monkeypatch.setattr(tiny_llama.executor, "compute_logits", broken_once)
    outcomes = harness.run(make_requests(5)).outcomes
    assert calls >= 1
    assert outcomes["r2", 0].finish_reason is FinishReason.ERROR
    assert "finite" in (outcomes["r2", 0].error or "")
    for i in (0, 1, 3, 4):
        assert outcomes[f"r{i}", 0] == expected[f"r{i}", 0]


def test_an_exception_ends_only_the_request_that_causes_it(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With penalties, whose history would be wrong if a row that runs twice were remembered
    twice."""
    fields = {"logprobs": 1, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "prompt_logprobs": 0}
    good = make_requests(4, **fields)
    expected = Harness(tiny_llama).run(good).outcomes
    harness = Harness(tiny_llama)
    forward = tiny_llama.forward

    def fail_on_poison(input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        if POISON in input_ids:
            raise RuntimeError("poisoned")
        return forward(input_ids, positions, batch)

    monkeypatch.setattr(tiny_llama, "forward", fail_on_poison)
    bad = EngineRequest("bad", (4, POISON, 9), SamplingParams(max_tokens=5, seed=1))
    outcomes = harness.run([good[0], bad, *good[1:]]).outcomes
    assert outcomes.pop(("bad", 0)).error == "the model failed on this request"
    assert outcomes == expected


def test_an_exception_after_sampling_changes_no_history(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(3, frequency_penalty=1.5, prompt_logprobs=1, logprobs=0)
    expected = Harness(tiny_llama).run(requests).outcomes
    harness = Harness(tiny_llama)
    rank, calls = runner_module.rank, 0

    def fail_once(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return rank(*args)

    monkeypatch.setattr(runner_module, "rank", fail_once)
    assert harness.run(requests).outcomes == expected
    assert calls > 2


def test_a_dead_device_is_not_blamed_on_requests(tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tiny_llama)

    def broken(*args: object) -> Tensor:
        raise RuntimeError("device lost")

    monkeypatch.setattr(tiny_llama, "forward", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        harness.run(make_requests(2))
