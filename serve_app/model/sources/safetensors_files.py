"""A folder of safetensors files as a `MappedCheckpoint`, for models whose tensor names match their
modules'.

transformers reads all others, including quantized ones.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.errors import one_line
from serve_app.model.cpu.stored import Blocks
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.sources.mapped_checkpoint import MappedCheckpoint, StoredTensor
from serve_app.model.sources.tensor_names import file_names, is_left_out

_BLOCKS = {"F32": Blocks.F32, "F16": Blocks.F16, "BF16": Blocks.BF16}
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the format itself."""


def open_safetensors(folder: Path) -> MappedCheckpoint:
    """Open the folder. Raises UnsupportedModelError for files that only transformers can read or
    reject.
    """
    try:
        files = _files(folder)
        tensors = {name: tensor for number, path in enumerate(files) for name, tensor in _tensors(path, number)}
        return MappedCheckpoint(folder, files, folder, tensors)
    except Exception as error:  # an invalid header may cause any exception
        raise UnsupportedModelError(f"{folder} cannot be used unchanged: {one_line(error)}") from error


def check_complete(checkpoint: MappedCheckpoint, module: Any, left_out: frozenset[str]) -> Mapping[str, str]:
    """Return the files' name of each of the module's parameters.

    Raises UnsupportedModelError unless the files contain exactly the module's parameters. Identical
    copies of tied parameters are allowed; transformers unties parameters that differ. left_out:
    names of a wrapper's parts that are not loaded.
    """
    known = dict(module.named_parameters())
    named = module.state_dict(keep_vars=True)
    names = file_names(checkpoint.tensors, named)
    found = {name for name in checkpoint.tensors.keys() - names.values() if not is_left_out(name, left_out, module)}
    missing = known.keys() - names.keys()
    if missing or found:
        raise UnsupportedModelError(f"its files and its module differ: {', '.join(sorted(missing | found)[:3])}")
    for name, parameter in known.items():
        if len(parameter.shape) > 2:
            raise UnsupportedModelError(f"{name} is no matrix")
    twins = {id(parameter): names[name] for name, parameter in known.items()}
    for name in names.keys() - known.keys():
        twin = twins.get(id(named[name]))
        if twin is None or not np.array_equal(checkpoint.bytes(names[name]), checkpoint.bytes(twin)):
            raise UnsupportedModelError(f"{name} is not a copy of the tensor that it is tied to")
    return names


def _files(folder: Path) -> list[Path]:
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    return [folder / name for name in sorted({*json.loads((folder / _INDEX).read_text())["weight_map"].values()})]


def _tensors(path: Path, number: int) -> list[tuple[str, StoredTensor]]:
    """Return the tensors in the file's header. Raises any exception for an invalid header."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} is cut off")
        header = json.loads(file.read(length))
    found = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        if not 0 <= first <= end <= size - 8 - length:
            raise ValueError(f"{path} is cut off")
        blocks, shape = _BLOCKS[entry["dtype"]], tuple(entry["shape"])
        found.append((name, StoredTensor(8 + length + first, end - first, blocks, shape, file=number)))
    return found
