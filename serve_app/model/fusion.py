"""Makes a transformers model faster without knowing its name: fewer and packed products, one-kernel
norms.

Candidates are found by structure. Each replacement is kept only if it reproduces the original
module on random input:
- Linear layers of one parent that get the same input tensor (q, k, v; gate, up) become one product.
- Every linear layer (also transformers' `Conv1D`) becomes an `InvariantLinear` if its weight can be
  packed.
- A module that computes an RMS norm becomes torch's own (on GPUs).
- An activation on the CPU is called so that no element's bits depend on its position in the batch.
Other modules stay unchanged; layers that gave different results are logged.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from serve_app.model.elementwise import AlignedActivation, is_activation
from serve_app.model.linear import MIN_ROWS, can_pack, linear

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted difference from the replaced module, relative to the standard deviation of its
output. (Norms of float64 models compute in float32.)
"""


@contextmanager
def watch_inputs(base: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Collect (linear layer, its input) in call order while the context is open."""
    seen: list[tuple[nn.Module, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append((module, args[0]))

    hooks = [module.register_forward_pre_hook(note) for module in base.modules() if _is_linear(module)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def optimize(
    head: nn.Module, base: nn.Module, seen: list[tuple[nn.Module, Tensor]], on_progress: Callable[[float], None]
) -> None:
    """Rewrite head and base in place. `seen`: the list of `watch_inputs` from one base run."""
    parents = [module for root in (base, head) for module in root.modules()]
    inputs = {id(module): id(tensor) for module, tensor in seen}
    refused: set[str] = set()
    for index, parent in enumerate(parents):
        _fuse_siblings(parent, inputs, refused)
        for name, child in list(parent.named_children()):
            if is_activation(child) and next(base.parameters()).device.type == "cpu":
                setattr(parent, name, AlignedActivation(child))
                continue
            replacement = _replacement(child)
            if replacement is None:
                continue
            if _agrees(child, replacement):
                setattr(parent, name, replacement)
            else:
                refused.add(f"{type(parent).__name__}.{name}")
        on_progress((index + 1) / len(parents))
    if refused:
        logger.info("not fused, because the fused form gave different results: %s", ", ".join(sorted(refused)))


class _SharedProduct:
    """One linear layer that replaces several with the same input. Each `_Part` returns a slice of
    its output.
    """

    def __init__(self, layer: nn.Module, parts: int) -> None:
        self._layer = layer
        self._parts = parts
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._left = 0

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._layer.weight  # type: ignore[assignment]
        return weight

    def output(self, x: Tensor) -> Tensor:
        if self._output is None or self._input is not x:
            self._input, self._output, self._left = x, self._layer(x), self._parts
        out = self._output
        assert out is not None
        self._left -= 1
        if self._left == 0:
            # Keep nothing beyond the step: it would hold memory, and a new tensor could match the
            # old one's identity.
            self._input = self._output = None
        return out


class _Part(nn.Module):
    """Replaces one of the fused layers."""

    def __init__(self, shared: _SharedProduct, start: int, end: int) -> None:
        super().__init__()
        self._shared = shared
        self._start, self._end = start, end

    def forward(self, x: Tensor) -> Tensor:
        """Return this layer's slice: x [..., in_features] -> [..., end - start], a view."""
        return self._shared.output(x)[..., self._start : self._end]

    @property
    def weight(self) -> Tensor:
        """The weight [end - start, in_features] of this layer."""
        return self._shared.weight[self._start : self._end]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in one kernel."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., dim]. Returns the same shape."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def _is_linear(module: nn.Module) -> bool:
    # Exactly these types: a subclass (quantized, adapted) may compute something else.
    return type(module) in (nn.Linear, Conv1D)


def _weight_and_bias(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight [out, in] and the bias [out]."""
    weight = module.weight.T if type(module) is Conv1D else module.weight
    return weight, module.bias  # type: ignore[return-value]


def _fuse_siblings(parent: nn.Module, inputs: dict[int, int], refused: set[str]) -> None:
    groups: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, child in parent.named_children():
        if _is_linear(child) and id(child) in inputs:
            groups.setdefault(inputs[id(child)], []).append((name, child))
    for group in groups.values():
        weights, biases = zip(*(_weight_and_bias(child) for _, child in group), strict=True)
        present = [bias for bias in biases if bias is not None]
        if len(group) < 2 or len(present) not in (0, len(group)):
            continue
        fused = linear(torch.cat(weights), torch.cat(present) if present else None)
        shared = _SharedProduct(fused, len(group))
        ends = torch.tensor([weight.shape[0] for weight in weights]).cumsum(0).tolist()
        parts = [_Part(shared, end - weight.shape[0], end) for end, weight in zip(ends, weights, strict=True)]
        x = _random_input(group[0][1])
        # One tensor for all parts, as in the model: they must share its product.
        if all(_close(child(x), part(x)) for (_, child), part in zip(group, parts, strict=True)):
            for (name, _), part in zip(group, parts, strict=True):
                setattr(parent, name, part)
        else:
            refused.add(f"{type(parent).__name__}.{'+'.join(name for name, _ in group)}")


def _replacement(module: nn.Module) -> nn.Module | None:
    if _is_linear(module):
        weight, bias = _weight_and_bias(module)
        return linear(weight, bias) if can_pack(weight) else None
    return _rms_norm(module)


def _rms_norm(module: nn.Module) -> nn.Module | None:
    """Return a verified RMS norm for a module with one weight vector and one small constant, or
    None.
    """
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or isinstance(module, RMSNorm):
        return None
    if not _faster_norm(parameters["weight"]):
        return None
    constants = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2]
    if len(constants) != 1:
        return None
    weight = parameters["weight"]
    # Some model families store weight - 1.
    for candidate in (weight, 1 + weight):
        norm = RMSNorm(candidate, constants[0])
        if _agrees(module, norm):
            return norm
    return None


def _faster_norm(weight: Tensor) -> bool:
    """Whether torch's norm is faster. On the CPU it is composed in double precision and slower than
    the modules' own.
    """
    return weight.device.type != "cpu"


def _random_input(module: nn.Module) -> Tensor:
    weight: Tensor = _weight_and_bias(module)[0] if _is_linear(module) else module.weight  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 2 * MIN_ROWS, weight.shape[-1], generator=generator).to(weight)


def _agrees(old: nn.Module, new: nn.Module) -> bool:
    x = _random_input(old)
    return _close(old(x), new(x))


def _close(expected: Tensor, got: Tensor) -> bool:
    spread = expected.double().std().clamp_min(1e-30)
    return bool((expected - got).abs().max() <= _TOLERANCE[expected.dtype] * spread)
