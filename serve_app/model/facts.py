"""What is known of a model, whatever runs it."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from serve_app.model.attention.base import AttentionLayer


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What stays known of a model once it runs. Plain data; holds no weights.

    vocab_size: width of the logits; hidden_size: of the hidden states that they are made from. layer_weights,
    head_weights: how many numbers they have; of an embedding that is not the head too, few rows are read.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[AttentionLayer, ...]
    layer_weights: int
    head_weights: int
    hidden_size: int

    def of_whole(self, module: Any) -> "ModelFacts":
        """Those of a module of which these are the facts of a small copy."""
        layer_weights, head_weights = count_weights(module)
        vocab_size, hidden_size = module.get_output_embeddings().weight.shape
        return replace(
            self,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids(module),
            layer_weights=layer_weights,
            head_weights=head_weights,
            hidden_size=hidden_size,
        )


def count_weights(module: Any) -> tuple[int, int]:
    """Numbers in the layers, and in the head."""
    total = sum(parameter.numel() for parameter in module.parameters())
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    return total - embedding.numel() - (0 if head is embedding else head.numel()), head.numel()


def eos_token_ids(module: Any) -> tuple[int, ...]:
    """The tokens after which the module's authors end a text."""
    for config in (module.generation_config, module.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
