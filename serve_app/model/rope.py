"""Rotary positions whose angles do not depend on other requests in the step.

transformers derives the frequencies of some kinds of RoPE (`dynamic`, `longrope`) from the largest
position of a call. In a packed step that position may belong to another request.
"""

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def fix_frequencies(module: nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of every rotary embedding in `module` to those of a sequence of
    `max_model_len` tokens.
    """
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
    """Whether the frequencies depend on the position, as decided by transformers'
    `dynamic_rope_update`.
    """
    return "dynamic" in kind or kind == "longrope"


def _see_last_position(rotary: nn.Module, max_model_len: int, **arguments: str) -> None:
    device = next(rotary.buffers()).device
    rotary(torch.zeros(1, device=device), torch.tensor([[max_model_len - 1]], device=device), **arguments)
    logger.info(
        "%s: rotary positions use the frequencies for max_model_len %d for requests of every length",
        type(rotary).__name__, max_model_len,
    )  # fmt: skip
