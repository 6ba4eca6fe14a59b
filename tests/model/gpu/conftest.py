"""The kernels on whatever is there: compiled on a GPU, else by Triton's interpreter on the CPU."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", autouse=True)
def products_in_order() -> Iterator[None]:
    """Triton's interpreter multiplies tiles by BLAS, which on some CPUs (seen: Zen 5) sums a row in
    an order that depends on the row's place in the tile. A GPU does not, so tests of equal bits
    need a product that does not."""

    def matmul(a: Any, b: Any, dtype: Any = None) -> Any:
        return np.einsum("...mk,...kn->...mn", a, b, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", matmul)
        yield
