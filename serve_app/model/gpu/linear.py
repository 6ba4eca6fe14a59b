"""A layer's product on the GPU: by the Triton kernel or by torch's libraries, whichever is faster
for the number of rows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from serve_app.model.gpu.kernels import matmul as kernels
from serve_app.model.gpu.weights import FP8, FP8_MAX, Weights, rounded
from serve_app.model.records import Linear

_FEW_ROWS = 32
"""Up to this many rows the Triton kernel is as fast as cuBLAS or faster (20 % at one row, measured
on an H200).
"""
_FEW_ROWS_FP8 = 64
"""`_FEW_ROWS` for 8-bit products."""
_BLOCK_O = 64
"""Outputs per tile of few rows."""
_PROGRAMS = 128
"""With fewer tiles, the inputs are split into parts. About the number of processors of a large GPU.
"""
_SPLIT_INPUTS, _PART_INPUTS = 2048, 512
"""The fewest inputs that are split, and the fewest inputs of a part."""
_ROWS_OF_PARTS = 4096
"""Rows per launch of split products: their parts stay in float32 until they are added."""


@dataclass(frozen=True, slots=True)
class GpuLinear:
    """y = x W^T + b. x [rows, inputs], y [rows, outputs] in x's dtype.

    weight: [outputs, inputs], in x's dtype, or in float8_e4m3fn with scales (float32 [outputs]). In
    that case x is rounded to float8_e4m3fn too, with one scale per row. invariant: a row's bits do
    not depend on other rows.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    invariant: bool

    @classmethod
    def of(cls, linear: Linear, weights: Weights, *, fp8: bool, invariant: bool) -> "GpuLinear":
        """Convert a linear layer. fp8 rounds its weights, with one scale per output."""
        biases = [weights.vector(bias) for bias in linear.biases]
        scales: Tensor | None = None
        if fp8:
            weight, scales = rounded(weights, linear.weights)
        else:
            weight = weights.joined(linear.weights)
        return cls(weight, torch.cat(biases) if biases else None, scales, invariant)

    @property
    def nbytes(self) -> int:
        """Size of weights, bias and scales."""
        return sum(part.nbytes for part in (self.weight, self.bias, self.scales) if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        x = x.contiguous()
        if self.scales is not None:
            return self._of_8_bits(x, self.scales)
        # Triton multiplies float32 without tensor cores.
        if not self.invariant and (x.shape[0] > _FEW_ROWS or x.dtype == torch.float32):
            return F.linear(x, self.weight, self.bias)
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        _product(x, self.weight, self.bias, None, None, out)
        return out

    def _of_8_bits(self, x: Tensor, scales: Tensor) -> Tensor:
        narrow, row_scales = round_rows(x)
        # The library's row-scaled product returns bfloat16 only, and requires whole vectors.
        whole = self.weight.shape[0] % 16 == 0 and self.weight.shape[1] % 16 == 0
        if not self.invariant and x.shape[0] > _FEW_ROWS_FP8 and x.dtype == torch.bfloat16 and whole:
            each = F.ScalingType.RowWise
            return F.scaled_mm(
                narrow, self.weight.t(), row_scales[:, None], each, scales[None, :], each,
                bias=self.bias, output_dtype=x.dtype, use_fast_accum=True,
            )  # fmt: skip
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        _product(narrow, self.weight, self.bias, scales, row_scales, out)
        return out


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [rows, inputs] in float8_e4m3fn, and each row's scale, float32 [rows]."""
    rows, inputs = x.shape
    narrow, row_scales = torch.empty_like(x, dtype=FP8), torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(inputs))
    kernels.round_rows[(rows,)](x, narrow, row_scales, inputs, LARGEST=FP8_MAX, BLOCK=block, num_warps=8)
    return narrow, row_scales


def _part(outputs: int, inputs: int, block_k: int) -> int:
    """Return the inputs per part. They depend only on the weight's shape, so that all rows are
    summed in one order.
    """
    if inputs < _SPLIT_INPUTS:
        return inputs
    parts = max(1, min(_PROGRAMS // triton.cdiv(outputs, _BLOCK_O), inputs // _PART_INPUTS))
    return int(triton.cdiv(triton.cdiv(inputs, parts), block_k) * block_k)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, row_scales: Tensor | None, out: Tensor
) -> None:
    """Multiply into out [rows, outputs] with the Triton kernel. With scales both factors are in 8
    bits.
    """
    (rows, inputs), outputs = x.shape, weight.shape[0]
    # Independent of the rows. With 8 bits, each step is added separately.
    block_k = 64 if scales is None else 128
    part = _part(outputs, inputs, block_k)
    parts = triton.cdiv(inputs, part)
    if parts > 1 and rows > _ROWS_OF_PARTS:
        for some in (slice(first, first + _ROWS_OF_PARTS) for first in range(0, rows, _ROWS_OF_PARTS)):
            _product(x[some], weight, bias, scales, None if row_scales is None else row_scales[some], out[some])
        return
    sums = out if parts == 1 else torch.empty(parts, rows, outputs, dtype=torch.float32, device=out.device)
    behind = {
        "bias": out if bias is None else bias,
        "scales": out if scales is None else scales,
        "row_scales": out if row_scales is None else row_scales,
        "BIASED": bias is not None,
        "SCALED": scales is not None,
    }
    tile = tile_of(rows, outputs, x.dtype)
    tiles = triton.cdiv(outputs, tile["BLOCK_O"]) * triton.cdiv(rows, tile["BLOCK_R"])
    kernels.product[(tiles, parts)](
        x, weight, out=sums, rows=rows, outputs=outputs, inputs=inputs, part=part, BLOCK_K=block_k,
        EVEN=inputs % block_k == 0, SPLIT=parts > 1, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **behind, **tile,
    )  # fmt: skip
    if parts > 1:
        kernels.add_parts[(triton.cdiv(outputs, 512), rows)](
            sums, out=out, rows=rows, outputs=outputs, PARTS=parts, BLOCK=512, num_warps=4, **behind
        )


def tile_of(rows: int, outputs: int, dtype: torch.dtype) -> dict[str, int]:
    """Return a tile's size, warps and stages (measured on an H200). None of them changes a row's
    bits.
    """
    if rows > 64 and dtype != torch.float32:
        wide = dtype != FP8 and triton.cdiv(outputs, 128) * triton.cdiv(rows, 256) >= _PROGRAMS
        return {"BLOCK_O": 128, "BLOCK_R": 256 if wide else 128, "num_warps": 8, "num_stages": 3 if wide else 4}
    lines = min(max(16, triton.next_power_of_2(rows)), 64)
    # As many as leave room for two programs per processor.
    stages = 2 if dtype == torch.float32 else 6 if lines == 64 else 8
    return {"BLOCK_O": _BLOCK_O, "BLOCK_R": lines, "num_warps": 4, "num_stages": stages}
