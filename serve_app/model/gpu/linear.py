"""A layer's product on the GPU: by torch's library, or by the Triton kernel where rows must not feel each other or
weights are in 8 bits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from serve_app.model.gpu.kernels import matmul as kernels
from serve_app.model.llama import Linear

FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0
_BLOCK_K = 64


@dataclass(frozen=True, slots=True)
class GpuLinear:
    """y = x W^T + b. x [rows, inputs], y [rows, outputs] in x's dtype.

    weight: [outputs, inputs], in x's dtype or, with scales (float32 [outputs]), in float8_e4m3fn. invariant: a row's
    result has the same bits whatever the other rows are.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None
    invariant: bool

    @classmethod
    def of(cls, linear: Linear, *, fp8: bool, invariant: bool) -> "GpuLinear":
        """The linear layer in this form; fp8 rounds its weights, with one scale for each output."""
        weight, scales = linear.weight.contiguous(), None
        if fp8:
            scales = weight.abs().amax(1).float().clamp_min(1e-12) / _FP8_MAX
            weight = (weight.float() / scales[:, None]).clamp(-_FP8_MAX, _FP8_MAX).to(FP8)
        return cls(weight, linear.bias, scales, invariant)

    @property
    def nbytes(self) -> int:
        """Memory of weights, bias and scales."""
        return sum(part.nbytes for part in (self.weight, self.bias, self.scales) if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.scales is None and not self.invariant:
            return F.linear(x, self.weight, self.bias)
        return _product(x.contiguous(), self.weight, self.bias, self.scales)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None) -> Tensor:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(rows, outputs)
    many = rows > 64 and x.dtype != torch.float32
    block_o = 128 if many else 64
    block_r = 128 if many else min(max(16, triton.next_power_of_2(rows)), 64)
    kernels.product[(triton.cdiv(outputs, block_o) * triton.cdiv(rows, block_r),)](
        x, weight, x if bias is None else bias, x if scales is None else scales, out, rows, outputs, inputs,
        BLOCK_O=block_o, BLOCK_R=block_r, BLOCK_K=_BLOCK_K, EVEN=inputs % _BLOCK_K == 0, BIASED=bias is not None,
        SCALED=scales is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=8 if many else 4, num_stages=2 if x.dtype == torch.float32 else 4,
    )  # fmt: skip
    return out
