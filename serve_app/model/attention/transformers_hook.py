"""Binds transformers' attention to the paged pool.

transformers calls one function for every attention layer (`AttentionInterface`). Our function reads
what it needs from the calling module, because some models do not pass extra keywords down.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from serve_app.errors import one_line
from serve_app.model.attention_backend import AttentionBackend, AttentionLayer, LayerCache
from serve_app.model.executor import UnsupportedModelError

IMPLEMENTATION = "serve_app_paged"
"""Name of our function in transformers. No mask function is registered, so transformers builds no
mask.
"""

_ATTRIBUTE = "serve_app_binding"


@dataclass(slots=True)
class StepContext:
    """State that all layers of one model share during a step."""

    backend: AttentionBackend
    metadata: Any = None


@dataclass(slots=True)
class _Binding:
    """Attribute of an attention module: the layer's shape, and the pool of its keys and values."""

    layer: AttentionLayer
    context: StepContext
    cache: LayerCache | None = None


@dataclass(slots=True)
class _Recorder:
    """Attribute of every module during `discover`: records the modules that call attention, and
    their layer shapes.
    """

    calls: list[tuple[nn.Module, AttentionLayer]] = field(default_factory=list)


def _paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend. query [1, heads, N, dim], key, value [1, kv_heads, N, dim] -> [1, N, heads, dim]."""
    binding = getattr(module, _ATTRIBUTE)
    if isinstance(binding, _Recorder):
        binding.calls.append((module, _layer(module, query, key, value, kwargs)))
        _refuse_unknown(module, attention_mask, kwargs)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    context = binding.context
    out = context.backend.forward(binding.layer, query[0], key[0], value[0], binding.cache, context.metadata)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)


_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "position_ids", "cache_position"})
"""Arguments that are read, or that repeat what the step's metadata contains."""
_NAMED = {"s_aux": "attention sinks"}
_KINDS = ("layer_types", "layers_block_type")
"""Attributes of configurations with the kind of each layer."""
_MASKS = frozenset({"full_attention", "sliding_attention", "attention"})


def _refuse_unknown(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for an unknown argument that would change the result."""
    unknown = [name for name, value in kwargs.items() if name not in _UNDERSTOOD and _has_effect(name, value)]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        named = ", ".join(f"{name} ({_NAMED[name]})" if name in _NAMED else name for name in unknown)
        raise UnsupportedModelError(f"{type(module).__name__} attends with {named}, which is not supported")


def _has_effect(name: str, value: Any) -> bool:
    if name == "is_causal":
        return value is False
    return isinstance(value, Tensor) or bool(value)


def refuse_other_layers(config: Any) -> None:
    """Raise UnsupportedModelError for kinds of layers that have other masks or a state."""
    kinds = {str(kind) for name in _KINDS for kind in getattr(config, name, None) or ()}
    if unknown := sorted(kinds - _MASKS):
        raise UnsupportedModelError(f"layers of kind {', '.join(unknown)} are not supported")


def _refuse_unknown_windows(config: Any, calls: list[tuple[nn.Module, AttentionLayer]]) -> None:
    """Raise UnsupportedModelError for windows that only the configuration names: the attention
    calls do not pass them.
    """
    kinds = getattr(config, "layer_types", None) or ()
    if len(kinds) == len(calls):
        for kind, (module, layer) in zip(kinds, calls, strict=True):
            if kind == "sliding_attention" and layer.sliding_window is None:
                raise UnsupportedModelError(f"{type(module).__name__} does not pass its sliding window to attention")


def _layer(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> AttentionLayer:
    scale = kwargs.get("scaling")
    return AttentionLayer(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=float(scale) if scale is not None else query.shape[3] ** -0.5,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux") is not None,
    )


def discover(base: nn.Module, input_ids: Tensor) -> list[tuple[nn.Module, AttentionLayer]]:
    """Return a base model's attention modules in call order, found by running `input_ids` [n]
    through the model.

    Raises UnsupportedModelError for attention that `AttentionLayer` cannot describe, or if the
    model fails with packed attention.
    """
    recorder = _Recorder()
    for module in base.modules():
        setattr(module, _ATTRIBUTE, recorder)
    try:
        positions = torch.arange(input_ids.shape[0], device=input_ids.device)
        base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers' modules may raise anything
        raise UnsupportedModelError(f"{type(base).__name__} fails with packed attention: {one_line(error)}") from error
    finally:
        for module in base.modules():
            delattr(module, _ATTRIBUTE)
    _refuse_unknown_windows(base.config.get_text_config(), recorder.calls)  # type: ignore[operator, union-attr]
    return recorder.calls


def bind(calls: list[tuple[nn.Module, AttentionLayer]], context: StepContext) -> None:
    """Attach a binding to each module. `attach_caches` adds the pool."""
    for module, layer in calls:
        setattr(module, _ATTRIBUTE, _Binding(layer, context))


def attach_caches(calls: list[tuple[nn.Module, AttentionLayer]], caches: Sequence[LayerCache | None]) -> None:
    """Set the pool of each bound module, in the order of `calls`. None removes it."""
    for (module, _), cache in zip(calls, caches, strict=True):
        getattr(module, _ATTRIBUTE).cache = cache
