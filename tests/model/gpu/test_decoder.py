"""The fused decoder and the Triton backend under whole models. That logits are the modules' own is checked whenever a
`PagedModel` is built; here are the choice between the two, and steps of every kind."""

import logging
from collections.abc import Callable

import pytest
import torch

from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
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
