"""A causal LM of transformers without its weights: the empty module, and a small copy that can be
run.

transformers would need the weights as floats, so it never runs a model whose weights stay in their
file. The executor is compared with the small copy instead: the same layers, heads, norms and
positions, but narrow. All its weights are random, including biases and norms, so that every part of
the architecture affects the result.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.executor import UnsupportedModelError

_CPU = torch.device("cpu")
_NARROW = 64
"""Width of the small copy's hidden states and MLP, and its vocabulary size."""
_WINDOW = 8
"""Sliding windows of the small copy: shorter than the sequences that it runs."""


def empty_module(config: Any) -> Any:
    """Return the module in eval mode, with parameters on torch's device "meta". It can compute
    rotary angles.

    Raises UnsupportedModelError if transformers cannot build the module.
    """
    with torch.device("meta"):
        module = _from_config(config)
    rotary = getattr(module.base_model, "rotary_emb", None)
    if rotary is not None:
        module.base_model.rotary_emb = type(rotary)(config=config)
    return module


def small_copy(config: Any, device: torch.device = _CPU, dtype: torch.dtype = torch.float32) -> Any:
    """Return a narrow module of the same architecture with random weights and persistent buffers,
    in eval mode. Its windows are short; see `whole_windows`.
    """
    narrow = copy.deepcopy(config)
    if not config.is_heterogeneous:  # otherwise layers have their own
        narrow.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    narrow.hidden_size = narrow.intermediate_size = narrow.vocab_size = _NARROW
    _narrow_experts(narrow)
    for name in ("vocab_size_per_layer_input", "sliding_window"):
        if name not in (config.per_layer_attributes or ()) and getattr(config, name, None) is not None:
            setattr(narrow, name, _WINDOW if name == "sliding_window" else _NARROW)
    narrow.bos_token_id = narrow.eos_token_id = narrow.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = _from_config(narrow)
        for tensor in filter(torch.is_floating_point, module.state_dict().values()):
            if tensor.dim() > 1:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
        scale_queries(module)
    for parameter in module.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    return module.to(device)


def _narrow_experts(config: Any) -> None:
    """Leave few experts, of which half are not chosen, and a limit that their activations reach."""
    if getattr(config, "num_experts_per_tok", None) is None:
        return
    config.num_experts = min(config.num_experts, 2 * config.num_experts_per_tok)
    config._experts_implementation = "batched_mm"
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, name, None) is not None:
            setattr(config, name, _NARROW)
    if getattr(config, "swiglu_limit", None) is not None:
        config.swiglu_limit = 1.0


@torch.no_grad()
def scale_queries(module: Any) -> None:
    """Divide random norms of queries by the root of their width if attention does not scale scores
    itself: with norms of about 1, only one key would count, and any rounding could choose another.
    """
    for attention in module.modules():
        if getattr(attention, "scaling", None) == 1.0 and hasattr(attention, "q_norm"):
            attention.q_norm.weight.mul_(attention.q_norm.weight.shape[0] ** -0.5)


def whole_windows(layers: Sequence[AttentionLayer], config: Any) -> tuple[AttentionLayer, ...]:
    """Return the layers of a small copy with the windows of `config`.

    Raises UnsupportedModelError for windows that the configuration's `sliding_window` does not say.
    """
    if not {layer.sliding_window for layer in layers} <= {None, _WINDOW}:
        raise UnsupportedModelError("windows that its configuration does not name")
    return tuple(
        layer if layer.sliding_window is None else replace(layer, sliding_window=config.sliding_window)
        for layer in layers
    )


def _from_config(config: Any) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except Exception as error:  # transformers' validators and modules may raise anything
        raise UnsupportedModelError(f"transformers cannot build a module from its configuration: {error}") from error
