import math
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import serve_app
from serve_app.core.results import FinishReason
from serve_app.core.sampling_params import SamplingParams
from serve_app.engine.core import EngineCore
from serve_app.engine.llm import LLM
from serve_app.errors import ConfigError, ContextLengthError, EngineError, InvalidRequestError
from serve_app.model.attention_backend import AttentionBatch
from serve_app.model.paged_model import PagedModel
from tests.models import tiny_model
from tests.sentencepiece import sentencepiece_tokenizer


@pytest.fixture
def llm(default_model: PagedModel, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """On the model that is loaded already."""
    monkeypatch.setattr("serve_app.engine.core.load_model", lambda options, on_progress: default_model)
    return LLM(kv_cache_gib=0.5, max_num_batched_tokens=64)


def folder(path: Path, vocab_size: int) -> Path:
    """A tiny model with so many logits and a tokenizer of 291 ids that writes word starts as
    "▁"."""
    model = tiny_model("llama", torch.float32)
    model.resize_token_embeddings(vocab_size)
    model.save_pretrained(path)
    sentencepiece_tokenizer().save_pretrained(path)
    return path


def test_text_in_text_out(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    (result,) = llm.generate("The capital of France is", params)
    (output,) = result.outputs
    assert result.prompt == "The capital of France is"
    assert output.text.startswith(" Paris")
    assert llm.tokenizer.decode(output.token_ids) == output.text
    assert output.finish_reason is FinishReason.LENGTH
    assert output.logprobs is None
    assert result.prompt_logprobs is None


def test_odds_of_answers(llm: LLM) -> None:
    answers = [" Paris", " London", " a city"]
    told = llm.odds("The capital of France is", answers)
    assert [one.answer for one in told] == answers
    assert max(told, key=lambda one: one.probability).answer == " Paris"
    assert math.fsum(one.probability for one in told) == pytest.approx(1)
    prompt = llm.tokenizer.encode("The capital of France is")
    whole = [*prompt, *llm.tokenizer.encode(" London", add_special_tokens=False), llm.core.info.eos_token_ids[0]]
    (scored,) = llm.generate([whole], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    expected = math.fsum(entry.logprob for entry in (scored.prompt_logprobs or [])[len(prompt) - 1 :])
    assert told[1].logprob == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InvalidRequestError, match="answers"):
        llm.odds("x", [])


def test_lists_keep_their_order_and_their_params(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
        SamplingParams(seed=1, n=2, max_tokens=2, ignore_eos=True, logprobs=1, prompt_logprobs=0),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    ]
    results = llm.generate([[504, 3575], [504, 3575, 282], [504]], params)
    assert [result.prompt for result in results] == [None] * 3
    assert [[len(output.token_ids) for output in result.outputs] for result in results] == [[6], [2, 2], [3]]
    assert [output.index for output in results[1].outputs] == [0, 1]
    for output in results[1].outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(entry.logprob <= entry.top[0][1] <= 0 and math.isfinite(entry.logprob) for entry in output.logprobs)
    assert [entry.token_id for entry in results[1].prompt_logprobs or ()] == [3575, 282]


def test_the_end_token_is_not_text(llm: LLM) -> None:
    """Id 2 ends a turn; biased to certainty, it comes first."""
    params = SamplingParams(temperature=0.0, logit_bias=((2, 100.0),), max_tokens=5)
    (output,) = llm.generate("Hello", params)[0].outputs
    assert (output.token_ids, output.text, output.finish_reason) == ([2], "", FinishReason.STOP)


def test_text_is_what_a_server_shows(tmp_path: Path) -> None:
    """The first word keeps the space between it and the prompt, and a stop token says "end"
    only."""
    llm = LLM(str(folder(tmp_path, 291)), kv_cache_gib=0.01)
    (world,) = llm.tokenizer.encode("world")
    params = SamplingParams(temperature=0.0, logit_bias=((world, 100.0),), max_tokens=2)
    stop = replace(params, stop_token_ids=(world,))
    (going_on,), (ended,) = (result.outputs for result in llm.generate(["a", "a"], [params, stop]))
    assert (going_on.token_ids, going_on.text) == ([world, world], " world world")
    assert (ended.token_ids, ended.text, ended.finish_reason) == ([world], "", FinishReason.STOP)


def test_a_tokenizer_wider_than_the_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: the tokenizer has 291 ids, but the model has only 290 logits"):
        LLM(str(folder(tmp_path, 290)), kv_cache_gib=0.01)


def test_closing_gives_the_memory_back(tmp_path: Path) -> None:
    with LLM(str(folder(tmp_path, 291)), kv_cache_gib=0.01) as llm:
        model = weakref.ref(llm.core)
        llm.generate("a", SamplingParams(max_tokens=1))
    assert model() is None
    llm.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.generate("a")


def test_the_tokenizer_may_be_elsewhere(tmp_path: Path) -> None:
    elsewhere = folder(tmp_path / "whole", 291)
    model = tmp_path / "model"
    shutil.copytree(elsewhere, model, ignore=shutil.ignore_patterns("tokenizer*"))
    with LLM(str(model), tokenizer=str(elsewhere), kv_cache_gib=0.01) as llm:
        tokenizer = llm.tokenizer
        assert llm.generate("world", SamplingParams(max_tokens=1))[0].prompt_token_ids == tokenizer.encode("world")
    with LLM(str(model), tokenizer=tokenizer, kv_cache_gib=0.01) as again:
        assert again.tokenizer is tokenizer


def test_a_refused_prompt_runs_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate([[5], [5] * 600], SamplingParams(max_tokens=5))
    with pytest.raises(InvalidRequestError, match="2 entries for 1"):
        llm.generate("x", [SamplingParams(), SamplingParams()])
    assert not llm.core.has_unfinished


def test_a_failing_prompt_costs_nobody_else(
    llm: LLM, default_model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model fails on every packed row that holds token 9, as a kernel would that dislikes one
    shape."""
    forward = default_model.forward

    def fail_on_9(input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        if 9 in input_ids:
            raise RuntimeError("poisoned")
        return forward(input_ids, positions, batch)

    monkeypatch.setattr(default_model, "forward", fail_on_9)
    params = SamplingParams(temperature=0.0, max_tokens=3, n=2, ignore_eos=True)
    bad, good = llm.generate([[5, 9], [504, 3575]], params)
    for output in bad.outputs:
        assert (output.finish_reason, output.text, output.token_ids) == (FinishReason.ERROR, "", [])
        assert output.error == "the model failed on this request"
    for output in good.outputs:
        assert (output.finish_reason, len(output.token_ids), output.error) == (FinishReason.LENGTH, 3, None)


def test_a_prompt_without_an_embedding_is_an_error(
    llm: LLM, default_model: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    paris, france, cheese = llm.embed(["The capital of France", "Paris, a city in France", "Cheese is made from milk"])
    assert paris @ france > paris @ cheese
    broken = RuntimeError("broken")

    def fail(*arguments: object) -> Tensor:
        raise broken

    forward = default_model.forward
    monkeypatch.setattr(default_model, "forward", lambda ids, *rest: fail() if 9 in ids else forward(ids, *rest))
    with pytest.raises(EngineError, match="prompt 1: the model failed on this request"):
        llm.embed([[5], [5, 9]])


def test_a_failing_engine_is_an_error_and_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: EngineCore) -> None:
        raise EngineError("broken")

    monkeypatch.setattr(EngineCore, "step", broken)
    with pytest.raises(EngineError, match="broken"):
        llm.generate([[5], [6]], SamplingParams(max_tokens=5))
    assert not llm.core.has_unfinished


def test_the_package_offers_it() -> None:
    assert serve_app.LLM is LLM
    assert serve_app.SamplingParams is SamplingParams
