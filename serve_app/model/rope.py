"""Rotary positions: angles that do not depend on what else is in the step, and what GGUF files say of frequencies.

transformers derives the frequencies of some kinds of RoPE (`dynamic`, `longrope`) from the largest position that a call
sees. In a packed step that is another request's.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from serve_app.gguf_header import TensorInfo

logger = logging.getLogger(__name__)


def divide_frequencies(config: Any, tensors: Iterable[TensorInfo]) -> None:
    """Write into the configuration of a GGUF file that the frequency of each pair of a head is divided by its number in
    the tensor `rope_freqs.weight`: so llama.cpp has Llama 3.1's positions, and transformers reads no such tensor.

    Raises ValueError where there are not as many numbers as pairs."""
    factors = next((tensor.data.reshape(-1).tolist() for tensor in tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is None:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if len(factors) != head_dim // 2:
        raise ValueError(f"rope_freqs.weight has {len(factors)} numbers for the {head_dim // 2} pairs of a head")
    # transformers' form for a factor for each pair; the same for sequences of every length.
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": config.rope_parameters["rope_theta"],
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config.max_position_embeddings,
    }


def fix_frequencies(module: nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of every rotary embedding in `module` at those of a sequence of `max_model_len` tokens."""
    for rotary in module.modules():
        kinds: Any = getattr(rotary, "rope_type", None)
        if isinstance(kinds, str) and _varies(kinds):
            _see_last_position(rotary, max_model_len)
            rotary.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type in filter(lambda layer_type: _varies(kinds[layer_type]), kinds):
                _see_last_position(rotary, max_model_len, layer_type=layer_type)
                kinds[layer_type] = "default"


def _varies(kind: str) -> bool:
    """As transformers' `dynamic_rope_update` decides."""
    return "dynamic" in kind or kind == "longrope"


def _see_last_position(rotary: nn.Module, max_model_len: int, **arguments: str) -> None:
    device = next(rotary.buffers()).device
    rotary(torch.zeros(1, device=device), torch.tensor([[max_model_len - 1]], device=device), **arguments)
    logger.info(
        "%s: rotary positions are those of sequences of max_model_len %d, whatever a request's length",
        type(rotary).__name__, max_model_len,
    )  # fmt: skip
