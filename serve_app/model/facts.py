"""What is known of a model, whatever runs it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from serve_app.errors import ConfigError
from serve_app.model.attention_backend import AttentionLayer


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What stays known of a model once it runs. Plain data; holds no weights.

    vocab_size: width of the logits; hidden_size: of the hidden states that they are made from. eos_token_ids: end a
    text. layer_weights, head_weights: how many numbers they have; of an embedding that is not the head too, few rows
    are read.
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

    def ending_with(self, end_ids: Sequence[int]) -> "ModelFacts":
        """With the tokenizer's tokens that end a text too, which come first. Any of them ends a text, as authors state
        only some of them in each place: end of text in one file, end of turn in another.

        Those beyond the logits are left out: no model generates them.
        """
        known = [token_id for token_id in end_ids if token_id < self.vocab_size]
        return replace(self, eos_token_ids=tuple(dict.fromkeys((*known, *self.eos_token_ids))))


def count_weights(module: Any) -> tuple[int, int]:
    """Numbers in the layers, and in the head."""
    total = sum(parameter.numel() for parameter in module.parameters())
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    return total - embedding.numel() - (0 if head is embedding else head.numel()), head.numel()


def eos_token_ids(module: Any) -> tuple[int, ...]:
    """The tokens that end a text, of generation config and config; () if neither states any.

    Raises ConfigError for what is no token id.
    """
    found: list[int] = []
    source = module.config.name_or_path
    for file, config in (("generation_config.json", module.generation_config), ("config.json", module.config)):
        for part in (config, getattr(config, "text_config", None)):
            ids = getattr(part, "eos_token_id", None)
            if ids is not None and (not source or _states_end(Path(source), file)):
                found += _token_ids(ids, file)
    return tuple(dict.fromkeys(found))


def _token_ids(value: Any, file: str) -> list[int]:
    ids = list(value) if isinstance(value, list | tuple) else [value]
    if not all(type(token_id) is int for token_id in ids):
        raise ConfigError(f"model: `eos_token_id` of {file} must be a token id or a list of them, got {value!r}")
    return ids


def _states_end(folder: Path, file: str) -> bool:
    """Whether a model's folder has an end of its own there: transformers' classes have defaults, which are another
    model's. True for a model that is in memory or came from a hub."""
    if not (folder / "config.json").is_file():
        return True
    try:
        stated = json.loads((folder / file).read_text())
    except (OSError, ValueError):
        return False
    parts = [stated, stated.get("text_config")] if isinstance(stated, dict) else []
    return any(isinstance(part, dict) and part.get("eos_token_id") is not None for part in parts)
