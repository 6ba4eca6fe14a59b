"""A GGUF file as a `MappedCheckpoint`: its configuration, and where its tensors are.

Names, and the order of rows where llama.cpp has another one, are found with transformers' own tables, whose imports
take a second. What they tell is kept: configuration and positions of the tensors, under a hash of the file's beginning.
"""

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from serve_app.errors import ConfigError
from serve_app.gguf_header import GgufHeader, TensorInfo, in_transformers
from serve_app.model.cpu.stored import Blocks
from serve_app.model.executors.base import UnsupportedModelError
from serve_app.model.mapped_checkpoint import MappedCheckpoint, StoredTensor, interleaved
from serve_app.model.rope import divide_frequencies
from serve_app.model.write_once import write_once
from serve_app.one_writer import remove_damaged

_HEADER_BYTES = 64 * 2**20
"""More than any file has before its tensors."""


def open_gguf(path: Path, cache_dir: Path) -> MappedCheckpoint:
    """Raises ConfigError for a damaged file or a folder that cannot be written, UnsupportedModelError for one whose
    tensors are more than rows in some order."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    content = hashlib.sha256(header + str(path.stat().st_size).encode()).hexdigest()
    cached = cache_dir / f"gguf-header-{content[:32]}-transformers-{version('transformers')}"
    tensors = _read_index(cached)
    if tensors is None:
        _write_index(path, cached)
        tensors = _read_index(cached)
    if tensors is None:
        raise ConfigError(f"cache_dir: cannot read {cached}")
    return MappedCheckpoint(path, [path], cached, tensors)


def _read_index(folder: Path) -> dict[str, StoredTensor] | None:
    """None where there is none; a damaged one is removed."""
    if not folder.is_dir():
        return None
    try:
        dict(json.loads((folder / "config.json").read_text()))  # for whoever makes the module
        index = json.loads((folder / "tensors.json").read_text())
        return {name: StoredTensor(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in index.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        remove_damaged(folder, error)
        return None


def _write_index(path: Path, target: Path) -> None:
    # A start from the index does without.
    from transformers import AutoConfig
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    from serve_app.model.quiet import quiet
    from serve_app.model.skeleton import empty_module

    try:
        reader = GgufHeader(path)
        with quiet(), in_transformers():
            config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        divide_frequencies(config, reader.tensors)
        architecture = reader.fields["general.architecture"].parts[0].decode()
    except Exception as error:  # transformers raises whatever a damaged file provokes
        raise ConfigError(f"model: cannot read {path}: {' '.join(str(error).split())[:300]}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    module = empty_module(config)
    try:
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = _names(module, processor)
        index = {
            names[tensor.name]: asdict(_stored(tensor, processor, config))
            for tensor in reader.tensors
            if tensor.name in names
        }
    except (AttributeError, KeyError, NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(f"its tensors are not known by name: {error}") from error

    def write(folder: Path) -> None:
        config.save_pretrained(folder)
        (folder / "tensors.json").write_text(json.dumps(index))

    write_once(target, write)


def _names(module: Any, processor: Any) -> dict[str, str]:
    """The module's names of a file's tensors."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # It asks every submodule for its names too, which takes seconds, and which Llama-like models have no need of.
    alone = SimpleNamespace(config=module.config, state_dict=module.state_dict, named_children=tuple)
    names: dict[str, str] = get_gguf_hf_weights_map(alone, processor)
    if not {name for name, _ in module.named_parameters()}.issubset(names.values()):
        names = get_gguf_hf_weights_map(module, processor)
    return names


def _stored(tensor: TensorInfo, processor: Any, config: Any) -> StoredTensor:
    """processor: transformers', which turns its rows round.

    Raises UnsupportedModelError for one whose numbers are not just read, or stand in an order that is not known.
    """
    shape = tuple(int(size) for size in reversed(tensor.shape))
    blocks = int(tensor.tensor_type)
    if blocks not in set(Blocks) or (len(shape) == 1 and blocks != Blocks.F32) or len(shape) > 2:
        raise UnsupportedModelError(f"the tensor {tensor.name} is of type {tensor.tensor_type.name}")
    rows = np.arange(shape[0])
    column = rows.reshape(-1, *(1 for _ in shape[1:]))
    order = processor.process(weights=column, name=tensor.name, tensor_key_mapping={}, parsed_parameters={}).weights
    known = {0: rows} | {
        heads: interleaved(shape[0], heads)
        for heads in (config.num_attention_heads, config.num_key_value_heads)
        if shape[0] % (2 * heads) == 0
    }
    for heads, expected in known.items():
        if np.array_equal(order.reshape(-1), expected):
            return StoredTensor(int(tensor.data_offset), int(tensor.n_bytes), blocks, shape, heads)
    raise UnsupportedModelError(f"the tensor {tensor.name} is not read as it is")
