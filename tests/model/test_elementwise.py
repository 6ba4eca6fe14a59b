from collections.abc import Iterator

import pytest
import torch
from transformers.activations import ACT2FN

from serve_app.model.elementwise import AlignedActivation, aligned_parts, is_activation


@pytest.fixture(params=[1, 2, 5, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1536, 100])
@pytest.mark.parametrize("name", ["silu", "gelu_new", "gelu_pytorch_tanh", "relu"])
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_in_any_batch(name: str, width: int) -> None:
    activation = AlignedActivation(ACT2FN[name])
    assert is_activation(activation.activation)
    x = torch.randn(1, 140, 2 * width, generator=torch.Generator().manual_seed(0))[..., :width]
    with torch.inference_mode():
        alone = torch.cat([activation(x[:, start : start + 4]) for start in range(0, 140, 4)], dim=1)
        torch.testing.assert_close(alone, activation.activation(x), rtol=0, atol=1e-5)
        for rows in (5, 9, 50, 107, 140):
            assert torch.equal(activation(x[:, :rows]), alone[:, :rows])


@pytest.mark.usefixtures("threads")
def test_parts_are_the_whole_in_order() -> None:
    x = torch.arange(107 * 1536).view(107, 1536)
    assert torch.equal(torch.cat(list(aligned_parts(x))), x)
