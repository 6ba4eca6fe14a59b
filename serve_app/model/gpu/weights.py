"""Fills the decoder's tensors on the device, from a module in memory or from mapped files.

A joined matrix is allocated once. Its parts are copied, dequantized or rounded to 8 bits a few rows
at a time, so that loading needs hardly more memory than the weights that are kept.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from serve_app.model.cpu.stored import Parameters, StoredMatrix, in_order, stacked_order
from serve_app.model.records import DecoderRecord, Stack

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
_NUMBERS_AT_ONCE = 2**18
"""Numbers of a matrix that are read at once."""


class Weights(Protocol):
    """Reads a record's parameters onto a device, in the model's dtype.

    device, dtype: of what the methods return.
    """

    device: torch.device
    dtype: torch.dtype

    def joined(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return matrices of equal width one below the other, contiguous."""
        ...

    def stacked(self, stack: Stack) -> Tensor:
        """Return a matrix per expert, [experts, outputs, inputs], gate before up, contiguous."""
        ...

    def pieces(self, part: Tensor | Stack) -> Iterator[Tensor]:
        """Return the rows of a matrix, or of a stack's matrices, in order, a few at a time."""
        ...

    def vector(self, parameter: Tensor) -> Tensor:
        """Return a parameter of one dimension."""
        ...

    def biases(self, stack: Stack) -> Tensor | None:
        """Return the biases of a stack, [experts, outputs], in the order of `stacked`."""
        ...

    def replace(self, parts: Sequence[Tensor], weight: Tensor) -> None:
        """Give up the parameters that `weight` holds now."""
        ...


class ModuleWeights:
    """`Weights` of a module in memory, whose parameters have the device and the dtype of its
    embedding.
    """

    def __init__(self, embedding: Tensor) -> None:
        self.device, self.dtype = embedding.device, embedding.dtype
        self._embedding = embedding

    def joined(self, parameters: Sequence[Tensor]) -> Tensor:
        """See `Weights`. A single matrix is not copied."""
        return torch.cat(list(parameters)) if len(parameters) > 1 else parameters[0].detach().contiguous()

    def stacked(self, stack: Stack) -> Tensor:
        """See `Weights`. A stack in this order is not copied."""
        if not stack.transposed and not stack.interleaved:
            return stack.weight.detach().contiguous()
        shape = len(stack.weight), stack.outputs, stack.inputs
        return _filled(self, self.pieces(stack), shape[0] * shape[1], shape[2]).view(shape)

    def pieces(self, part: Tensor | Stack) -> Iterator[Tensor]:
        """See `Weights`."""
        if isinstance(part, Tensor):
            yield from torch.split(part.detach(), _rows_at_once(part.shape[1]))
            return
        for weight in part.weight.detach():
            matrix, order = weight.T if part.transposed else weight, stacked_order(part)
            yield matrix if order is None else matrix[torch.from_numpy(order).to(self.device)]

    def vector(self, parameter: Tensor) -> Tensor:
        """See `Weights`."""
        return parameter.detach()

    def biases(self, stack: Stack) -> Tensor | None:
        """See `Weights`."""
        return None if stack.bias is None else in_order(stack, stack.bias.detach())

    def replace(self, parts: Sequence[Tensor], weight: Tensor) -> None:
        """See `Weights`. The module's parameters become parts of the joined matrix, so that the
        module still works. Those that were rounded become empty.
        """
        own = [parameter for parameter in parts if parameter is not self._embedding]
        if weight.dtype != self.dtype:
            for parameter in own:
                parameter.data = parameter.new_empty(0, *parameter.shape[1:])
        elif len(own) > 1:
            for parameter, part in zip(own, torch.split(weight, [len(each) for each in own]), strict=True):
                parameter.data = part


