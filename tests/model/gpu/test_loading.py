"""Models whose files are mapped and read straight onto the device: the same logits, hardly more
memory than is kept, and an error where memory is short."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from load_tests.gpu.memory import PEAK_LIMIT, Peak
from load_tests.gpu.steps import random_module
from load_tests.random_gguf import write_gguf
from serve_app.errors import ConfigError
from serve_app.model import device_memory
from serve_app.model.families import recognise
from serve_app.model.loader import from_module, load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.sources.mapped_checkpoint import MappedParameters
from serve_app.model.sources.safetensors_files import open_safetensors
from serve_app.model.sources.skeleton import empty_module, small_copy
from serve_app.model.sources.source_model import SourceModel
from tests.model.sources.test_gguf_file import VOCAB, config, kinds, transformers_module
from tests.model.stepping import Sequences, random_tokens
from tests.models import tiny_model

pytestmark = [pytest.mark.wide, pytest.mark.timeout(900)]

MATMUL = np.matmul
LARGE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def fast_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """No equal bits are wanted here, so that BLAS may multiply the interpreter's tiles."""
    monkeypatch.setattr(np, "matmul", MATMUL)


def load(path: Path, device: torch.device, **options: Any) -> PagedModel:
    cache_dir = str(path.parent / "cache")
    wanted = {"attention_backend": "triton", "dtype": "float32", "cache_dir": cache_dir, **options}
    return load_model(ModelOptions(model=str(path), device=device.type, **wanted))


def difference(model: PagedModel, tokens: torch.Tensor, module: Any) -> float:
    """Of the logits of 40 tokens or so, the largest, relative to the module's spread."""
    model.allocate_kv_cache(8)
    with torch.inference_mode():
        expected = module(tokens[None]).logits[0]
        got = Sequences(model, [tokens], [[5, 1, 6]]).step({0: len(tokens)})[0].cpu()
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize("arch", ["qwen2", "gemma3"])
def test_a_folder_is_read_straight_onto_the_device(
    arch: str, tmp_path: Path, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Biases, and norms with an offset. The second start takes its blueprint from the disk."""
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    module = tiny_model(arch, torch.float32, **(layers if arch == "gemma3" else {}))
    module.save_pretrained(tmp_path / "tiny")
    with caplog.at_level(logging.INFO):
        models = [load(tmp_path / "tiny", device) for _ in range(2)]
    assert not [record for record in caplog.records if "floats" in record.getMessage()]
    for model in models:
        assert type(model.executor).__name__ == "GpuDecoder"
        assert difference(model, random_tokens(40, 0), module) < 1e-3


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_blocks_of_a_file_become_floats_on_the_device(arch: str, tmp_path: Path, device: torch.device) -> None:
    """Several kinds in one joined matrix; Llama's rows of queries and keys are in another order."""
    some = kinds(
        Kind.Q8_0, token_embd=Kind.BF16, attn_q=Kind.Q4_K, attn_k=Kind.Q5_1, ffn_up=Kind.F16, ffn_down=Kind.Q6_K
    )
    path = write_gguf(tmp_path / "small.gguf", config(arch), some)
    model = load(path, device)
    assert type(model.executor).__name__ == "GpuDecoder"
    assert difference(model, torch.arange(7, 47) * 7 % VOCAB, transformers_module(path)) < 1e-3


def test_an_unknown_structure_is_read_as_floats(tmp_path: Path, device: torch.device) -> None:
    module = tiny_model("gemma2", torch.float32)
    module.save_pretrained(tmp_path / "tiny")
    model = load(tmp_path / "tiny", device)
    assert type(model.executor).__name__ == "TransformersExecutor"
    assert difference(model, random_tokens(40, 0), module) < 1e-3


@pytest.mark.parametrize("fp8", [False, True])
@torch.inference_mode()
def test_loading_needs_hardly_more_than_is_kept(fp8: bool, tmp_path: Path, device: torch.device) -> None:
    """Counts what is held on the device while a decoder's 16-bit weights are read, and rounded."""
    from serve_app.model.gpu.attention import TritonAttention
    from serve_app.model.gpu.decoder import GpuDecoder
    from serve_app.model.gpu.weights import MappedWeights, bytes_needed

    module = random_module(LARGE, torch.device("cpu"), torch.float16)
    module.save_pretrained(tmp_path)
    empty = empty_module(module.config)
    source = SourceModel.take(small_copy(module.config, torch.device("cpu"), torch.float32), "large", None)
    record = recognise(empty, empty.base_model, source.facts.layers, 256)
    parameters = MappedParameters(open_safetensors(tmp_path), dict(empty.named_parameters()))
    with Peak(device) as peak:
        weights = MappedWeights(parameters, device, torch.float16)
        decoder = GpuDecoder(record, TritonAttention(), 256, weights=weights, fp8=fp8)
    assert decoder.weight_bytes < bytes_needed(record, torch.float16, fp8=fp8) <= peak.kept
    assert peak.most <= PEAK_LIMIT * peak.kept


@pytest.mark.parametrize("fp8", [False, True])
@torch.inference_mode()
def test_a_module_gives_its_weights_up_layer_by_layer(fp8: bool, device: torch.device) -> None:
    """Joined matrices become the module's own, which still works; rounded ones take their place."""
    from serve_app.model.gpu.attention import TritonAttention
    from serve_app.model.gpu.decoder import GpuDecoder

    module = random_module({**LARGE, "num_hidden_layers": 4}, device, torch.float16)
    source = SourceModel.take(module, "large", None)
    record = recognise(source.head, source.base, source.facts.layers, 256)
    mlp, x = source.base.layers[3].mlp, torch.randn(1, 1024, dtype=torch.float16).to(device)
    expected = mlp(x)
    wide = sum(part.nbytes for root in (source.head, source.base) for part in root.parameters())
    with Peak(device) as peak:
        decoder = GpuDecoder(record, TritonAttention(), 256, fp8=fp8)
    assert decoder.quantization == ("fp8" if fp8 else "none")
    assert peak.most <= 1.2 * wide
    if fp8:
        assert sum(part.nbytes for part in source.base.layers.parameters()) < 0.01 * wide
    else:
        assert torch.equal(mlp(x), expected)


def test_a_model_that_does_not_fit_is_refused(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its weights are read, with both numbers."""
    tiny_model("llama", torch.float32, hidden_size=512, vocab_size=20_000).save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 2**24)
    with pytest.raises(ConfigError, match=r"out of memory on .* need 0\.0[5-9] GiB .*, 0\.02 GiB was free"):
        load(tmp_path / "tiny", device)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_running_out_of_memory_ends_the_load(
    arch: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model that runs on its own modules."""
    from serve_app.model.gpu import weights
    from serve_app.model.verification import ReferenceLogits

    def exhausted(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    tiny_model(arch, torch.float32).save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(weights.MappedWeights, "joined", exhausted)
    if arch == "gemma2":
        monkeypatch.setattr(ReferenceLogits, "difference", exhausted)
    with pytest.raises(ConfigError, match=r"model tiny: out of memory on .* need 0\.00 GiB"):
        load(tmp_path / "tiny", device)


def test_a_module_without_room_does_not_run_slower(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.model.gpu import linear

    def exhausted(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(linear.GpuLinear, "of", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        from_module(tiny_model("llama", torch.float32).to(device), attention_backend="triton")
