"""Embeddings of prompts: which hidden states make one, and how they become a vector of length 1.

Sums are in float64, so that the chunks in which a prompt is computed do not show in the float32 result.
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
"""The names that older versions wrote, of one truth value for each mode."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """By row of a step: the sums of prompts that go on, float64 [hidden], and the embeddings of those that end."""

    so_far: dict[int, Tensor]
    embeddings: dict[int, Results]


def pool(packed: PackedBatch, hidden: Tensor) -> Pooled:
    """What the step's hidden states [T, hidden] mean for the rows whose embeddings are asked for. Changes no slot."""
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
    """The vector at length 1, where a sum and a mean are the same; zeros stay."""
    return (vector / (np.linalg.norm(vector) or 1.0)).astype("<f4").tobytes()


def read_pooling(files: ModelFiles) -> Pooling | None:
    """How the checkpoint's authors pool, if they have written it down for sentence-transformers.

    Raises ConfigError for what is not computed here.
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
        raise ConfigError(f"model: modules.json of {files.source} makes no sense: {error!r}") from error
    if others := sorted({*paths} - _MODULES):
        raise ConfigError(f"model: {files.source} makes embeddings with a module {others[0]}, which is not computed")
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ConfigError(f"model: {files.source} pools by {' and '.join(modes) or 'nothing'}, which is not computed")
    return _POOLINGS[modes[0]]


def _read(files: ModelFiles, name: str) -> Any:
    """A JSON file of the checkpoint's; None if there is none."""
    if files.kind == "gguf":
        return None
    try:
        path = _of_hub(files, name) if files.kind == "hub" else Path(files.source, name)
        return None if path is None or not path.is_file() else json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {name} of {files.source}: {error}") from error


def _of_hub(files: ModelFiles, name: str) -> Path | None:
    """Of a hub id that cannot be asked, no file is there."""
    # Half a second, which local files do without.
    from transformers.utils import cached_file

    from serve_app.model.quiet import quiet

    lenient = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with quiet():
        path = cached_file(files.source, name, revision=files.commit, **lenient)
    return None if path is None else Path(path)
