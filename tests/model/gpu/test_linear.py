"""Products by the Triton kernel: right, the same bits for a row in any company, and with weights in 8 bits."""

import pytest
import torch
import torch.nn.functional as F

from serve_app.model.llama import Linear


def make(outputs: int, inputs: int, device: torch.device, *, bias: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    biases = (torch.randn(outputs, generator=generator).to(device),) if bias else ()
    return Linear((weight.to(device),), biases)


@pytest.mark.parametrize(("outputs", "inputs", "bias"), [(200, 96, True), (64, 128, False), (1100, 64, True)])
def test_a_row_has_its_own_bits(outputs: int, inputs: int, bias: bool, device: torch.device) -> None:
    from serve_app.model.gpu.linear import GpuLinear

    given = make(outputs, inputs, device, bias=bias)
    linear = GpuLinear.of(given, fp8=False, invariant=True)
    x = torch.randn(70, inputs, generator=torch.Generator().manual_seed(0)).to(device)
    whole = linear(x)
    torch.testing.assert_close(whole, F.linear(x, given.weight, given.bias), rtol=1e-5, atol=1e-5)
    for low, high in ((0, 1), (3, 20), (1, 70), (69, 70)):
        assert torch.equal(linear(x[low:high]), whole[low:high])


def test_weights_in_8_bits(device: torch.device) -> None:
    """Outputs of very different sizes, one of them zero: each has its own scale."""
    from serve_app.model.gpu.linear import FP8, GpuLinear

    given = make(80, 64, device)
    given.weight.mul_(torch.logspace(-6, 3, 80, device=device)[:, None])
    given.weight[5] = 0.0
    linear = GpuLinear.of(given, fp8=True, invariant=False)
    assert linear.weight.dtype == FP8
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0)).to(device)
    assert linear.scales is not None
    exact = F.linear(x, linear.weight.float() * linear.scales[:, None], given.bias)
    torch.testing.assert_close(linear(x), exact, rtol=1e-4, atol=1e-4)
    error = linear.weight.float() * linear.scales[:, None] - given.weight
    assert bool((error.abs().amax(1) <= given.weight.abs().amax(1) / 16).all())
