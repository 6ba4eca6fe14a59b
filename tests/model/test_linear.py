import pytest
import torch
from torch import nn

from serve_app.model import linear as linear_module
from serve_app.model.linear import MIN_ROWS, InvariantLinear, linear, pad_rows


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (576, 960), (1536, 576), (100, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_product_is_right_and_its_rows_are_independent(inputs: int, outputs: int, bias: bool) -> None:
    weight, x = random(outputs, inputs), random(1, 260, inputs, seed=1)
    offset = random(outputs, seed=2) if bias else None
    with torch.inference_mode():
        layer = InvariantLinear(weight, offset)
        whole = layer(x)
        expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
        assert (whole - expected).abs().max() < 1e-4 * expected.std()
        for rows in (4, 5, 6, 7, 9, 13, 31, 50, 100, 259):
            assert torch.equal(layer(x[:, :rows]), whole[:, :rows])


def test_products_are_cut_until_rows_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_known_segments", {})
    monkeypatch.setattr(InvariantLinear, "_rows_are_independent", lambda self: len(self._packed) == 3)
    weight, x = random(32, 96), random(5, 96, seed=1)
    with torch.inference_mode():
        layer = InvariantLinear(weight, random(32, seed=2))
        assert len(layer._packed) == 3
        torch.testing.assert_close(layer(x), x @ weight.T + random(32, seed=2), rtol=0, atol=1e-4)


def test_other_dtypes_keep_torchs_own_layer() -> None:
    weight = random(8, 16).double()
    layer = linear(weight, None)
    assert type(layer) is nn.Linear
    x = random(5, 16).double()
    assert torch.equal(layer(x), x @ weight.T)


def test_padding_reaches_the_smallest_product_and_no_further() -> None:
    assert pad_rows(torch.ones(1, 3)).tolist() == [[1, 1, 1]] + [[0, 0, 0]] * (MIN_ROWS - 1)
    assert pad_rows(torch.ones(2, dtype=torch.int64)).tolist() == [1, 1] + [0] * (MIN_ROWS - 2)
    many = torch.ones(MIN_ROWS, 2)
    assert pad_rows(many) is many


@pytest.mark.parametrize("inputs", [64, 100])
def test_the_weight_can_be_read_from_a_packed_layer(inputs: int) -> None:
    """The routers of Hunyuan's and LongCat's experts read it."""
    weight, bias = torch.randn(24, inputs), torch.randn(24)
    layer = InvariantLinear(weight, bias)
    assert torch.equal(layer.weight, weight)
    assert layer.weight is layer.weight
