"""Stored weights in the form that packing takes: in a module's memory or mapped from a file."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve_app.model.records import Stack


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
    MXFP4 = 39


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
    def of(cls, tensor: Tensor, order: NDArray[np.int64] | None = None) -> "StoredMatrix":
        """Wrap a float tensor [outputs, inputs]. A contiguous tensor is not copied."""
        rows = tensor.detach().contiguous()
        outputs, inputs = tensor.shape
        return cls(rows.view(torch.uint8).numpy().reshape(-1), _TENSOR_BLOCKS[tensor.dtype], outputs, inputs, order)

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

    def expert(self, stack: Stack, index: int) -> list[StoredMatrix]:
        """Return one expert's matrices, whose outputs follow each other: gate, then up."""
        ...

    def expert_biases(self, stack: Stack) -> Tensor | None:
        """Return the biases [experts, outputs], float32, in the order of `expert`."""
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

    def expert(self, stack: Stack, index: int) -> list[StoredMatrix]:
        """See `Parameters`."""
        weight = stack.weight[index]
        return [StoredMatrix.of(weight.T if stack.transposed else weight, stacked_order(stack))]

    def expert_biases(self, stack: Stack) -> Tensor | None:
        """See `Parameters`."""
        return None if stack.bias is None else in_order(stack, stack.bias.detach().float())

    def release(self, parameter: Tensor) -> None:
        """See `Parameters`."""


def stacked_order(stack: Stack) -> NDArray[np.int64] | None:
    """Return the stack's row for each output, gate before up. None: they are in order."""
    return np.arange(stack.outputs).reshape(-1, 2).T.reshape(-1) if stack.interleaved else None


def in_order(stack: Stack, biases: Tensor) -> Tensor:
    """Return a stack's biases [experts, outputs] in the order of its outputs, contiguous."""
    order = stacked_order(stack)
    return biases.contiguous() if order is None else biases[:, torch.from_numpy(order)]
