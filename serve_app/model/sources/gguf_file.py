"""A GGUF file as a `MappedCheckpoint`: its configuration and the positions of its tensors.

Tensor names, and the row order where llama.cpp's differs, come from transformers' own tables, whose
imports take 1 s. So configuration and tensor positions are cached under a hash of the file's
beginning.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_app.checkpoints.disk_cache import DiskCache, Key
from serve_app.checkpoints.gguf_header import GgufHeader, TensorInfo
from serve_app.errors import ConfigError, one_line
from serve_app.model.cpu.stored import Blocks
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.sources.expert_tensors import gguf_names
from serve_app.model.sources.gguf_config import GgufConfig, check_tensors, read_config
from serve_app.model.sources.mapped_checkpoint import MappedCheckpoint, StoredTensor, interleaved
from serve_app.model.sources.refused_keys import check_refused
from serve_app.system.code_digest import digest_code

_HEADER_BYTES = 64 * 2**20
"""More than any file has before its tensors."""
_ROWS_AS_LLAMA = ("mistral3", "smollm3")
"""Other architectures whose files have queries and keys in the order of rows of `llama`."""
_KEPT = 4
"""Indexes kept per file: several versions of this package may run on one machine."""


def open_gguf(path: Path, cache_dir: Path, ignored: Collection[str] = ()) -> MappedCheckpoint:
    """Open the file. ignored: the setting `ignore_model_keys`.

    Raises ConfigError for a damaged file, for unsupported contents, and if not even a temporary
    folder can be written. Raises UnsupportedModelError if the tensors need more than a known
    reordering of rows.
    """
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    content = hashlib.sha256(header + str(path.stat().st_size).encode()).hexdigest()
    made_by = f"{digest_code('checkpoints', 'model/sources')} transformers {version('transformers')}"
    kept = DiskCache(cache_dir, "gguf-index", keep=_KEPT)
    folder, tensors, refused = kept.get_or_temporary(
        Key(path.resolve(), "", f"{content} {made_by}"), lambda folder: _write_index(path, folder, ignored), _read_index
    )
    check_refused(path, refused, ignored)
    return MappedCheckpoint(path, [path], folder, tensors)


def describe(path: Path, ignored: Collection[str]) -> tuple[GgufHeader, GgufConfig]:
    """Read the header and convert it. Raises ConfigError for a damaged file and for unsupported
    contents.
    """
    try:
        header = GgufHeader(path)
        described = read_config(header, path)
    except ConfigError:
        raise
    except Exception as error:  # a damaged file may cause any exception
        raise _unreadable(path, error) from error
    check_refused(path, described.refused, ignored)
    return header, described


def make_config(path: Path, described: GgufConfig) -> Any:
    """Return transformers' configuration. Raises ConfigError for inconsistent values."""
    from transformers import AutoConfig

    from serve_app.model.quiet import quiet

    try:
        with quiet():
            return AutoConfig.for_model(**described.values)
    except Exception as error:  # transformers' validators may raise anything
        raise _unreadable(path, error) from error


def known_tensors(path: Path, header: GgufHeader, described: GgufConfig, module: Any) -> dict[str, str]:
    """Map the file's tensor names to the module's.

    Raises ConfigError for tensors that belong to no part of the model, and UnsupportedModelError
    for a module whose tensors transformers cannot name.
    """
    try:
        names = _own_names(header, module) or _names(module, _processor(header, module.config))
    except (AttributeError, KeyError, NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(f"its tensors have unknown names: {error}") from error
    # Files give a suffix to names that have none in the module.
    names |= {f"{name}.weight": whole for name, whole in names.items() if not name.endswith((".weight", ".bias"))}
    names |= gguf_names(name for name, _ in module.named_parameters())
    check_tensors((tensor.name for tensor in header.tensors), names.keys() | {*described.tensors}, path)
    return names


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"model: cannot read {path}: {one_line(error)}")


def _read_index(folder: Path) -> tuple[Path, dict[str, StoredTensor], dict[str, str]]:
    """Return the folder, the tensors by the module's names, and the refused keys. Raises any
    exception for a damaged file.
    """
    # only checked; the module is built from it later
    dict(json.loads((folder / "config.json").read_text()))
    index = json.loads((folder / "tensors.json").read_text())
    stored = {
        name: StoredTensor(**{**entry, "shape": tuple(entry["shape"])}) for name, entry in index["tensors"].items()
    }
    return folder, stored, dict(index["refused"])


def _write_index(path: Path, folder: Path, ignored: Collection[str]) -> None:
    # Starts with an index do not need these imports.
    from serve_app.model.sources.skeleton import empty_module

    header, described = describe(path, ignored)
    config = make_config(path, described)
    module = empty_module(config)
    stored = _stored_tensors(header, known_tensors(path, header, described, module), config)
    config.save_pretrained(folder)
    index = {"tensors": {name: asdict(tensor) for name, tensor in stored.items()}, "refused": dict(described.refused)}
    (folder / "tensors.json").write_text(json.dumps(index))


