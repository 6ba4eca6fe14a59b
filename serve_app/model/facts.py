"""Facts about a model that do not depend on the executor."""

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
    """Facts kept about a running model. Plain data without weights.

    vocab_size: width of the logits. hidden_size: width of the final hidden states. eos_token_ids:
    tokens that end a text. layer_weights, head_weights: number of weights. An embedding that is not
    also the head is not counted: a step reads few of its rows.
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
        """Return the facts of the whole module, from these of its small copy."""
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
        """Add the tokenizer's end tokens, in front of the model's. Any of them ends a text.

        Model authors often list only some of them in each file: end of text in one, end of turn in
        another. Ids beyond the logits are left out: no model generates them.
        """
        known = [token_id for token_id in end_ids if token_id < self.vocab_size]
        return replace(self, eos_token_ids=tuple(dict.fromkeys((*known, *self.eos_token_ids))))


def count_weights(module: Any) -> tuple[int, int]:
    """Return the number of weights in the layers and in the head."""
    total = sum(parameter.numel() for parameter in module.parameters())
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    return total - embedding.numel() - (0 if head is embedding else head.numel()), head.numel()


def eos_token_ids(module: Any) -> tuple[int, ...]:
    """Return the end tokens of the generation config and the config; () if neither has any.

    Raises ConfigError for values that are not token ids.
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
    """Whether the file in a model's folder sets an end token itself.

    The defaults of transformers' classes belong to other models. Returns True for a model in memory
    or from a hub.
    """
    if not (folder / "config.json").is_file():
        return True
    try:
        stated = json.loads((folder / file).read_text())
    except (OSError, ValueError, RecursionError):
        return False
    parts = [stated, stated.get("text_config")] if isinstance(stated, dict) else []
    return any(isinstance(part, dict) and part.get("eos_token_id") is not None for part in parts)
