"""Recognizes Llama-like models by their structure, whatever their name.

A Llama-like model has layers with two RMS norms, attention with separate q, k, v (optionally with
norms of q and k) and rotary positions, and a gated MLP. Module names must be transformers' usual
ones. Shapes and parameters must match exactly, so models with additional parts are rejected. Each
executor decides which of these models it can run. The finished executor's logits are compared with
those of the modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.executor import UnsupportedModelError

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend only on the position, not on the sequence length.
"""


class Activation(IntEnum):
    """The supported activations. `cpu/kernels/elementwise.h` uses the same numbers."""

    SILU = 0
    GELU_TANH = 1


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
class LlamaLayer:
    """One layer's weights. query_norm and key_norm are [head_dim]."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Llama:
    """A whole model. cos, sin: [positions, rotated pairs per head]."""

    layers: list[LlamaLayer]
    attention: Sequence[AttentionLayer]
    embedding: Tensor
    final_norm: Tensor
    head: Linear
    activation: Activation
    eps: float
    cos: Tensor
    sin: Tensor


def recognise(head: Any, base: Any, attention: Sequence[AttentionLayer], max_model_len: int) -> Llama:
    """Return the parts of a Llama-like model, sharing the module's parameters. Raises
    UnsupportedModelError.
    """
    _expect(
        attention[0].num_kv_heads > 0 and len({_shape(layer) for layer in attention}) == 1, "layers of different shapes"
    )
    _children(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    _expect(type(base.embed_tokens) is nn.Embedding, "another embedding")
    output = getattr(head, "lm_head", None)
    _expect(type(output) is nn.Linear, "another head")
    layers = [_layer(layer) for layer in base.layers]
    eps = {_eps(layer.input_layernorm) for layer in base.layers}
    _expect(len(eps) == 1, "norms of different kinds")
    cos, sin = _angles(base.rotary_emb, max_model_len, attention[0].head_dim)
    return Llama(
        layers=layers,
        attention=attention,
        embedding=base.embed_tokens.weight,
        final_norm=_norm(base.norm),
        head=_linear(output),
        activation=_activation(base.layers[0].mlp.act_fn),
        eps=eps.pop(),
        cos=cos,
        sin=sin,
    )


def _layer(layer: Any) -> LlamaLayer:
    _children(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
    attn, mlp = layer.self_attn, layer.mlp
    _children(attn, {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"})
    _children(mlp, {"gate_proj", "up_proj", "down_proj"}, {"act_fn"})
    return LlamaLayer(
        qkv=_linear(attn.q_proj, attn.k_proj, attn.v_proj),
        out=_linear(attn.o_proj),
        gate_up=_linear(mlp.gate_proj, mlp.up_proj),
        down=_linear(mlp.down_proj),
        input_norm=_norm(layer.input_layernorm),
        post_norm=_norm(layer.post_attention_layernorm),
        query_norm=_head_norm(attn, "q_norm"),
        key_norm=_head_norm(attn, "k_norm"),
    )


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnsupportedModelError(otherwise)


def _children(module: nn.Module, needed: set[str], allowed: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    names = {name for name, _ in module.named_children()}
    missing, more = needed - names, names - needed - allowed
    _expect(not missing, f"{type(module).__name__} without {', '.join(sorted(missing))}")
    _expect(not more, f"{type(module).__name__} with {', '.join(sorted(more))}")
    own = [name for name, _ in module.named_parameters(recurse=False)]
    _expect(not own, f"{type(module).__name__} with {', '.join(own)}")


def _shape(layer: AttentionLayer) -> tuple[object, ...]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.scale, layer.softcap


def _linear(*modules: Any) -> Linear:
    for module in modules:
        _expect(type(module) is nn.Linear, f"{type(module).__name__} for a linear layer")
    biases = [module.bias for module in modules if module.bias is not None]
    _expect(len(biases) in (0, len(modules)), "biases in only some of q, k and v")
    return Linear(tuple(module.weight for module in modules), tuple(biases))


def _norm(module: nn.Module) -> Tensor:
    parameters = dict(module.named_parameters())
    _expect(set(parameters) == {"weight"} and parameters["weight"].dim() == 1, f"{type(module).__name__} for a norm")
    return parameters["weight"]


def _head_norm(attn: Any, name: str) -> Tensor | None:
    module = getattr(attn, name, None)
    if module is None:
        return None
    weight = _norm(module)
    _expect(weight.shape[0] == attn.head_dim, "norms over all heads")
    return weight


def _eps(module: nn.Module) -> float:
    found = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2]
    _expect(len(found) == 1, f"{type(module).__name__} for a norm")
    return found[0]


def _activation(function: Any) -> Activation:
    x = torch.linspace(-8, 8, 257)
    y = function(x)
    for activation, known in ((Activation.SILU, F.silu(x)), (Activation.GELU_TANH, F.gelu(x, approximate="tanh"))):
        if torch.allclose(y, known, rtol=0, atol=1e-6):
            return activation
    raise UnsupportedModelError(f"the activation {type(function).__name__}")


def _angles(rotary: Any, positions: int, head_dim: int) -> tuple[Tensor, Tensor]:
    kind = getattr(rotary, "rope_type", None)
    _expect(kind in _ROPE_TYPES, f"rotary positions of kind {kind}")
    cos, sin = (part[0] for part in rotary(torch.zeros(1), torch.arange(positions)[None]))
    half = cos.shape[-1] // 2
    _expect(2 * half <= head_dim and torch.equal(cos[:, :half], cos[:, half:]), "a different order of rotary angles")
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()
