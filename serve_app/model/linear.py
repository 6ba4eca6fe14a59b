"""Linear layers with independent rows: row i of the output has the same bits whatever the other
rows are.

CPU matrix libraries choose their blocking along K by the number of rows M, which changes the last
bits. oneDNN's packed float32 product keeps one order per K for most shapes, and is also faster at
small M. For other shapes, K is cut into equal segments that are summed in a fixed order. Whether
that is needed depends on the machine, and is tested at load. M must be at least `MIN_ROWS`: smaller
products use other kernels (matrix times vector). The model pads.
"""

import logging
from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MIN_ROWS = 4
"""The caller must pad every product to at least this many rows."""

_PROBED_ROWS = (4, 5, 7, 8, 16, 17, 33, 64, 129, 300)
_PROBED_SIZE = 1 << 22
"""Larger outputs are not tested: it would take seconds for a large vocabulary."""
_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16)

logger = logging.getLogger(__name__)


def can_pack(weight: Tensor) -> bool:
    """Whether `InvariantLinear` supports this weight."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn


class InvariantLinear(nn.Module):
    """y = x W^T + b with packed float32 weights on the CPU. x [..., in_features], y [...,
    out_features].

    Keeps only a packed copy of the weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._packed: list[Tensor] = []
        self._width = self.in_features
        key = (self.in_features, self.out_features, torch.get_num_threads())
        for segments in _segments_to_try(key):
            self._width = self.in_features // segments
            self._packed = [
                torch.ops.mkldnn._reorder_linear_weight(part.detach().contiguous(), None)
                for part in torch.split(weight, self._width, dim=1)
            ]
            if key in _known_segments or self._rows_are_independent():
                _known_segments[key] = segments
                return
        logger.warning("a linear layer of %d inputs is not bitwise independent of its batch here", self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return self._multiply(x, self.bias)

    @cached_property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features], unpacked and kept at the first use. Some routers
        read it instead of calling the layer.
        """
        return self._multiply(torch.eye(self.in_features), None).T.contiguous()

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        if len(self._packed) == 1:
            return product(x, self._packed[0], bias, "none", [], "")
        out = None
        for start, packed in zip(range(0, self.in_features, self._width), self._packed, strict=True):
            part = product(x[..., start : start + self._width].contiguous(), packed, bias, "none", [], "")
            out = part if out is None else out.add_(part)
            bias = None
        assert out is not None
        return out

    def _rows_are_independent(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        rows_to_try = [rows for rows in _PROBED_ROWS if rows * self.out_features < _PROBED_SIZE]
        x = torch.randn(max(rows_to_try), self.in_features, generator=generator)
        whole = self(x)
        return all(torch.equal(self(x[:rows]), whole[:rows]) for rows in rows_to_try)


_known_segments: dict[tuple[int, int, int], int] = {}
"""Number of segments by (in_features, out_features, threads). A model repeats a few shapes many
times.
"""


def _segments_to_try(key: tuple[int, int, int]) -> list[int]:
    if key in _known_segments:
        return [_known_segments[key]]
    return [segments for segments in _SEGMENTS if key[0] % segments == 0]


def linear(weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return the best linear layer for this weight: `InvariantLinear` if it can be packed, else
    torch's own.
    """
    if can_pack(weight):
        return InvariantLinear(weight, bias)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def pad_rows(x: Tensor, rows: int = MIN_ROWS) -> Tensor:
    """Append zero rows to `x` until it has at least `rows`."""
    missing = rows - x.shape[0]
    return x if missing <= 0 else F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
