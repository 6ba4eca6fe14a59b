"""A causal LM of transformers without its weights: the empty module, and a small copy that can be
run.

transformers would need the weights as floats, so it never runs a model whose weights stay in their
file. The executor is compared with the small copy instead: the same layers, heads, norms and
positions, but narrow. All its weights are random, including biases and norms, so that every part of
the architecture affects the result.
"""

import copy
from typing import Any

import torch
from torch import nn

from serve_app.errors import one_line
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.sources.wrappers import auto_class, is_wrapper, keep_text, layers_of, replace_layers

_NARROW = 64
"""Width of the small copy's hidden states and MLP, and its vocabulary size."""


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


def small_copy(config: Any) -> Any:
    """Return a narrow module of the same architecture with random weights, float32 on the CPU, in
    eval mode.

    Raises UnsupportedModelError if transformers cannot build it.
    """
    whole = copy.deepcopy(config)
    narrow = whole.get_text_config()
    try:
        narrow.head_dim = getattr(narrow, "head_dim", None) or narrow.hidden_size // narrow.num_attention_heads
        narrow.hidden_size = narrow.intermediate_size = narrow.vocab_size = _NARROW
        narrow.bos_token_id = narrow.eos_token_id = 0
        narrow.pad_token_id = None
    except Exception as error:  # transformers' configurations check what is set
        raise UnsupportedModelError(f"a narrow copy cannot be made: {one_line(error)}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = _of_text(whole)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return module


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
