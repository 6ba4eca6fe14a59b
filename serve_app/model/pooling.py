"""Embeddings of prompts: selects hidden states, pools them, and normalizes the result.

Sums are float64, so that the chunks of a prompt do not change the float32 result.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_app.checkpoints.model_files import ModelFiles
from serve_app.core.results import EMBEDDING, Results
from serve_app.core.sampling_params import Pooling
from serve_app.errors import ConfigError
from serve_app.model.input_batch import PackedBatch

_MODULES = {"Transformer", "Pooling", "Normalize"}
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Older key names: one boolean per pooling mode."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """Results by row of a step: float64 sums [hidden] of unfinished prompts, and embeddings of
    finished ones.
    """

    so_far: dict[int, Tensor]
    embeddings: dict[int, Results]


def pool(packed: PackedBatch, hidden: Tensor) -> Pooled:
    """Pool the step's hidden states [T, hidden] for rows that request embeddings. Does not modify
    slots.
    """
    so_far: dict[int, Tensor] = {}
    ended: dict[int, Tensor] = {}
    for i, slot in enumerate(packed.slots):
        if slot.params.pooling is None:
            continue
        states = hidden[packed.query_starts[i] : packed.query_starts[i + 1]]
        if slot.params.pooling == "mean":
            total = states.sum(0, dtype=torch.float64)
            so_far[i] = total if slot.pooled is None else slot.pooled + total
        if packed.rows[i].samples:
            ended[i] = so_far.pop(i, states[-1].double())
    if not ended:
        return Pooled(so_far, {})
    vectors = torch.stack([*ended.values()]).cpu().numpy()
    embeddings: dict[int, Results] = {
        i: {EMBEDDING: (_unit(vector[: packed.slots[i].params.dimensions]),)}
        for i, vector in zip(ended, vectors, strict=True)
    }
    return Pooled(so_far, embeddings)


def _unit(vector: npt.NDArray[np.float64]) -> bytes:
    """Return the vector scaled to length 1, so a sum gives the same as a mean. Zeros stay zeros."""
    return (vector / (np.linalg.norm(vector) or 1.0)).astype("<f4").tobytes()


def read_pooling(files: ModelFiles) -> Pooling | None:
    """Return the pooling that the checkpoint's sentence-transformers files declare, or None if
    there are none.

    Raises ConfigError for unsupported pooling.
    """
    modules = _read(files, "modules.json")
    if modules is None:
        return None
    try:
        paths = {module["type"].rpartition(".")[2]: module["path"] for module in modules}
        config = {} if "Pooling" not in paths else _read(files, f"{paths['Pooling']}/config.json")
        given = config.get("pooling_mode", [name for name in _FLAGS if config.get(name)])
        modes = [_FLAGS.get(mode, mode) for mode in ([given] if isinstance(given, str) else given)]
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"model: modules.json of {files.source} is invalid: {error!r}") from error
    if others := sorted({*paths} - _MODULES):
        raise ConfigError(f"model: {files.source} uses the module {others[0]} for embeddings, which is not supported")
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigError(f"model: {files.source} pools by {' and '.join(modes) or 'nothing'}, which is not supported")
    return _POOLINGS[modes[0]]


def _read(files: ModelFiles, name: str) -> Any:
    """Read a JSON file of the checkpoint. Return None if it does not exist."""
    if files.kind == "gguf":
        return None
    try:
        path = _of_hub(files, name) if files.kind == "hub" else Path(files.source, name)
        return None if path is None or not path.is_file() else json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model: cannot read {name} of {files.source}: {error}") from error


def _of_hub(files: ModelFiles, name: str) -> Path | None:
    """Return the path of a hub model's file. None if it is missing or the hub is unreachable."""
    # This import takes 0.5 s; local files do not need it.
    from transformers.utils import cached_file

    from serve_app.model.quiet import quiet

    lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with quiet():
        path = cached_file(files.source, name, revision=files.commit, **lenient)
    return None if path is None else Path(path)
