"""Products by the Triton kernels: right, the same bits for a row in any company, and in 8 bits."""

import pytest
import torch
import torch.nn.functional as F

from serve_app.model.gpu.weights import ModuleWeights
from serve_app.model.records import Linear


def make(outputs: int, inputs: int, device: torch.device, *, bias: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    biases = (torch.randn(outputs, generator=generator).to(device),) if bias else ()
    return Linear((weight.to(device),), biases)


def rows_of(inputs: int, rows: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize(
    ("outputs", "inputs", "bias"),
    [(200, 96, True), (64, 128, False), (1100, 64, True), (100, 2100, True)],
)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_has_its_own_bits(
    outputs: int, inputs: int, bias: bool, fp8: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few outputs and many inputs these are shared out over parts, of no more than 40 rows at
    once here."""
    from serve_app.model.gpu import linear as module

    monkeypatch.setattr(module, "_ROWS_OF_PARTS", 40)
    given = make(outputs, inputs, device, bias=bias)
    linear = module.GpuLinear.of(given, ModuleWeights(given.weights[0]), fp8=fp8, invariant=True)
    x = rows_of(inputs, 70, device)
    whole = linear(x)
    if not fp8:
        torch.testing.assert_close(whole, F.linear(x, given.weight, given.bias), rtol=1e-5, atol=1e-5)
    for low, high in ((0, 1), (3, 20), (1, 70), (69, 70)):
        assert torch.equal(linear(x[low:high]), whole[low:high])


def test_parts_follow_the_shape_alone() -> None:
    """Enough of them for a GPU's processors, each of some length; none where tiles are enough or
    inputs are few."""
    from serve_app.model.gpu.linear import _part

    shapes = [(4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096), (4096, 1024), (1024, 3072), (64, 2048)]
    assert [-(-inputs // _part(outputs, inputs, 64)) for outputs, inputs in shapes] == [2, 2, 1, 1, 1, 6, 4]


def test_rows_are_rounded_to_8_bits(device: torch.device) -> None:
    """Rows of very different sizes, one of them zero: each has its own scale."""
    from serve_app.model.gpu.linear import FP8, round_rows

    x = rows_of(5000, 6, device) * torch.logspace(-6, 3, 6, device=device)[:, None]
    x[2] = 0.0
    rounded, scales = round_rows(x)
    torch.testing.assert_close(scales, (x.abs().amax(1) / 448).clamp_min(1e-12 / 448))
    expected = (x / scales[:, None]).clamp(-448, 448).to(FP8)
    # Triton's interpreter loses a carry where rounding up gives a power of two.
    different = (rounded.float() != expected.float()).float().mean().item()
    assert different <= (0.05 if device.type == "cpu" else 0.001)


@pytest.mark.parametrize(("outputs", "inputs"), [(80, 64), (80, 2100)])
def test_products_in_8_bits(outputs: int, inputs: int, device: torch.device) -> None:
    """Outputs of very different sizes, one of them zero: each has its own scale."""
    from serve_app.model.gpu.linear import FP8, GpuLinear, round_rows

    given = make(outputs, inputs, device)
    given.weight.mul_(torch.logspace(-6, 3, outputs, device=device)[:, None])
    given.weight[5] = 0.0
    linear = GpuLinear.of(given, ModuleWeights(given.weights[0]), fp8=True, invariant=False)
    assert linear.weight.dtype == FP8
    assert linear.scales is not None
    weight = linear.weight.float() * linear.scales[:, None]
    assert bool(((weight - given.weight).abs().amax(1) <= given.weight.abs().amax(1) / 16).all())
    x = rows_of(inputs, 9, device)
    rounded, scales = round_rows(x)
    exact = F.linear(rounded.float() * scales[:, None], weight, given.bias)
    # Tensor cores add such products in less than float32's bits.
    tolerance = 1e-5 if device.type == "cpu" else 2e-3
    assert bool(((linear(x) - exact).abs() <= tolerance * exact.abs().amax(0)).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 64])
def test_8_bits_do_not_hide_what_is_no_number(bad: float, count: int, device: torch.device) -> None:
    from serve_app.model.gpu.linear import GpuLinear

    given = make(80, 64, device)
    linear = GpuLinear.of(given, ModuleWeights(given.weights[0]), fp8=True, invariant=False)
    x = rows_of(64, 3, device)
    x[1, 64 - count :] = bad
    assert linear(x).isfinite().all(1).tolist() == [True, False, True]
    assert bool(linear(x)[1].isnan().all())


@pytest.mark.parametrize(("rows", "outputs"), [(3, 256), (100, 256), (100, 257)])
def test_8_bits_in_bfloat16(rows: int, outputs: int, device: torch.device) -> None:
    """Many rows go through torch's product, where its outputs are whole vectors."""
    from serve_app.model.gpu.linear import GpuLinear

    if device.type == "cpu":
        pytest.skip("Triton's interpreter cannot store bfloat16 products, and torch has 8-bit ones on GPUs alone")
    given = make(outputs, 512, device)
    narrow = Linear((given.weight.bfloat16(),), (given.biases[0].bfloat16(),))
    linear = GpuLinear.of(narrow, ModuleWeights(narrow.weights[0]), fp8=True, invariant=False)
    x = rows_of(512, rows, device)
    expected = F.linear(x, given.weight, given.biases[0])
    assert ((linear(x.bfloat16()).float() - expected).std() / expected.std()).item() < 0.05
