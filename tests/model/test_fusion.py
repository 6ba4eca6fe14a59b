from typing import Any

import pytest
import torch
from torch import Tensor, nn

from serve_app.model.fusion import RMSNorm, _Part, _rms_norm, optimize, watch_inputs
from serve_app.model.linear import InvariantLinear
from tests.models import tiny_model


class Block(nn.Module):
    """Two layers share an input, a third does not though it has the same shape."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(64, width, dtype=dtype) for width in (32, 96, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.three(x.tanh()) + torch.cat([self.one(x), self.two(x)], dim=-1)[..., :64]


def optimized(block: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        root = nn.ModuleList([block])
        with watch_inputs(root) as seen:
            block(x)
        optimize(nn.Module(), root, seen, lambda fraction: None)
    return root[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.inference_mode()
def test_only_layers_seen_with_one_input_are_fused(dtype: torch.dtype) -> None:
    x = torch.randn(1, 6, 64, dtype=dtype)
    expected = Block(dtype)(x)
    block = optimized(Block(dtype), x)
    assert isinstance(block.one, _Part)
    assert isinstance(block.two, _Part)
    assert type(block.three) is (InvariantLinear if dtype == torch.float32 else nn.Linear)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_fused_layers_called_with_other_inputs_still_answer_right() -> None:
    x, y = torch.randn(1, 6, 64), torch.randn(1, 6, 64)
    plain, fused = Block(), optimized(Block(), x)
    for layer, tensor in (("one", x), ("two", y), ("two", x), ("one", y), ("one", x)):
        expected = getattr(plain, layer)(tensor)
        torch.testing.assert_close(getattr(fused, layer)(tensor), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_every_linear_layer_of_gpt2_is_packed_though_it_is_none_of_torchs() -> None:
    model = tiny_model("gpt2", torch.float32)
    with watch_inputs(model) as seen:
        model(input_ids=torch.arange(5)[None])
    optimize(nn.Module(), model, seen, lambda fraction: None)
    kinds = {
        type(model.get_submodule(f"transformer.h.0.{name}")) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")
    }
    assert kinds == {InvariantLinear}
    assert type(model.lm_head) is InvariantLinear


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma2", "gemma3", "olmo2"])
@torch.inference_mode()
def test_norms_are_recognized_by_what_they_compute(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = next(module for name, module in tiny_model(arch, torch.float32).named_modules() if name.endswith("norm"))
    norm.weight.copy_(torch.rand(norm.weight.shape))
    x = torch.randn(3, 5, norm.weight.shape[0])
    found = _rms_norm(norm)
    assert found is None  # slower on a CPU
    monkeypatch.setattr("serve_app.model.fusion._faster_norm", lambda weight: True)
    found = _rms_norm(norm)
    assert isinstance(found, RMSNorm)
    torch.testing.assert_close(found(x), norm(x), rtol=0, atol=1e-5)
    monkeypatch.setattr(type(norm), "forward", lambda self, x: x * self.weight)
    assert _rms_norm(norm) is None
