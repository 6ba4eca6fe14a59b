"""GGUF files whose weights go straight from the file into the kernels' layout, against
transformers' own reading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from load_tests.random_gguf import mixed_kinds, random_contents, tensor_shapes, write_gguf
from serve_app.errors import ConfigError
from serve_app.model.cpu.build import usable_builds
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.quiet import quiet
from serve_app.model.sources.gguf_file import open_gguf
from tests.gguf_models import module_of, write_model
from tests.model.stepping import Sequences
from tests.models import needs_compiler, own_cache

pytestmark = needs_compiler

VOCAB = 288


def config(arch: str = "llama", *, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": arch,
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # transformers reads Qwen3's, which is not that of its width, from no GGUF file.
        "head_dim": 128 if arch == "qwen3" else 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0},
        "tie_word_embeddings": tied,
    }


def kinds(default: Kind, **others: Kind) -> Callable[[str, int, int], Kind]:
    return lambda name, layer, num_layers: others.get(name, default)


def transformers_module(path: Path) -> Any:
    with quiet():
        module = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return module.eval()


def load(path: Path, news: list[str] | None = None, **options: Any) -> PagedModel:
    report = None if news is None else (lambda stage, fraction: news.append(stage))
    return load_model(ModelOptions(model=str(path), cache_dir=own_cache(path.parent), **options), report)


def logits(model: PagedModel, tokens: torch.Tensor) -> torch.Tensor:
    model.allocate_kv_cache(8)
    return Sequences(model, [tokens], [[1, 2]]).step({0: len(tokens)})[0]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "kinds",
    [
        kinds(Kind.Q8_0),
        kinds(Kind.Q8_0, attn_q=Kind.Q4_0, attn_k=Kind.Q4_1, ffn_up=Kind.Q5_0, ffn_down=Kind.Q5_1),
        kinds(Kind.Q8_0, token_embd=Kind.BF16, attn_q=Kind.F16, ffn_down=Kind.F32),
        kinds(Kind.Q6_K),
        kinds(Kind.Q4_0),
        mixed_kinds,
    ],
    ids=["Q8_0", "four and five bits", "floats", "Q6_K", "Q4_0", "Q4_K_M"],
)
def test_logits_are_those_of_the_widened_weights(
    tmp_path: Path, arch: str, kinds: Callable[[str, int, int], Kind]
) -> None:
    path = write_gguf(tmp_path / "small.gguf", config(arch, tied=arch == "qwen2"), kinds)
    tokens = torch.arange(7, 37) * 7 % VOCAB
    with torch.no_grad():
        expected = transformers_module(path)(tokens[None]).logits[0]
    news: list[str] = []
    exact = logits(load(path, news, quantization="none"), tokens)
    assert "converting gguf" not in news
    assert list(dict.fromkeys(news)) == ["reading gguf", "verifying", "loading weights", "mapping weights"]
    assert float((exact - expected).abs().max() / expected.std()) < 1e-3
    int8 = logits(load(path, quantization="int8"), tokens)
    assert 0 < float((int8 - expected).abs().mean() / expected.std()) < 0.1
    if "avx512bf16" in usable_builds():
        narrow = load(path, dtype="bfloat16")
        assert (narrow.attention_backend, narrow.dtype) == ("kernels", torch.bfloat16)
        assert 0 < float((logits(narrow, tokens) - expected).abs().mean() / expected.std()) < 0.02


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_K, Kind.Q6_K])
def test_a_matrix_that_is_embedding_and_head_is_kept_once(tmp_path: Path, kind: Kind) -> None:
    model = load(write_gguf(tmp_path / "small.gguf", config(tied=True), kinds(kind)), quantization="int8")
    assert model.mapped_bytes == model.cost.weight_bytes


@pytest.mark.parametrize("attention_backend", ["kernels", "cpu"])
def test_frequencies_are_divided_as_the_file_says(tmp_path: Path, attention_backend: str) -> None:
    """Llama 3.1's positions: llama.cpp divides by a tensor that transformers does not read.
    Straight from the file, and widened to floats first."""
    stretched = config() | {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": "llama3"}}
    path = write_gguf(tmp_path / "small.gguf", stretched, kinds(Kind.Q8_0))
    tokens = torch.arange(7, 207) * 7 % VOCAB
    module = transformers_module(path)
    with torch.no_grad():
        undivided = module(tokens[None]).logits[0]
        module.model.rotary_emb.inv_freq /= torch.linspace(1.0, 8.0, 32)
        expected = module(tokens[None]).logits[0]
    model = load(path, quantization="none", attention_backend=attention_backend)
    model.allocate_kv_cache(15)
    got = Sequences(model, [tokens], [list(range(1, 15))]).step({0: len(tokens)})[0]
    assert float((got - expected).abs().max() / expected.std()) < 1e-3
    assert float((got - undivided).abs().max() / expected.std()) > 0.1
    shapes = tensor_shapes(stretched) | {"rope_freqs.weight": (31,)}
    with pytest.raises(ConfigError, match="rope_freqs.weight must contain 32 numbers, one per rotated pair of a head"):
        load(write_gguf(tmp_path / "other.gguf", stretched, shapes=shapes), attention_backend=attention_backend)


def test_an_architecture_of_another_kind_is_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Gemma 2's attention caps scores; GPT-2's matrices are stored transposed."""
    path = write_gguf(tmp_path / "small.gguf", config("gemma2", tied=True))
    news: list[str] = []
    # its own norms, which this file lacks
    with pytest.raises(ConfigError, match="weights are missing"):
        load(path, news)
    assert "converting gguf" in news
    assert "is converted to floats first: Gemma2DecoderLayer with post_feedforward_layernorm" in caplog.text
    load(write_model(tmp_path / "gpt2.gguf", "gpt2", module_of("gpt2")))
    assert "is converted to floats first: its tensors cannot be used unchanged" in caplog.text


