"""A mixture of experts on the GPU: launches only, so that CUDA graphs can capture it."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from serve_app.model.gpu import ops
from serve_app.model.gpu.kernels import experts as kernels
from serve_app.model.gpu.linear import GpuLinear, round_rows, tile_of
from serve_app.model.gpu.weights import Weights, rounded
from serve_app.model.records import Activation, Experts, Stack

_COLUMNS = 1024
_PAIRS = 1024
"""Pairs that a program looks through at once."""


@dataclass(frozen=True, slots=True)
class GpuStack:
    """One matrix per expert, [experts, outputs, inputs], gate before up. bias: [experts, outputs].
    scales: float32 [experts, outputs] of weights in float8_e4m3fn.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None

    @classmethod
    def of(cls, stack: Stack, weights: Weights, *, fp8: bool) -> "GpuStack":
        """Convert a stack. fp8 rounds its weights, with one scale per output."""
        if not fp8:
            return cls(weights.stacked(stack), weights.biases(stack), None)
        shape = len(stack.weight), stack.outputs, stack.inputs
        weight, scales = rounded(weights, [stack])
        return cls(weight.view(shape), weights.biases(stack), scales.view(shape[:2]))

    @property
    def nbytes(self) -> int:
        """Size of weights, bias and scales."""
        return sum(part.nbytes for part in (self.weight, self.bias, self.scales) if part is not None)


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the pairs of a step are cut into tiles; see `kernels.arrange`."""

    order: Tensor
    tiles: Tensor
    num_tiles: Tensor

    @classmethod
    def of(cls, ids: Tensor, experts: int, lines: int) -> "_Plan":
        pairs, device = ids.numel(), ids.device
        most = min(pairs, experts) + pairs // lines
        counts = torch.empty(experts, dtype=torch.int32, device=device)
        order = torch.empty(pairs, dtype=torch.int32, device=device)
        tiles = torch.empty(3, most, dtype=torch.int32, device=device)
        num_tiles = torch.empty(1, dtype=torch.int32, device=device)
        kernels.count[(experts,)](ids, counts, pairs, BLOCK=_PAIRS, num_warps=4)
        kernels.arrange[(experts,)](
            ids, counts, order, tiles, num_tiles, pairs, experts, most,
            BLOCK_R=lines, BLOCK=_PAIRS, BLOCK_E=triton.next_power_of_2(experts), num_warps=4,
        )  # fmt: skip
        return cls(order, tiles, num_tiles)


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """See `Experts`. A token's bits do not depend on other tokens, except for the router's product
    without `invariant`.
    """

    router: GpuLinear
    gate_up: GpuStack
    down: GpuStack
    per_token: int
    renormalised: bool
    activation: Activation
    alpha: float
    limit: float

    @classmethod
    def of(
        cls, experts: Experts, activation: Activation, weights: Weights, *, fp8: bool, invariant: bool
    ) -> "GpuExperts":
        """Convert a record. The router keeps its dtype."""
        return cls(
            router=GpuLinear.of(experts.router, weights, fp8=False, invariant=invariant),
            gate_up=GpuStack.of(experts.gate_up, weights, fp8=fp8),
            down=GpuStack.of(experts.down, weights, fp8=fp8),
            per_token=experts.per_token,
            renormalised=experts.renormalised,
            activation=activation,
            alpha=experts.alpha,
            limit=experts.limit,
        )

    @property
    def nbytes(self) -> int:
        """Size of the weights."""
        return self.router.nbytes + self.gate_up.nbytes + self.down.nbytes

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """Return the mixture of x [T, hidden], [T, hidden]. slots: int64 [T], negative for
        padding, whose result is zero.
        """
        tokens, hidden = x.shape
        count = self.gate_up.weight.shape[0]
        ids, factors = self._route(x, slots)
        tile = tile_of(-(-ids.numel() // count), 0, self.gate_up.weight.dtype)
        plan = _Plan.of(ids, count, tile["BLOCK_R"])
        both = self._product(self.gate_up, x, plan, tile, gather=True)
        pairs = self._product(self.down, self._activated(both), plan, tile, gather=False)
        out = torch.empty_like(x)
        kernels.combine[(tokens, triton.cdiv(hidden, _COLUMNS))](
            pairs, ids, factors, out, hidden, PER_TOKEN=self.per_token, BLOCK=_COLUMNS, num_warps=4
        )
        return out

    def _route(self, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        tokens, experts = scores.shape
        ids = torch.empty(tokens, self.per_token, dtype=torch.int32, device=x.device)
        factors = torch.empty(tokens, self.per_token, dtype=torch.float32, device=x.device)
        kernels.route[(tokens,)](
            scores, slots, ids, factors, experts, PER_TOKEN=self.per_token,
            RANKS=triton.next_power_of_2(self.per_token), RENORMALISED=self.renormalised,
            BLOCK=triton.next_power_of_2(experts), num_warps=1,
        )  # fmt: skip
        return ids, factors

    def _activated(self, both: Tensor) -> Tensor:
        if self.activation is not Activation.CLAMPED:
            return ops.gate_times_up(both, gelu=self.activation is Activation.GELU_TANH)
        rows, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, width)
        kernels.clamped_gate_times_up[(rows, triton.cdiv(width, _COLUMNS))](
            both, out, width, self.alpha, self.limit, BLOCK=_COLUMNS, num_warps=4
        )
        return out

    def _product(self, stack: GpuStack, x: Tensor, plan: _Plan, tile: dict[str, int], *, gather: bool) -> Tensor:
        _, outputs, inputs = stack.weight.shape
        out = torch.empty(len(plan.order), outputs, dtype=x.dtype, device=x.device)
        scales, row_scales = stack.scales, None
        if scales is not None:
            x, row_scales = round_rows(x)
        block_k = 64 if scales is None else 128
        kernels.expert_product[(triton.cdiv(outputs, tile["BLOCK_O"]), plan.tiles.shape[1])](
            x, stack.weight, out if stack.bias is None else stack.bias, out if scales is None else scales,
            out if row_scales is None else row_scales, out, plan.order, plan.tiles, plan.num_tiles,
            plan.tiles.shape[1], outputs, inputs, PER_TOKEN=self.per_token, GATHER=gather, BLOCK_K=block_k,
            EVEN=inputs % block_k == 0, BIASED=stack.bias is not None, SCALED=scales is not None,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile,
        )  # fmt: skip
        return out
