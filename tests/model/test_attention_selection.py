"""Backends against the reference, and the choice among them."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.errors import ConfigError
from serve_app.model.attention import selection
from serve_app.model.attention.torch_cpu import TorchCpuAttention
from serve_app.model.attention.verification import verify_backend
from serve_app.model.attention_backend import AttentionLayer

CPU = torch.device("cpu")
LAYERS = {
    "gqa": AttentionLayer(6, 2, 64, 64, 0.125),
    "one kv head": AttentionLayer(8, 1, 32, 32, 0.1),
    "no group": AttentionLayer(3, 3, 80, 80, 80**-0.5),
    "wide values": AttentionLayer(4, 2, 48, 16, 0.2),
    "window": AttentionLayer(4, 2, 64, 64, 0.125, sliding_window=7),
    "softcap": AttentionLayer(4, 2, 64, 64, 0.125, softcap=5.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_cpu_backend_agrees_with_the_reference(layer: AttentionLayer, dtype: torch.dtype) -> None:
    assert verify_backend(TorchCpuAttention(), [layer], dtype, CPU) is None


class Unscaled(TorchCpuAttention):
    name = "unscaled"

    def forward(self, layer: AttentionLayer, query: Tensor, *args: Any) -> Tensor:
        return super().forward(layer, query * 2, *args)


class Lazy(TorchCpuAttention):
    """Leaves the last row of its output unwritten."""

    name = "lazy"

    def forward(self, *args: Any) -> Tensor:
        whole = super().forward(*args)
        out = torch.empty_like(whole).fill_(float("nan"))
        out[:-1] = whole[:-1]
        return out


class Greedy(TorchCpuAttention):
    """Reads what lies after a sequence's end."""

    name = "greedy"

    def build(self, batch: Any) -> Any:
        batch.kv_lens = [length + 1 for length in batch.kv_lens]
        return super().build(batch)


@pytest.mark.parametrize("backend", [Unscaled, Lazy, Greedy])
def test_a_wrong_backend_is_found_out(
    backend: type[TorchCpuAttention], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [LAYERS["gqa"]]
    assert verify_backend(backend(), layers, torch.float32, CPU) is not None
    monkeypatch.setitem(selection._BACKENDS, "cpu", backend)
    with pytest.raises(ConfigError, match="attention_backend: cpu does not work for this model on cpu"):
        selection.pick_backend("cpu", layers, torch.float32, CPU)
    with caplog.at_level(logging.WARNING):
        assert selection.pick_backend("auto", layers, torch.float32, CPU).name == "reference"
    assert len(caplog.records) == 1


def test_auto_picks_the_fast_backend() -> None:
    assert selection.pick_backend("auto", list(LAYERS.values()), torch.float32, CPU).name == "cpu"