def test_what_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    shapes = tensor_shapes(config())
    missing = {name: shape for name, shape in shapes.items() if name != "blk.1.ffn_up.weight"}
    path = write_gguf(tmp_path / "missing.gguf", config(), shapes=missing)
    with pytest.raises(ConfigError, match=r"weights are missing: model.layers.1.mlp.up_proj.weight"):
        load(path)
    path = write_gguf(tmp_path / "shape.gguf", config(), shapes=shapes | {"blk.0.ffn_up.weight": (64, 256)})
    with pytest.raises(ConfigError, match=r"wrong shape: model.layers.0.mlp.up_proj.weight"):
        load(path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    contents = random_contents()

    def damaged(name: str, shape: tuple[int, ...], kind: Kind) -> Any:
        return np.full(shape, np.nan, np.float32) if name == "output_norm.weight" else contents(name, shape, kind)

    with pytest.raises(ConfigError, match="not finite"):
        load(write_gguf(tmp_path / "small.gguf", config(), contents=damaged))


def test_a_second_start_reads_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "small.gguf", config())
    tokens = torch.arange(20)
    first = logits(load(path), tokens)
    monkeypatch.setattr("gguf.GGUFReader", None)
    assert torch.equal(logits(load(path), tokens), first)


@pytest.mark.parametrize("name", ["tensors.json", "config.json"])
@pytest.mark.parametrize("content", ["", "[1]", None])
def test_a_damaged_index_is_named_and_made_again(
    tmp_path: Path, name: str, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "small.gguf", config())
    first = open_gguf(path, tmp_path)
    kept = first.config_folder / name
    kept.unlink()
    if content is not None:
        kept.write_text(content)
    assert open_gguf(path, tmp_path).tensors == first.tensors
    assert f"{first.config_folder} is damaged" in caplog.text
    caplog.clear()
    assert open_gguf(path, tmp_path).identity == first.identity
    assert caplog.text == ""
    assert not list(tmp_path.glob("tmp-*"))
