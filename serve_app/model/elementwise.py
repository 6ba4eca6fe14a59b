"""Element-wise functions whose results do not depend on an element's position in the batch.

torch gives each thread one stretch of the flattened tensor. It computes the remainder after whole
vectors with scalar code, whose exp and tanh differ in the last bit. So every stretch must be a
whole number of vectors.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_VECTOR = 32
"""Floats per loop iteration with AVX-512 (two registers). A multiple of the widths of AVX2 and
NEON.
"""
_GRAIN = 32768
"""torch uses one more thread per this many elements (at::internal::GRAIN_SIZE)."""


def aligned_parts(x: Tensor) -> Iterator[Tensor]:
    """Cut x [rows, width] into views of consecutive rows that torch's threads split into whole
    vectors.

    Nearly always yields x as one part. Requires `width` or `rows * width` to be a multiple of 32.
    """
    threads, width, start = torch.get_num_threads(), x.shape[1], 0
    while start < x.shape[0]:
        rows = x.shape[0] - start
        while rows > 1 and rows * width % (_VECTOR * min(threads, -(-rows * width // _GRAIN))):
            rows -= 1
        yield x[start : start + rows]
        start += rows


class AlignedActivation(nn.Module):
    """Calls a parameterless activation on aligned parts of its input."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x [..., width], in the same shape."""
        width = x.shape[-1]
        rows = F.pad(x.flatten(0, -2), (0, -width % _VECTOR))
        parts = [self.activation(part) for part in aligned_parts(rows)]
        out: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out[:, :width].view(x.shape) if width % _VECTOR == 0 else out[:, :width].reshape(x.shape)


def is_activation(module: nn.Module) -> bool:
    """Whether the module is a parameterless element-wise function of torch or transformers."""
    home = type(module).__module__
    return home in ("torch.nn.modules.activation", "transformers.activations") and not list(module.parameters())
