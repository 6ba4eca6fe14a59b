"""Tiny random mixtures of experts that the CPU kernels run, whose norms, biases and sinks are
random too."""

from typing import Any

import torch

from tests.models import tiny_model

CONTEXT = 1024
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_CHANGES: dict[str, dict[str, Any]] = {
    # a layer with an MLP, between those with experts
    "qwen3_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": {"rope_parameters": YARN},
}
KERNEL_MIXTURES = tuple(_CHANGES)


def mixture(arch: str, **changes: Any) -> Any:
    """The module in float32, in eval mode, with a context of 1,024 tokens."""
    module = tiny_model(arch, torch.float32, **{"max_position_embeddings": CONTEXT, **_CHANGES[arch], **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return module
