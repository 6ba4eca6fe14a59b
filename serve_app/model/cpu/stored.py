"""Stored weights in the form that packing takes: in a module's memory or mapped from a file."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Blocks(IntEnum):
    """Block format of a file's weights, by GGUF's numbers; see `kernels/blocks.h`."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


_TENSOR_BLOCKS = {torch.float32: Blocks.F32, torch.float16: Blocks.F16, torch.bfloat16: Blocks.BF16}
_FLOATS = {blocks: dtype for dtype, blocks in _TENSOR_BLOCKS.items()}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [outputs, inputs], row by row.

    data: its bytes, contiguous. order: int64 [outputs], the row of `data` for each output; None if
    they are in order.
    """

    data: NDArray[np.uint8]
    blocks: Blocks
    outputs: int
    inputs: int
    order: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> "StoredMatrix":
        """Wrap a float tensor [outputs, inputs]. A contiguous tensor is not copied."""
        rows = tensor.detach().contiguous()
        return cls(rows.view(torch.uint8).numpy().reshape(-1), _TENSOR_BLOCKS[tensor.dtype], *tensor.shape)

    def floats(self, first: int, end: int) -> Tensor:
        """Return a copy of some outputs [end - first, inputs]: as they are if they are floats, else
        in float32.
        """
        lines = self.data.reshape(self.outputs, -1)
        rows = lines[first:end].copy() if self.order is None else lines[self.order[first:end]]
        if self.blocks in _FLOATS:
            return torch.from_numpy(rows).view(_FLOATS[self.blocks])
        from gguf import GGMLQuantizationType, dequantize  # only files with blocks need it

        return torch.from_numpy(dequantize(rows, GGMLQuantizationType(self.blocks)))


class Parameters(Protocol):
    """Reads the weights of a module's parameters. The parameters may be empty (torch's device
    "meta").
    """

    @property
    def identity(self) -> tuple[str, str] | None:
        """Location and version of the weights. None if they cannot be identified."""
        ...

    def matrix(self, parameter: Tensor) -> StoredMatrix:
        """Return a two-dimensional parameter."""
        ...

    def vector(self, parameter: Tensor) -> Tensor:
        """Return a one-dimensional parameter as contiguous float32."""
        ...

    def release(self, parameter: Tensor) -> None:
        """Mark a parameter as not needed again soon."""
        ...


class ModuleParameters:
    """`Parameters` of a module whose weights are in memory."""

    identity = None

    def matrix(self, parameter: Tensor) -> StoredMatrix:
        """See `Parameters`."""
        return StoredMatrix.of(parameter)

    def vector(self, parameter: Tensor) -> Tensor:
        """See `Parameters`."""
        return parameter.detach().float().contiguous()

    def release(self, parameter: Tensor) -> None:
        """See `Parameters`."""