class MappedWeights:
    """`Weights` from mapped files, for a module without values."""

    def __init__(self, parameters: Parameters, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._parameters = parameters

    def joined(self, parameters: Sequence[Tensor]) -> Tensor:
        """See `Weights`."""
        pieces = chain.from_iterable(self.pieces(parameter) for parameter in parameters)
        return _filled(self, pieces, sum(map(len, parameters)), parameters[0].shape[1])

    def stacked(self, stack: Stack) -> Tensor:
        """See `Weights`."""
        shape = len(stack.weight), stack.outputs, stack.inputs
        return _filled(self, self.pieces(stack), shape[0] * shape[1], shape[2]).view(shape)

    def pieces(self, part: Tensor | Stack) -> Iterator[Tensor]:
        """See `Weights`. Numbers are in the dtype, rounded as if the file were converted to it."""
        if isinstance(part, Tensor):
            yield from self._rows(self._parameters.matrix(part))
            self._parameters.release(part)
            return
        for index in range(len(part.weight)):
            for stored in self._parameters.expert(part, index):
                yield from self._rows(stored)
        self._parameters.release(part.weight)

    def _rows(self, stored: StoredMatrix) -> Iterator[Tensor]:
        step = _rows_at_once(stored.inputs)
        for first in range(0, stored.outputs, step):
            yield stored.floats(first, min(first + step, stored.outputs)).to(self.device, self.dtype)

    def vector(self, parameter: Tensor) -> Tensor:
        """See `Weights`."""
        return self._parameters.vector(parameter).to(self.device, self.dtype)

    def biases(self, stack: Stack) -> Tensor | None:
        """See `Weights`."""
        biases = self._parameters.expert_biases(stack)
        return None if biases is None else biases.to(self.device, self.dtype).contiguous()

    def replace(self, parts: Sequence[Tensor], weight: Tensor) -> None:
        """Do nothing: the parameters have no values."""


def rounded(weights: Weights, parts: Sequence[Tensor | Stack]) -> tuple[Tensor, Tensor]:
    """Return the rows of matrices or of a stack in float8_e4m3fn [rows, inputs], and each row's
    scale, float32 [rows].
    """
    outputs = sum(len(part) if isinstance(part, Tensor) else len(part.weight) * part.outputs for part in parts)
    inputs = parts[0].shape[1] if isinstance(parts[0], Tensor) else parts[0].inputs
    out = torch.empty(outputs, inputs, dtype=FP8, device=weights.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weights.device)
    first = 0
    for rows in chain.from_iterable(weights.pieces(part) for part in parts):
        these = slice(first, first + len(rows))
        scales[these] = rows.abs().amax(1).float().clamp_min(1e-12) / FP8_MAX
        # A copy: float32 rows may be the module's own.
        wide = rows.to(torch.float32, copy=True)
        out[these] = wide.div_(scales[these, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
        first += len(rows)
    return out, scales


def _filled(weights: Weights, pieces: Iterable[Tensor], outputs: int, inputs: int) -> Tensor:
    out = torch.empty(outputs, inputs, dtype=weights.dtype, device=weights.device)
    first = 0
    for rows in pieces:
        out[first : first + len(rows)] = rows
        first += len(rows)
    return out


def bytes_needed(model: DecoderRecord, dtype: torch.dtype, *, fp8: bool) -> int:
    """Return the size of a decoder's matrices and rotary angles on the device, without scales."""
    linears = [model.head]
    for layer in model.layers:
        linears += (part for part in (layer.qkv, layer.out, layer.gate_up, layer.down) if part is not None)
    matrices = [weight for linear in linears for weight in linear.weights]
    for experts in (layer.experts for layer in model.layers if layer.experts is not None):
        matrices += experts.gate_up.weight, experts.down.weight
    shared = not fp8 and model.head.weights[0] is model.embedding
    size = 0 if shared else model.embedding.numel() * dtype.itemsize
    for matrix in matrices:
        size += matrix.numel() * (FP8 if fp8 else dtype).itemsize
    return size + sum(rotation.cos.nbytes + rotation.sin.nbytes for rotation in model.rotations)


def _rows_at_once(inputs: int) -> int:
    return max(1, _NUMBERS_AT_ONCE // inputs)
