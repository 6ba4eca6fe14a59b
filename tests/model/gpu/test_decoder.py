"""The fused decoder and the Triton backend under whole models. That logits are the modules' own is checked whenever a
`PagedModel` is built; here are the choice between the two, and steps of every kind."""

import logging
from collections.abc import Callable

import pytest
import torch

from serve_app.core.output import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model.loader import from_module
from serve_app.model.paged_model import GpuForm, PagedModel
from tests.model.stepping import Sequences, random_tokens
from tests.models import tiny_model

Build = Callable[..., PagedModel]


@pytest.fixture
def build(caplog: pytest.LogCaptureFixture, device: torch.device) -> Build:
    def build(arch: str, dtype: torch.dtype = torch.float32) -> PagedModel:
        with caplog.at_level(logging.WARNING):
            return from_module(tiny_model(arch, dtype).to(device), attention_backend="triton")

    return build


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "mistral"])
@torch.inference_mode()
def test_llama_like_models_run_fused(
    arch: str, build: Build, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    """Prompts in chunks, decode rows beside a prefill, and a lone token."""
    model = build(arch)
    assert type(model._stack).__name__ == "GpuDecoder"
    assert not caplog.records
    tokens = [random_tokens(length, seed) for seed, length in enumerate((60, 35))]
    module = tiny_model(arch, torch.float32)
    expected = [module(row[None]).logits[0] for row in tokens]
    model.allocate_kv_cache(8)
    run = Sequences(model, tokens, [[5, 1, 6, 2], [3, 7, 4]])
    got: list[list[torch.Tensor]] = [[], []]
    for counts in ({0: 50}, {1: 20, 0: 1}, {0: 1, 1: 14}, {0: 7}, {1: 1, 0: 1}):
        for index, logits in run.step(counts).items():
            got[index].append(logits)
    for parts, reference in zip(got, expected, strict=True):
        assert float((torch.cat(parts) - reference.to(device)).abs().max() / reference.std()) < 1e-3


@pytest.mark.parametrize("arch", ["gemma2", "phi3"])
def test_others_keep_their_modules(arch: str, build: Build, caplog: pytest.LogCaptureFixture) -> None:
    model = build(arch)
    assert model.attention_backend == "triton"
    assert type(model._stack).__name__ == "TransformersStack"
    assert ["runs without the fused kernels" in record.getMessage() for record in caplog.records] == [True]


def test_narrow_numbers(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    assert type(build("llama", torch.float16)._stack).__name__ == "GpuDecoder"
    assert not caplog.records


def test_a_wrong_kernel_is_found_out(
    build: Build, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve_app.model.gpu import ops

    gate_times_up = ops.gate_times_up
    monkeypatch.setattr(ops, "gate_times_up", lambda x, *, gelu: gate_times_up(x, gelu=not gelu))
    assert type(build("llama")._stack).__name__ == "TransformersStack"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fp8_cache", [False, True])
def test_weights_and_cache_in_8_bits(fp8_cache: bool, device: torch.device) -> None:
    """Their logits are compared with the module's when the model is built."""
    module, quantization = tiny_model("llama", torch.float32).to(device), "none" if fp8_cache else "fp8"
    form = GpuForm(fp8_cache=fp8_cache)
    model = from_module(module, attention_backend="triton", quantization=quantization, gpu_form=form)
    assert model.quantization == quantization
    # Two layers of two heads of 16 keys and values.
    assert model.kv_bytes_per_block() == model.block_size * 2 * 2 * 2 * 16 * (1 if fp8_cache else 4)
    model.allocate_kv_cache(4)
    model.copy_blocks([BlockCopy(1, 2)])


def test_8_bits_need_a_gpu() -> None:
    for fields in ({"quantization": "fp8"}, {"gpu_form": GpuForm(fp8_cache=True)}):
        with pytest.raises(ConfigError, match="needs a GPU"):
            from_module(tiny_model("llama", torch.float32), **fields)  # type: ignore[arg-type]


@torch.inference_mode()
def test_deterministic_rows_have_their_own_bits(device: torch.device) -> None:
    """Alone and whole, or in chunks beside another row: the same logits to the last bit."""
    module = tiny_model("qwen3", torch.float32).to(device)
    model = from_module(module, attention_backend="triton", gpu_form=GpuForm(deterministic=True))
    tokens = [random_tokens(length, seed) for seed, length in enumerate((40, 35))]
    model.allocate_kv_cache(8)
    alone = Sequences(model, tokens[:1], [[5, 1, 6]])
    expected = torch.cat([alone.step({0: count})[0] for count in (39, 1)])
    model.allocate_kv_cache(8)
    run = Sequences(model, tokens, [[5, 1, 6, 2], [3, 7, 4]])
    parts = [run.step(counts)[0] for counts in ({1: 20, 0: 3}, {0: 30, 1: 1}, {1: 14, 0: 6}, {0: 1})]
    assert torch.equal(torch.cat(parts), expected)