def _stored_tensors(header: GgufHeader, names: Mapping[str, str], config: Any) -> dict[str, StoredTensor]:
    """Return the tensors by the module's names."""
    processor = _processor(header, config)
    try:
        return {
            names[name]: _stored(tensor, processor, config)
            for tensor in header.tensors
            # transformers' names of buffers have no suffix
            if (name := tensor.name if tensor.name in names else tensor.name.removesuffix(".weight")) in names
        }
    except (AttributeError, KeyError, NotImplementedError, ValueError) as error:
        raise UnsupportedModelError(f"its tensors cannot be used unchanged: {error}") from error


def read_floats(header: GgufHeader, names: Mapping[str, str], module: Any) -> dict[str, Tensor]:
    """Return the weights in float32 by the module's names. names: see `known_tensors`.

    Raises UnsupportedModelError for tensors that need more than a known reordering of rows, and for
    modules whose parameters are not all in the file.
    """
    from gguf import dequantize

    stored, weights = _stored_tensors(header, names, module.config), {}
    if missing := dict(module.named_parameters()).keys() - stored.keys():
        raise UnsupportedModelError(f"its file has no {min(missing)}")
    for tensor in header.tensors:
        if tensor.name in names:
            place = stored[names[tensor.name]]
            values = dequantize(tensor.data, tensor.tensor_type).reshape(place.shape)
            rows = values[interleaved(len(values), place.heads)] if place.heads else values
            weights[names[tensor.name]] = torch.from_numpy(np.ascontiguousarray(rows - np.float32(place.added)))
    return weights


def _processor(header: GgufHeader, config: Any) -> Any:
    """Return transformers' processor, which reorders the architecture's tensors."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = header.fields["general.architecture"].value
    architecture = "llama" if architecture in _ROWS_AS_LLAMA else architecture
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())


def _own_names(header: GgufHeader, module: Any) -> dict[str, str]:
    """Map the file's tensor names to the module's by the gguf package's table. Empty if it lacks
    some.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = header.fields["general.architecture"].value
    kind = next((key for key, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        return {}
    table = get_tensor_name_map(kind, module.config.num_hidden_layers)
    names = {}
    for name in module.state_dict(keep_vars=True):
        stem, _, ending = name.rpartition(".")
        found = table.get_name(stem) if ending in ("weight", "bias") else None
        if found is None:
            return {}
        names[f"{found}.{ending}"] = name
    return names


def _names(module: Any, processor: Any) -> dict[str, str]:
    """Map the file's tensor names to the module's."""
    from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

    # The function also asks every submodule for its names. That takes seconds, and Llama-like
    # models do not need it.
    alone = SimpleNamespace(config=module.config, state_dict=module.state_dict, named_children=tuple)
    names: dict[str, str] = get_gguf_hf_weights_map(alone, processor)
    if not {name for name, _ in module.named_parameters()}.issubset(names.values()):
        names = get_gguf_hf_weights_map(module, processor)
    return names


def _stored(tensor: TensorInfo, processor: Any, config: Any) -> StoredTensor:
    """Describe a tensor. processor: transformers' processor, which reorders its rows.

    Raises UnsupportedModelError for unsupported types and for an unknown order of rows.
    """
    shape = tuple(int(size) for size in reversed(tensor.shape))
    blocks = int(tensor.tensor_type)
    vector = len(shape) == 1 or tensor.name.endswith(".bias")
    if blocks not in set(Blocks) or (vector and blocks != Blocks.F32) or len(shape) > 3:
        raise UnsupportedModelError(f"the tensor {tensor.name} is of type {tensor.tensor_type.name}")
    rows = np.arange(shape[0])
    column = rows.reshape(-1, *(1 for _ in shape[1:]))
    order = processor.process(weights=column, name=tensor.name, tensor_key_mapping={}, parsed_parameters={}).weights
    # Layers with different heads are not interleaved, and neither are stacks of experts.
    alike = len(shape) <= 2 and not config.is_heterogeneous
    counts = (config.num_attention_heads, config.num_key_value_heads) if alike else ()
    known = {0: rows} | {heads: interleaved(shape[0], heads) for heads in counts if shape[0] % (2 * heads) == 0}
    if len(shape) == 1 and np.array_equal(order, rows - 1):
        return StoredTensor(int(tensor.data_offset), int(tensor.n_bytes), blocks, shape, added=1.0)
    for heads, expected in known.items():
        if np.array_equal(order.reshape(-1), expected):
            return StoredTensor(int(tensor.data_offset), int(tensor.n_bytes), blocks, shape, heads)
    raise UnsupportedModelError(f"the tensor {tensor.name} cannot be used unchanged")
