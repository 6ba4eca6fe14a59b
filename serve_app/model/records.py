"""Records that describe a decoder and its layers. The C and the Triton executors take these
records, whatever the model's family. `families` fills them from transformers' modules.

Tensors in a record may be on torch's device "meta", without values.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionLayer


class Activation(IntEnum):
    """The supported activations. `cpu/kernels/elementwise.h` uses the same numbers."""

    SILU = 0
    GELU_TANH = 1
    CLAMPED = 2
    """See `Experts`."""


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x + b, of one or more joined modules. weights: [outputs, inputs] of each module;
    biases: [outputs] of each.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    @property
    def inputs(self) -> int:
        """Width of x."""
        return self.weights[0].shape[1]

    @property
    def weight(self) -> Tensor:
        """The joined weight [outputs, inputs]."""
        return torch.cat(self.weights) if len(self.weights) > 1 else self.weights[0]

    @property
    def bias(self) -> Tensor | None:
        """The joined bias [outputs], or None."""
        return torch.cat(self.biases) if self.biases else None


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x^2) + eps) * (weight + offset). weight: [width]. Gemma's offset is 1."""

    weight: Tensor
    offset: float = 0.0

    @property
    def factor(self) -> Tensor:
        """weight + offset, in float32 if there is an offset: a 16-bit sum would be rounded."""
        return self.weight.float() + self.offset if self.offset else self.weight


@dataclass(frozen=True, slots=True)
class Rotation:
    """Angles of rotary positions. cos, sin: float32 [positions, rotated pairs per head]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Stack:
    """One matrix per expert. weight: [experts, outputs, inputs], or [experts, inputs, outputs] if
    `transposed`. bias: [experts, outputs] or None. interleaved: rows of gate and up alternate;
    otherwise all rows of the gate come first.
    """

    weight: Tensor
    bias: Tensor | None = None
    transposed: bool = False
    interleaved: bool = False

    @property
    def outputs(self) -> int:
        """Outputs of each expert."""
        return self.weight.shape[2 if self.transposed else 1]

    @property
    def inputs(self) -> int:
        """Inputs of each expert."""
        return self.weight.shape[1 if self.transposed else 2]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. A token's result is the weighted sum of the `per_token` experts with
    the largest scores of the router, each down(act(gate) * up).

    The weights are the softmax of all scores, or, if `renormalised`, of the chosen ones. alpha,
    limit: of `Activation.CLAMPED`, (up' + 1) * gate' / (1 + exp(-alpha gate')), with gate' =
    min(gate, limit) and up' = up from -limit to limit.
    """

    router: Linear
    per_token: int
    renormalised: bool
    gate_up: Stack
    down: Stack
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.gate_up.weight.shape[0]


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer. Its residual stream x becomes x + out(attend(qkv(n1(x)))), then x + down(act(gate)
    * up), with gate and up of n2(x). If it has experts, they take the place of gate_up and down.

    attention_in, mlp_in: n1 and n2. attention_out, mlp_out: norms of what is added to x, or None.
    query_norm, key_norm: norms of each head [head_dim], before the rotation. norm_values: values
    are normalized per head, without a weight. rotation: index into the decoder's rotations; None:
    the layer has no rotary positions. factor: [1], multiplies the layer's output; None: no factor.
    sinks: [heads], the score of one more key per query head, whose value is zero.
    """

    attention: AttentionLayer
    qkv: Linear
    out: Linear
    gate_up: Linear | None
    down: Linear | None
    attention_in: Norm
    mlp_in: Norm
    attention_out: Norm | None
    mlp_out: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    norm_values: bool
    rotation: int | None
    factor: Tensor | None
    experts: Experts | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderRecord:
    """A whole model. embedding: [vocabulary, hidden], whose rows are multiplied by
    `embedding_factor`. softcap: logits are softcap * tanh(logits / softcap); None: as they are.
    """

    layers: list[LayerRecord]
    rotations: list[Rotation]
    embedding: Tensor
    embedding_factor: float
    final_norm: Norm
    head: Linear
    activation: Activation
    eps: float
    softcap: float | None

    @property
    def has_experts(self) -> bool:
        """Whether some layers have experts. Rounded scores choose other experts for some tokens."""
        return any(layer.experts is not None for layer in self.layers)
