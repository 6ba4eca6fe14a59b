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
from transformers import AutoModelForCausalLM

from serve_app.model.executor import UnsupportedModelError

_CPU = torch.device("cpu")
_NARROW = 64
"""Width of the small copy's hidden states and MLP, and its vocabulary size."""


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
    """Return a narrow module of the same architecture with random weights, in eval mode."""
    narrow = copy.deepcopy(config)
    narrow.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    narrow.hidden_size = narrow.intermediate_size = narrow.vocab_size = _NARROW
    _narrow_experts(narrow)
    narrow.bos_token_id = narrow.eos_token_id = narrow.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = _from_config(narrow)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
            else:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
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


def _from_config(config: Any) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    except Exception as error:  # transformers' validators and modules may raise anything
        raise UnsupportedModelError(f"transformers cannot build a module from its configuration: {error}") from error
