"""Embeddings equal what transformers computes, whatever happens around them, and change nothing for
those beside."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import AutoModel

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import Pooling, SamplingParams
from serve_app.engine.llm import LLM
from serve_app.errors import ConfigError, ContextLengthError, InvalidRequestError
from serve_app.model.attention_backend import AttentionBatch
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from tests.engine.harness import Harness
from tests.models import needs_compiler, tiny_model
from tests.sentencepiece import sentencepiece_tokenizer

Vector = npt.NDArray[np.float32]
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 15, 16, 17, 70)
POISON = 199


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, POISON, (length,), generator=torch.Generator().manual_seed(length)).tolist())


def request(length: int, pooling: Pooling, dimensions: int | None = None) -> EngineRequest:
    name = f"{pooling} {length}"
    return EngineRequest(name, prompt(length), SamplingParams.for_embedding(pooling, dimensions))


def requests() -> list[EngineRequest]:
    return [request(length, pooling) for length in LENGTHS for pooling in POOLINGS]


def expected(module: Any, token_ids: tuple[int, ...], pooling: Pooling) -> Vector:
    with torch.inference_mode():
        states = module.base_model(torch.tensor([token_ids])).last_hidden_state[0].double()
    vector = states[-1] if pooling == "last" else states.mean(0)
    return (vector / vector.norm()).float().numpy()


def vector(data: bytes | None) -> Vector:
    assert data is not None
    return np.frombuffer(data, "<f4")


def assert_same(found: Vector, wanted: Vector) -> None:
    assert float(found @ wanted) > 0.9999
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def generating() -> list[EngineRequest]:
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True, logprobs=2)
    return [EngineRequest(f"r{i}", prompt(5 + 4 * i), params) for i in range(15)]


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(
    ("arch", "backend"),
    [pytest.param("qwen3", "kernels", marks=needs_compiler), ("qwen3", "cpu"), ("gpt2", "cpu"), ("opt", "cpu")],
)
@pytest.mark.wide
def test_they_are_transformers_alone_and_among_generating_rows(arch: str, backend: str, overlap: str) -> None:
    module = tiny_model(arch, torch.float32)
    model = from_module(module, attention_backend=backend)
    config: dict[str, Any] = {"max_num_batched_tokens": 32, "overlap": overlap}
    alone = Harness(model, max_num_seqs=16, **config).run(generating()).outcomes
    for one in requests():
        found = Harness(model, **config).run([one]).outcomes[one.request_id, 0]
        assert_same(vector(found.embedding), expected(module, one.prompt_token_ids, one.params.pooling or "last"))
    mixed = Harness(model, max_num_seqs=16, **config)
    for one in requests():
        both = mixed.run([*generating()[:8], one, *generating()[8:]]).outcomes
        found = both.pop((one.request_id, 0))
        assert_same(vector(found.embedding), expected(module, one.prompt_token_ids, one.params.pooling or "last"))
        assert [(o.token_ids, o.logprobs) for o in both.values()] == [(o.token_ids, o.logprobs) for o in alone.values()]


def test_dimensions_cut_and_have_length_1_again() -> None:
    harness = Harness(from_module(tiny_model("llama", torch.float32)))
    for pooling in POOLINGS:
        whole, cut = (
            vector(harness.run([one]).outcomes[one.request_id, 0].embedding)
            for one in (request(40, pooling), request(40, pooling, 10))
        )
        np.testing.assert_allclose(cut, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-7)
    with pytest.raises(InvalidRequestError, match="`dimensions` must be at most 64"):
        harness.core.add(request(40, "last", 65))


def test_a_mean_is_taken_over_cached_tokens_too(tiny_llama: PagedModel) -> None:
    harness = Harness(tiny_llama)
    for pooling, cached in (("last", 64), ("mean", 0)):
        one = request(70, "last" if pooling == "last" else "mean")
        first, second = (harness.run([one]).outcomes[one.request_id, 0] for _ in range(2))
        assert first.embedding == second.embedding
        assert second.num_cached_tokens == cached


def test_preempted_prompts_begin_anew(tiny_llama: PagedModel) -> None:
    """The long prompt is computed in pieces beside rows that grow, until these take its blocks."""
    one = request(200, "mean")
    alone = Harness(tiny_llama).run([one]).outcomes[one.request_id, 0]
    params = SamplingParams(seed=1, max_tokens=80, ignore_eos=True)
    others = [EngineRequest(f"r{i}", prompt(15), params) for i in range(6)]
    run = Harness(tiny_llama, num_blocks=28, max_num_batched_tokens=8, max_num_seqs=8).run([*others, one])
    assert run.num_preemptions > 0
    assert run.outcomes[one.request_id, 0].embedding == alone.embedding


def test_rows_that_run_twice_after_an_exception_count_once(
    tiny_llama: PagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request(70, "mean")
    alone = Harness(tiny_llama).run([one]).outcomes[one.request_id, 0]
    forward = tiny_llama.forward

    def fail_on_poison(input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        if POISON in input_ids:
            raise RuntimeError("poisoned")
        return forward(input_ids, positions, batch)

    monkeypatch.setattr(tiny_llama, "forward", fail_on_poison)
    bad = EngineRequest("bad", (5, POISON), SamplingParams(max_tokens=1))
    outcomes = Harness(tiny_llama, max_num_batched_tokens=32).run([one, bad]).outcomes
    assert outcomes["bad", 0].error is not None
    assert outcomes[one.request_id, 0].embedding == alone.embedding


def test_a_prompt_may_fill_the_context() -> None:
    module = tiny_model("llama", torch.float32)
    harness = Harness(from_module(module, max_model_len=64))
    for pooling in POOLINGS:
        one = request(64, pooling)
        found = harness.run([one]).outcomes[one.request_id, 0]
        assert_same(vector(found.embedding), expected(module, one.prompt_token_ids, pooling))
    with pytest.raises(ContextLengthError, match="65 tokens, but the model's context is 64"):
        harness.core.add(request(65, "mean"))


# ------------------------------------------------------------------------------------------
# checkpoints
def embedding_folder(path: Path, modules: object, pooling: object, *, tied: bool = True) -> Path:
    """As Qwen3-Embedding comes: a Qwen3 without a head, a tokenizer that ends texts, and the
    pooling."""
    tiny_model("qwen3", torch.float32, tie_word_embeddings=tied, vocab_size=291).base_model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
    tokenizer = sentencepiece_tokenizer()
    end = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", tokenizer.convert_tokens_to_ids("</s>"))])
    tokenizer.backend_tokenizer.post_processor = end
    tokenizer.save_pretrained(path)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def modules(*names: str) -> list[dict[str, object]]:
    paths = ["", "1_Pooling", "2_Normalize"]
    return [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]


QWEN3 = modules("Transformer", "Pooling", "Normalize")
TEXTS = ["a hello", "world", "hello hello a world"]


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, "last"),
        ({"embedding_dimension": 64, "pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_an_embedding_model_is_pooled_as_its_checkpoint_says(tmp_path: Path, config: object, pooling: Pooling) -> None:
    folder = str(embedding_folder(tmp_path, QWEN3, config))
    llm, module = LLM(folder, kv_cache_gib=0.01), AutoModel.from_pretrained(folder)
    found = llm.embed(TEXTS)
    assert found.shape == (3, 64)
    for one, text in zip(found, TEXTS, strict=True):
        ids = llm.tokenizer.encode(text)
        assert ids[-1] == llm.tokenizer.special_ids["</s>"]
        assert_same(one, expected(module, tuple(ids), pooling))
    other: Pooling = "mean" if pooling == "last" else "last"
    (explicit,) = llm.embed([prompt(5)], pooling=other, dimensions=16)
    wanted = expected(module, prompt(5), other)[:16]
    assert_same(explicit, wanted / np.linalg.norm(wanted))


def test_a_head_may_be_missing_where_nobody_said_that_the_embedding_is_it(tmp_path: Path) -> None:
    """Qwen3-Embedding-8B is one; without its `modules.json` it would be a damaged model."""
    folder = embedding_folder(tmp_path, QWEN3, {"pooling_mode": "lasttoken"}, tied=False)
    llm, module = LLM(str(folder), kv_cache_gib=0.01), AutoModel.from_pretrained(folder)
    (found,) = llm.embed("hello")
    assert_same(found, expected(module, tuple(llm.tokenizer.encode("hello")), "last"))
    (folder / "modules.json").unlink()
    with pytest.raises(ConfigError, match=r"weights are missing: lm_head\.weight"):
        LLM(str(folder), kv_cache_gib=0.01)


@pytest.mark.parametrize(
    ("parts", "config", "problem"),
    [
        (QWEN3, {"pooling_mode_cls_token": True}, "pools by cls"),
        (QWEN3, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "pools by lasttoken and mean"),
        (modules("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, "the module Dense"),
        ([{}], {}, "is invalid"),
    ],
)
def test_what_a_checkpoint_asks_for_and_is_not_computed_is_refused(
    tmp_path: Path, parts: object, config: object, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        LLM(str(embedding_folder(tmp_path, parts, config)), kv_cache_gib=0.01)
