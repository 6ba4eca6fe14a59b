"""A folder of safetensors files as a `MappedCheckpoint`, for models whose tensor names match their
modules', except those of experts.

transformers reads all others, including quantized ones.
"""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from serve_app.errors import one_line
from serve_app.model.cpu.stored import Blocks
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.sources.expert_tensors import BLOCKS, SCALES, is_stack, tensors_of
from serve_app.model.sources.mapped_checkpoint import MappedCheckpoint, StoredTensor, stored_tensors

_BLOCKS = {"F32": Blocks.F32, "F16": Blocks.F16, "BF16": Blocks.BF16, "U8": Blocks.MXFP4}
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


def check_complete(checkpoint: MappedCheckpoint, module: Any) -> None:
    """Raise UnsupportedModelError unless the files contain exactly the module's tensors.
    Identical copies of tied parameters are allowed; transformers unties parameters that differ.
    """
    known = stored_tensors(module)
    named = module.state_dict(keep_vars=True)
    stacks = {name: tensors_of(name, len(known[name]), checkpoint.tensors) for name in filter(is_stack, known)}
    found = checkpoint.tensors.keys() - named.keys() - {*chain.from_iterable(stacks.values())}
    missing = {name for name in known.keys() - checkpoint.tensors.keys() if not stacks.get(name)}
    if missing or found:
        raise UnsupportedModelError(f"its files and its module differ: {', '.join(sorted(missing | found)[:3])}")
    for name, parameter in known.items():
        if len(parameter.shape) > 2 and name not in stacks:
            raise UnsupportedModelError(f"{name} is no matrix")
    for name, tensor in checkpoint.tensors.items():
        if tensor.blocks == Blocks.MXFP4 and not name.endswith((BLOCKS, SCALES)):
            raise UnsupportedModelError(f"{name} consists of bytes")
    names = {id(parameter): name for name, parameter in known.items()}
    for name in checkpoint.tensors.keys() & named.keys() - known.keys():
        twin = names.get(id(named[name]))
        if twin is None or not np.array_equal(checkpoint.bytes(name), checkpoint.bytes(twin)):
            raise UnsupportedModelError(f"{name} is not a copy of the tensor that it is tied to")


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
