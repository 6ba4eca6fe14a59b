"""Recognizes the families of models that the C and the Triton kernels run, and fills the records of
their layers from transformers' modules.

A family is a row of `FAMILIES`: which of the record's fields each module of a layer is. Models of
other types are tried as Llama. Everything that a module has (children, parameters, buffers) must be
read by `_Reader` or named in the row; what is left over is refused by its name, because it may
change the answer. Each executor decides which records it can run, and its logits are compared with
those of the modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.records import Activation, DecoderRecord, Experts, LayerRecord, Linear, Norm, Rotation, Stack

_ROPE_TYPES = ("default", "linear", "llama3", "proportional", "yarn")
"""Kinds of rotary embedding whose angles depend only on the position, not on the sequence length.
"""
_MAX_EPS = 1e-2


@dataclass(frozen=True, slots=True)
class Mixture:
    """How modules hold a mixture of experts. router: its name. renormalised: its attribute; None if
    it always is. transposed, interleaved: see `Stack`. clamped: the activation is
    `Activation.CLAMPED`.
    """

    router: str
    renormalised: str | None = None
    transposed: bool = False
    interleaved: bool = False
    clamped: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """How transformers' modules hold a layer.

    norms: the record's field of each norm of a layer, by the module's name. norm_offset: see
    `Norm`. unrotated: the attribute of an attention module that is false where positions are not
    rotated. single_angles: rotary embeddings return each angle once, not for both halves of a head.
    mixture: of the layers that have experts. sinks: attention modules have `sinks`. factor: the
    layer's buffer that multiplies what it returns.
    """

    norms: Mapping[str, str]
    norm_offset: float = 0.0
    unrotated: str | None = None
    single_angles: bool = False
    mixture: Mixture | None = None
    sinks: bool = False
    factor: str | None = None


LLAMA = Family({"input_layernorm": "attention_in", "post_attention_layernorm": "mlp_in"})

_FOUR_NORMS = {
    "input_layernorm": "attention_in",
    "post_attention_layernorm": "attention_out",
    "pre_feedforward_layernorm": "mlp_in",
    "post_feedforward_layernorm": "mlp_out",
}

FAMILIES: Mapping[str, Family] = {
    "gemma3_text": Family(_FOUR_NORMS, norm_offset=1.0),
    "gemma4_text": Family(_FOUR_NORMS, factor="layer_scalar"),
    "gpt_oss": Family(
        LLAMA.norms,
        single_angles=True,
        mixture=Mixture("router", transposed=True, interleaved=True, clamped=True),
        sinks=True,
    ),
    "qwen3_moe": Family(LLAMA.norms, mixture=Mixture("gate", renormalised="norm_topk_prob")),
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
        expect(all(layer.num_kv_heads > 0 for layer in attention), "attention without keys")
        _refuse_scaled_queries(base.config, max_model_len)
        parts = _Parts(base)
        embedding, factor = _embedding(parts["embed_tokens"])
        rotary = parts["rotary_emb"]
        output = getattr(head, "lm_head", None)
        expect(type(output) is nn.Linear, "another head")
        layers = [self._layer(layer, shape, rotary) for layer, shape in zip(parts["layers"], attention, strict=True)]
        final_norm = self._norm(parts["norm"])
        parts.done()
        expect(len(self._eps) == 1, "norms with different eps")
        expect(len(self._activations) == 1, "several activations")
        rotations = [self._angles(rotary, kind, max_model_len) for kind in self._rotations]
        for layer in layers:
            half = 0 if layer.rotation is None else rotations[layer.rotation].cos.shape[1]
            expect(2 * half <= layer.attention.head_dim, "more angles than a head has pairs")
        return DecoderRecord(
            layers=layers,
            rotations=rotations,
            embedding=embedding,
            embedding_factor=factor,
            final_norm=final_norm,
            head=_linear(output),
            activation=self._activations.pop(),
            eps=self._eps.pop(),
            softcap=getattr(head.config.get_text_config(), "final_logit_softcapping", None),
        )

    def _layer(self, layer: Any, attention: AttentionLayer, rotary: Any) -> LayerRecord:
        parts = _Parts(layer)
        attn, mlp = parts["self_attn"], parts["mlp"]
        norms = {field: self._norm(parts[name]) for name, field in self._family.norms.items()}
        factor = parts[self._family.factor] if self._family.factor is not None else None
        parts.done()
        inner = _Parts(attn)
        query, key = inner["q_proj"], inner["k_proj"]
        value = inner.get("v_proj") or key  # some layers use keys, before their norm, as values
        out = _linear(inner["o_proj"])
        query_norm, key_norm = (self._head_norm(inner.get(name), attention.head_dim) for name in ("q_norm", "k_norm"))
        sinks = inner["sinks"] if self._family.sinks else None
        norm_values = self._plain_norm(inner.get("v_norm"))
        inner.done()
        mixture = self._family.mixture if hasattr(mlp, "experts") else None
        gate_up, down = self._mlp(mlp) if mixture is None else (None, None)
        return LayerRecord(
            attention=attention,
            qkv=_linear(query, key, value),
            out=out,
            gate_up=gate_up,
            down=down,
            attention_in=norms["attention_in"],
            mlp_in=norms["mlp_in"],
            attention_out=norms.get("attention_out"),
            mlp_out=norms.get("mlp_out"),
            query_norm=query_norm,
            key_norm=key_norm,
            norm_values=norm_values,
            rotation=self._rotation(attn, rotary),
            experts=None if mixture is None else self._experts(mlp, mixture),
            sinks=sinks,
            factor=factor,
        )

    def _mlp(self, mlp: Any) -> tuple[Linear, Linear]:
        parts = _Parts(mlp)
        gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
        parts.get("act_fn")
        parts.done()
        self._activations.add(_activation(mlp.act_fn))
        return _linear(gate, up), _linear(down)

    def _experts(self, mlp: Any, mixture: Mixture) -> Experts:
        parts = _Parts(mlp)
        router, experts = parts[mixture.router], parts["experts"]
        parts.done()
        inner = _Parts(router)
        weight, bias = inner["weight"], inner.get("bias")
        inner.done()
        inner = _Parts(experts)
        gate_up, down = (
            Stack(inner[name], inner.get(f"{name}_bias"), mixture.transposed, interleaved)
            for name, interleaved in (("gate_up_proj", mixture.interleaved), ("down_proj", False))
        )
        inner.get("act_fn")
        inner.done()
        self._activations.add(Activation.CLAMPED if mixture.clamped else _activation(experts.act_fn))
        return Experts(
            router=Linear((weight,), () if bias is None else (bias,)),
            per_token=router.top_k,
            renormalised=mixture.renormalised is None or bool(getattr(router, mixture.renormalised)),
            gate_up=gate_up,
            down=down,
            alpha=float(experts.alpha) if mixture.clamped else 0.0,
            limit=float(experts.limit) if mixture.clamped else 0.0,
        )

    def _rotation(self, attn: Any, rotary: Any) -> int | None:
        """Return the index of the layer's rotary table, or None without rotation. An embedding with
        several tables has one for each of `config.layer_types`."""
        unrotated = self._family.unrotated
        if unrotated is not None and not getattr(attn, unrotated):
            return None
        several = isinstance(getattr(rotary, "rope_type", None), dict)
        kind = attn.config.layer_types[attn.layer_idx] if several else ""
        return self._rotations.setdefault(kind, len(self._rotations))

    def _angles(self, rotary: Any, kind: str, positions: int) -> Rotation:
        """kind: one of the embedding's layer types, or empty if it has only one."""
        rope_type = rotary.rope_type[kind] if kind else getattr(rotary, "rope_type", None)
        expect(rope_type in _ROPE_TYPES, f"rotary positions of kind {rope_type}")
        arguments = {"layer_type": kind} if kind else {}
        cos, sin = (part[0] for part in rotary(torch.zeros(1), torch.arange(positions)[None], **arguments))
        half = cos.shape[-1] if self._family.single_angles else cos.shape[-1] // 2
        order = self._family.single_angles or torch.equal(cos[:, :half], cos[:, half:])
        expect(order, "a different order of rotary angles")
        return Rotation(cos[:, :half].contiguous(), sin[:, :half].contiguous())

    def _norm(self, module: nn.Module) -> Norm:
        parts = _Parts(module)
        weight = parts["weight"]
        parts.done()
        expect(weight.dim() == 1, f"{type(module).__name__} for a norm")
        self._add_eps(module)
        return Norm(weight, self._family.norm_offset)

    def _plain_norm(self, module: nn.Module | None) -> bool:
        """Whether there is a norm, which must have no weight."""
        if module is None:
            return False
        _Parts(module).done()
        self._add_eps(module)
        return True

    def _add_eps(self, module: nn.Module) -> None:
        eps = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < _MAX_EPS]
        expect(len(eps) == 1, f"{type(module).__name__} for a norm")
        self._eps.add(eps[0])

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


def _refuse_scaled_queries(config: Any, positions: int) -> None:
    """Raise UnsupportedModelError if queries are scaled by their position. No check at load runs
    sequences that are long enough to show it.
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    first: Any = rope.get("original_max_position_embeddings")
    if rope.get("llama_4_scaling_beta"):
        expect(first is not None, "queries that are scaled by their position")
        expect(
            positions <= first,
            f"queries are scaled by position beyond {first} tokens; with max_model_len {first} the kernels run it",
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
    expect(len(biases) in (0, len(modules)), "biases in only some of the joined linear layers")
    return Linear(tuple(module.weight for module in modules), tuple(biases))


def _activation(function: Any) -> Activation:
    x = torch.linspace(-8, 8, 257)
    y = function(x)
    for activation, known in ((Activation.SILU, F.silu(x)), (Activation.GELU_TANH, F.gelu(x, approximate="tanh"))):
        if torch.allclose(y, known, rtol=0, atol=1e-6):
            return activation
    raise UnsupportedModelError(f"the activation {type(function).__name__}")
