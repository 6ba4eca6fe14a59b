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
from torch import nn

from serve_app.errors import one_line
from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.sources.wrappers import auto_class, is_wrapper, keep_text, layers_of, replace_layers

_CPU = torch.device("cpu")
_NARROW = 64
"""Width of the small copy's hidden states and MLP, and its vocabulary size."""
_WINDOW = 8
"""Sliding windows of the small copy: shorter than the sequences that it runs."""


def empty_module(config: Any) -> Any:
    """Return the module in eval mode, with parameters on torch's device "meta". It can compute
    rotary angles. Wrappers have their text model only.

    Raises UnsupportedModelError if transformers cannot build the module.
    """
    return empty_text_module(config)[0]


def empty_text_module(config: Any) -> tuple[Any, frozenset[str]]:
    """Return `empty_module`, and the names of the wrapper's parts that it lacks."""
    with torch.device("meta"):
        module = _from_config(config)
    left_out = keep_text(module)
    layers = layers_of(module)
    rotary = getattr(layers, "rotary_emb", None)
    if rotary is not None:
        layers.rotary_emb = type(rotary)(config=layers.config)
    return module, left_out


def small_copy(config: Any, device: torch.device = _CPU, dtype: torch.dtype = torch.float32) -> Any:
    """Return a narrow module of the same architecture with random weights and persistent buffers,
    in eval mode. Its windows are short; see `whole_windows`.

    Raises UnsupportedModelError if transformers cannot build it.
    """
    whole = copy.deepcopy(config)
    try:
        _narrow(whole.get_text_config())
    except Exception as error:  # transformers' configurations check what is set
        raise UnsupportedModelError(f"a narrow copy cannot be made: {one_line(error)}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = _of_text(whole)
        for tensor in filter(torch.is_floating_point, module.state_dict().values()):
            if tensor.dim() > 1:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
        scale_queries(module)
    for parameter in module.parameters():  # not the buffers: rotary frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    return module.to(device)


def _narrow(text: Any) -> None:
    """Make a text model's configuration narrow, in place. Layers of several shapes keep their
    heads.
    """
    if not text.is_heterogeneous:
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name in ("vocab_size_per_layer_input", "sliding_window"):
        if name not in (text.per_layer_attributes or ()) and getattr(text, name, None) is not None:
            setattr(text, name, _WINDOW if name == "sliding_window" else _NARROW)
    text.hidden_size = text.intermediate_size = text.vocab_size = _NARROW
    text.bos_token_id = text.eos_token_id = 0
    # Some modules put the padding's id in the place of images.
    text.pad_token_id = None if text.pad_token_id is None else 0
    _narrow_experts(text)


def _narrow_experts(text: Any) -> None:
    """Leave few experts, of which half are not chosen, and a limit that their activations reach."""
    if getattr(text, "num_experts_per_tok", None) is None:
        return
    text.num_experts = min(text.num_experts, 2 * text.num_experts_per_tok)
    text._experts_implementation = "batched_mm"
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(text, name, None) is not None:
            setattr(text, name, _NARROW)
    if getattr(text, "swiglu_limit", None) is not None:
        text.swiglu_limit = 1.0


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
    window = getattr(config.get_text_config(), "sliding_window", None)
    return tuple(layer if layer.sliding_window is None else replace(layer, sliding_window=window) for layer in layers)


def _of_text(config: Any) -> Any:
    """Build the module with weights, but a wrapper's other parts without: they can be large."""
    if config.get_text_config() is config:
        return _from_config(config)
    with torch.device("meta"):
        module = _from_config(config)
    if not is_wrapper(module):
        return _from_config(config)
    keep_text(module)
    layers, head = layers_of(module), module.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModelError(f"the head {type(head).__name__} is not known")
    replace_layers(module, type(layers)._from_config(layers.config, attn_implementation="eager", dtype=torch.float32))
    module.set_output_embeddings(nn.Linear(head.in_features, head.out_features, bias=head.bias is not None))
    module.tie_weights()
    return module.eval()


def _from_config(config: Any) -> Any:
    try:
        return auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers' validators and modules may raise anything
        raise UnsupportedModelError(f"transformers cannot build a module from its configuration: {error}") from error
