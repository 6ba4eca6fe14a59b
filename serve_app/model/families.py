"""Recognizes the families of models that the C and the Triton kernels run, and fills the records of
their layers from transformers' modules.

A family is a row of `FAMILIES`: which of the record's fields each module of a layer is. Models of
other types are tried as Llama. Everything that a module has (children, parameters, buffers) must be
named by the row; what is left over is refused by its name, because it may change the answer. Each
executor decides which records it can run, and its logits are compared with those of the modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.records import Activation, DecoderRecord, LayerRecord, Linear, Norm, Rotation

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose angles depend only on the position, not on the sequence length.
"""
_MAX_EPS = 1e-2


@dataclass(frozen=True, slots=True)
class Family:
    """How transformers' modules hold a layer.

    norms: the record's field of each norm of a layer, by the module's name. norm_offset: see
    `Norm`. unrotated: the attribute of an attention module that is false where positions are not
    rotated.
    """

    norms: Mapping[str, str]
    norm_offset: float = 0.0
    unrotated: str | None = None


LLAMA = Family({"input_layernorm": "attention_in", "post_attention_layernorm": "mlp_in"})

FAMILIES: Mapping[str, Family] = {
    "gemma3_text": Family(
        {
            "input_layernorm": "attention_in",
            "post_attention_layernorm": "attention_out",
            "pre_feedforward_layernorm": "mlp_in",
            "post_feedforward_layernorm": "mlp_out",
        },
        norm_offset=1.0,
    ),
    "smollm3": Family(LLAMA.norms, unrotated="use_rope"),
}
"""By transformers' `model_type`."""


def recognise(head: Any, base: Any, attention: Sequence[AttentionLayer], max_model_len: int) -> DecoderRecord:
    """Return the records of a causal LM, sharing its module's parameters. Raises
    UnsupportedModelError.
    """
    return _Reader(FAMILIES.get(base.config.model_type, LLAMA)).decoder(head, base, attention, max_model_len)


class _Parts:
    """What a module has, by name. Each part must be taken, or it is refused."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        own = [*module.named_children(), *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        self._left = dict(own)

    def __getitem__(self, name: str) -> Any:
        """Take a part."""
        expect(name in self._left, f"{type(self._module).__name__} without {name}")
        return self._left.pop(name)

    def get(self, name: str) -> Any:
        """Take a part, or return None."""
        return self._left.pop(name, None)

    def done(self) -> None:
        """Raise UnsupportedModelError with the names of the parts that are left."""
        expect(not self._left, f"{type(self._module).__name__} with {', '.join(sorted(self._left))}")


class _Reader:
    """Reads modules of one family."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._eps: set[float] = set()
        self._activations: set[Activation] = set()
        self._rotations: dict[str, int] = {}

    def decoder(self, head: Any, base: Any, attention: Sequence[AttentionLayer], max_model_len: int) -> DecoderRecord:
        expect(
            attention[0].num_kv_heads > 0 and len({_shape(layer) for layer in attention}) == 1,
            "layers of different shapes",
        )
        _refuse_scaled_queries(base.config, max_model_len)
        parts = _Parts(base)
        embedding, factor = _embedding(parts["embed_tokens"])
        rotary = parts["rotary_emb"]
        output = getattr(head, "lm_head", None)
        expect(type(output) is nn.Linear, "another head")
        layers = [self._layer(layer, shape, rotary) for layer, shape in zip(parts["layers"], attention, strict=True)]
        final_norm = self._norm(parts["norm"])
        parts.done()
        expect(len(self._eps) == 1, "norms of different kinds")
        expect(len(self._activations) == 1, "several activations")
        return DecoderRecord(
            layers=layers,
            rotations=[_angles(rotary, kind, max_model_len, attention[0].head_dim) for kind in self._rotations],
            embedding=embedding,
            embedding_factor=factor,
            final_norm=final_norm,
            head=_linear(output),
            activation=self._activations.pop(),
            eps=self._eps.pop(),
        )

    def _layer(self, layer: Any, attention: AttentionLayer, rotary: Any) -> LayerRecord:
        parts = _Parts(layer)
        attn, mlp = parts["self_attn"], parts["mlp"]
        norms = {field: self._norm(parts[name]) for name, field in self._family.norms.items()}
        parts.done()
        inner = _Parts(attn)
        heads = [inner["q_proj"], inner["k_proj"], inner["v_proj"]]
        out = _linear(inner["o_proj"])
        query_norm, key_norm = (self._head_norm(inner.get(name), attention.head_dim) for name in ("q_norm", "k_norm"))
        inner.done()
        gate_up, down = self._mlp(mlp)
        return LayerRecord(
            attention=attention,
            qkv=_linear(*heads),
            out=out,
            gate_up=gate_up,
            down=down,
            attention_in=norms["attention_in"],
            mlp_in=norms["mlp_in"],
            attention_out=norms.get("attention_out"),
            mlp_out=norms.get("mlp_out"),
            query_norm=query_norm,
            key_norm=key_norm,
            rotation=self._rotation(attn, rotary),
        )

    def _mlp(self, mlp: Any) -> tuple[Linear, Linear]:
        parts = _Parts(mlp)
        gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
        parts.get("act_fn")
        parts.done()
        self._activations.add(_activation(mlp.act_fn))
        return _linear(gate, up), _linear(down)

    def _rotation(self, attn: Any, rotary: Any) -> int | None:
        """Number the layer's kind of positions. Embeddings with several kinds name them as the
        layers' types."""
        unrotated = self._family.unrotated
        if unrotated is not None and not getattr(attn, unrotated):
            return None
        several = isinstance(getattr(rotary, "rope_type", None), dict)
        kind = attn.config.layer_types[attn.layer_idx] if several else ""
        return self._rotations.setdefault(kind, len(self._rotations))

    def _norm(self, module: nn.Module) -> Norm:
        parts, wrong = _Parts(module), f"{type(module).__name__} for a norm"
        weight = parts["weight"]
        parts.done()
        eps = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < _MAX_EPS]
        expect(weight.dim() == 1 and len(eps) == 1, wrong)
        self._eps.add(eps[0])
        return Norm(weight, self._family.norm_offset)

    def _head_norm(self, module: nn.Module | None, head_dim: int) -> Norm | None:
        if module is None:
            return None
        norm = self._norm(module)
        expect(norm.weight.shape[0] == head_dim, "norms over all heads")
        return norm


