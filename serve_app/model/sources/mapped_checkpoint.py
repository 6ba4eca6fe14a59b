"""A checkpoint's weights mapped from their files, by their names in transformers' module.

Does not know file formats: `gguf_file` and `safetensors_files` provide the positions. Only vectors
are copied.
"""

import copy
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve_app.errors import ConfigError
from serve_app.model.cpu.stored import Blocks, StoredMatrix

GENERATION_CONFIG = "generation_config.json"
_CONFIGS = "config.json", GENERATION_CONFIG
_VECTORS = {Blocks.F32: torch.float32, Blocks.F16: torch.float16, Blocks.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a parameter. blocks: a value of `Blocks`. heads: 0, or the number of heads if
    each head's two halves are interleaved row by row. file: index into the checkpoint's files.
    added: what the file has added to the parameter's values.
    """

    offset: int
    num_bytes: int
    blocks: int
    shape: tuple[int, ...]
    heads: int = 0
    file: int = 0
    added: float = 0.0


class MappedCheckpoint:
    """The parameters of a causal LM. source: its location, for messages; config_folder: folder of
    its configuration.
    """

    def __init__(
        self, source: Path, files: list[Path], config_folder: Path, tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.source = source
        self.config_folder = config_folder
        self.tensors = tensors
        states = [f"{state.st_size}:{state.st_mtime_ns}" for state in map(Path.stat, files)]
        configs = [path.read_text() for name in _CONFIGS if (path := config_folder / name).is_file()]
        self.identity = (str(source.resolve()), " ".join([*states, *configs]))
        """See `Parameters`."""
        self._maps = [_map(path) for path in files]

    def renamed(self, names: Mapping[str, str]) -> "MappedCheckpoint":
        """Return the checkpoint with other names of its tensors. Those without one are left out."""
        other = copy.copy(self)
        other.tensors = {names[name]: tensor for name, tensor in self.tensors.items() if name in names}
        return other

    def bytes(self, name: str) -> NDArray[np.uint8]:
        """Return a tensor's mapped bytes, uint8."""
        tensor = self.tensors[name]
        return np.frombuffer(self._maps[tensor.file], np.uint8, tensor.num_bytes, tensor.offset)

    def forget(self, name: str) -> None:
        """Release the memory of a tensor that was read. Reading it again reads the file again."""
        tensor = self.tensors[name]
        first = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, first, tensor.offset + tensor.num_bytes - first)


class MappedParameters:
    """`Parameters` from a checkpoint, for a module without weights."""

    def __init__(self, checkpoint: MappedCheckpoint, parameters: Mapping[str, Tensor]) -> None:
        """parameters: the module's, by name. Raises ConfigError if tensors are missing or have
        other shapes.
        """
        self.identity = checkpoint.identity
        self._checkpoint = checkpoint
        self._parameters = parameters  # keeps them alive, so that their ids stay unique
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            if name not in checkpoint.tensors:
                raise ConfigError(f"model: {checkpoint.source}: weights are missing: {name}")
            if tuple(parameter.shape) != checkpoint.tensors[name].shape:
                raise ConfigError(f"model: {checkpoint.source}: weights have the wrong shape: {name}")

    def matrix(self, parameter: Tensor) -> StoredMatrix:
        """See `Parameters`."""
        name = self._names[id(parameter)]
        tensor = self._checkpoint.tensors[name]
        outputs, inputs = tensor.shape
        order = interleaved(outputs, tensor.heads) if tensor.heads else None
        return StoredMatrix(self._checkpoint.bytes(name), Blocks(tensor.blocks), outputs, inputs, order)

    def vector(self, parameter: Tensor) -> Tensor:
        """See `Parameters`."""
        name = self._names[id(parameter)]
        tensor, numbers = self._checkpoint.tensors[name], torch.from_numpy(self._checkpoint.bytes(name).copy())
        return numbers.view(_VECTORS[Blocks(tensor.blocks)]).float() - tensor.added

    def release(self, parameter: Tensor) -> None:
        """See `Parameters`."""
        self._checkpoint.forget(self._names[id(parameter)])


def interleaved(outputs: int, heads: int) -> NDArray[np.int64]:
    """Return the file's row for each output, if each head's two halves are interleaved."""
    return np.arange(outputs).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
