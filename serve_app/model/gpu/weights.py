"""Fills the decoder's tensors on the device, from a module in memory or from mapped files.

A joined matrix is allocated once. Its parts are copied, dequantized or rounded to 8 bits a few rows
at a time, so that loading needs hardly more memory than the weights that are kept.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from serve_app.model.cpu.stored import Parameters
from serve_app.model.records import DecoderRecord, Linear

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

    def pieces(self, parameter: Tensor) -> Iterator[Tensor]:
        """Return the rows of a matrix in order, a few at a time, as floats on the device."""
        ...

    def vector(self, parameter: Tensor) -> Tensor:
        """Return a parameter of one dimension."""
        ...

    def replace(self, linear: Linear, weight: Tensor) -> None:
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

    def pieces(self, parameter: Tensor) -> Iterator[Tensor]:
        """See `Weights`."""
        yield from torch.split(parameter.detach(), _rows_at_once(parameter))

    def vector(self, parameter: Tensor) -> Tensor:
        """See `Weights`."""
        return parameter.detach()

    def replace(self, linear: Linear, weight: Tensor) -> None:
        """See `Weights`. The module's parameters become parts of the joined matrix, so that the
        module still works. Those that were rounded become empty.
        """
        own = [parameter for parameter in linear.weights if parameter is not self._embedding]
        if weight.dtype != self.dtype:
            for parameter in own:
                parameter.data = parameter.new_empty(0, linear.inputs)
        elif len(own) > 1:
            parts = torch.split(weight, [parameter.shape[0] for parameter in own])
            for parameter, part in zip(own, parts, strict=True):
                parameter.data = part


class MappedWeights:
    """`Weights` from mapped files, for a module without values."""

    def __init__(self, parameters: Parameters, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._parameters = parameters

    def joined(self, parameters: Sequence[Tensor]) -> Tensor:
        """See `Weights`."""
        outputs, inputs = sum(parameter.shape[0] for parameter in parameters), parameters[0].shape[1]
        out = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
        first = 0
        for parameter in parameters:
            for rows in self.pieces(parameter):
                out[first : first + len(rows)] = rows
                first += len(rows)
        return out

    def pieces(self, parameter: Tensor) -> Iterator[Tensor]:
        """See `Weights`. Numbers are in the dtype, rounded as if the file were converted to it."""
        stored, step = self._parameters.matrix(parameter), _rows_at_once(parameter)
        for first in range(0, stored.outputs, step):
            yield stored.floats(first, min(first + step, stored.outputs)).to(self.device, self.dtype)
        self._parameters.release(parameter)

    def vector(self, parameter: Tensor) -> Tensor:
        """See `Weights`."""
        return self._parameters.vector(parameter).to(self.device, self.dtype)

    def replace(self, linear: Linear, weight: Tensor) -> None:
        """Do nothing: the parameters have no values."""


def rounded(weights: Weights, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return joined matrices in float8_e4m3fn [outputs, inputs], and each output's scale, float32
    [outputs].
    """
    outputs, inputs = sum(parameter.shape[0] for parameter in parameters), parameters[0].shape[1]
    out = torch.empty(outputs, inputs, dtype=FP8, device=weights.device)
    scales = torch.empty(outputs, dtype=torch.float32, device=weights.device)
    first = 0
    for parameter in parameters:
        for rows in weights.pieces(parameter):
            these = slice(first, first + len(rows))
            scales[these] = rows.abs().amax(1).float().clamp_min(1e-12) / FP8_MAX
            # A copy: float32 rows may be the module's own.
            wide = rows.to(torch.float32, copy=True)
            out[these] = wide.div_(scales[these, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
            first += len(rows)
    return out, scales


def bytes_needed(model: DecoderRecord, dtype: torch.dtype, *, fp8: bool) -> int:
    """Return the size of a decoder's matrices and rotary angles on the device."""
    linears = [model.head]
    for layer in model.layers:
        linears += (part for part in (layer.qkv, layer.out, layer.gate_up, layer.down) if part is not None)
    matrices = [weight for linear in linears for weight in linear.weights]
    shared = not fp8 and model.head.weights[0] is model.embedding
    size = 0 if shared else model.embedding.numel() * dtype.itemsize
    for matrix in matrices:
        size += matrix.numel() + 4 * matrix.shape[0] if fp8 else matrix.numel() * dtype.itemsize
    return size + sum(rotation.cos.nbytes + rotation.sin.nbytes for rotation in model.rotations)


def _rows_at_once(matrix: Tensor) -> int:
    return max(1, _NUMBERS_AT_ONCE // matrix.shape[1])