def expect(condition: bool, otherwise: str) -> None:
    """Raise UnsupportedModelError unless the condition holds."""
    if not condition:
        raise UnsupportedModelError(otherwise)


def _shape(layer: AttentionLayer) -> tuple[object, ...]:
    return layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.scale, layer.softcap


def _refuse_scaled_queries(config: Any, positions: int) -> None:
    """Raise UnsupportedModelError if queries are scaled by their position. No check at load runs
    sequences that are long enough to show it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings")
    expect(
        not rope.get("llama_4_scaling_beta") or (first is not None and positions <= first),
        f"queries are scaled by their position from {first} on; with max_model_len {first} the kernels run it",
    )


def _embedding(module: nn.Module) -> tuple[torch.Tensor, float]:
    """Return the weight and the factor of its rows, which some families keep as a buffer too."""
    expect(isinstance(module, nn.Embedding), "another embedding")
    parts = _Parts(module)
    weight = parts["weight"]
    factor = 1.0 if parts.get("embed_scale") is None else float(module.scalar_embed_scale)  # type: ignore[arg-type]
    parts.done()
    expect(type(module) is nn.Embedding or factor != 1.0, "another embedding")
    return weight, factor


def _linear(*modules: Any) -> Linear:
    for module in modules:
        expect(type(module) is nn.Linear, f"{type(module).__name__} for a linear layer")
    biases = [module.bias for module in modules if module.bias is not None]
    expect(len(biases) in (0, len(modules)), "biases in only some of q, k and v")
    return Linear(tuple(module.weight for module in modules), tuple(biases))


def _activation(function: Any) -> Activation:
    x = torch.linspace(-8, 8, 257)
    y = function(x)
    for activation, known in ((Activation.SILU, F.silu(x)), (Activation.GELU_TANH, F.gelu(x, approximate="tanh"))):
        if torch.allclose(y, known, rtol=0, atol=1e-6):
            return activation
    raise UnsupportedModelError(f"the activation {type(function).__name__}")


def _angles(rotary: Any, kind: str, positions: int, head_dim: int) -> Rotation:
    """kind: one of the embedding's layer types, or empty if it has only one."""
    rope_type = rotary.rope_type[kind] if kind else getattr(rotary, "rope_type", None)
    expect(rope_type in _ROPE_TYPES, f"rotary positions of kind {rope_type}")
    arguments = {"layer_type": kind} if kind else {}
    cos, sin = (part[0] for part in rotary(torch.zeros(1), torch.arange(positions)[None], **arguments))
    half = cos.shape[-1] // 2
    expect(2 * half <= head_dim and torch.equal(cos[:, :half], cos[:, half:]), "a different order of rotary angles")
    return Rotation(cos[:, :half].contiguous(), sin[:, :half].contiguous())
