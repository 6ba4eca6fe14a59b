"""A checkpoint's weights mapped from their files, by their names in transformers' module.

Does not know file formats: `gguf_file` and `safetensors_files` provide the positions. Only vectors
are copied.
"""

import copy
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve_app.errors import ConfigError
from serve_app.model.cpu.stored import Blocks, StoredMatrix, in_order, stacked_order
from serve_app.model.records import Stack
from serve_app.model.sources.expert_tensors import BLOCKS, gguf_blocks, is_stack, tensors_of

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

    def of_expert(self, index: int) -> "StoredTensor":
        """Return one expert's part of a tensor [experts, ...]."""
        size = self.num_bytes // self.shape[0]
        return replace(self, offset=self.offset + index * size, num_bytes=size, shape=self.shape[1:])


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
        return self.bytes_of(self.tensors[name])

    def bytes_of(self, tensor: StoredTensor) -> NDArray[np.uint8]:
        """Return the mapped bytes of a part of a tensor, uint8."""
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
        self._tensors: dict[str, list[str]] = {}
        for name, parameter in parameters.items():
            stack, known = is_stack(name), checkpoint.tensors
            self._tensors[name] = tensors_of(name, len(parameter), known) if stack else [name] * (name in known)
            if not self._tensors[name]:
                raise ConfigError(f"model: {checkpoint.source}: weights are missing: {name}")
            if not stack and tuple(parameter.shape) != checkpoint.tensors[name].shape:
                raise ConfigError(f"model: {checkpoint.source}: weights have the wrong shape: {name}")

    def matrix(self, parameter: Tensor) -> StoredMatrix:
        """See `Parameters`."""
        name = self._names[id(parameter)]
        tensor = self._checkpoint.tensors[name]
        return self._stored(tensor, interleaved(tensor.shape[0], tensor.heads) if tensor.heads else None)

    def vector(self, parameter: Tensor) -> Tensor:
        """See `Parameters`."""
        name = self._names[id(parameter)]
        return self._floats(name) - self._checkpoint.tensors[name].added

    def expert(self, stack: Stack, index: int) -> list[StoredMatrix]:
        """See `Parameters`. Raises ConfigError for tensors of other shapes."""
        name = self._names[id(stack.weight)]
        names = self._tensors[name]
        tensors = [self._checkpoint.tensors[each] for each in names]
        count = len(stack.weight)
        if len(tensors[0].shape) == 2:  # one tensor per expert
            parts = len(tensors) // count
            tensors = tensors[index * parts : (index + 1) * parts]
        else:
            self._expect(all(tensor.shape[0] == count for tensor in tensors), name)
            tensors = [tensor.of_expert(index) for tensor in tensors]
        if names[0] == name:
            matrices = [self._as_in_module(stack, tensors[0])]
        elif names[0] == name + BLOCKS:
            matrices = [self._from_blocks(stack, *tensors)]
        else:
            matrices = [self._stored(tensor) for tensor in tensors]
        outputs = sum(matrix.outputs for matrix in matrices)
        self._expect(outputs == stack.outputs and {matrix.inputs for matrix in matrices} == {stack.inputs}, name)
        return matrices

    def expert_biases(self, stack: Stack) -> Tensor | None:
        """See `Parameters`."""
        if stack.bias is None:
            return None
        name = self._names[id(stack.bias)]
        names = self._tensors[name]
        parts = [self._floats(each).view(self._checkpoint.tensors[each].shape) for each in names]
        self._expect(all(len(part) == len(stack.bias) for part in parts), name)
        biases = in_order(stack, parts[0]) if names == [name] else torch.cat(parts, 1)
        self._expect(biases.shape == stack.bias.shape, name)
        return biases

    def release(self, parameter: Tensor) -> None:
        """See `Parameters`."""
        for name in self._tensors[self._names[id(parameter)]]:
            self._checkpoint.forget(name)

    def _stored(self, tensor: StoredTensor, order: NDArray[np.int64] | None = None) -> StoredMatrix:
        outputs, inputs = tensor.shape
        return StoredMatrix(self._checkpoint.bytes_of(tensor), Blocks(tensor.blocks), outputs, inputs, order)

    def _as_in_module(self, stack: Stack, tensor: StoredTensor) -> StoredMatrix:
        order = stacked_order(stack)
        if not stack.transposed:
            return self._stored(tensor, order)
        rows, columns = tensor.shape
        number = self._checkpoint.bytes_of(tensor).view(f"u{tensor.num_bytes // (rows * columns)}")
        turned = np.ascontiguousarray(number.reshape(rows, columns).T).view(np.uint8).reshape(-1)
        return StoredMatrix(turned, Blocks(tensor.blocks), columns, rows, order)

    def _from_blocks(self, stack: Stack, numbers: StoredTensor, scales: StoredTensor) -> StoredMatrix:
        outputs, groups = scales.shape
        self._expect(numbers.shape == (outputs, groups, 16), self._names[id(stack.weight)])
        blocks = gguf_blocks(self._checkpoint.bytes_of(numbers), self._checkpoint.bytes_of(scales))
        return StoredMatrix(blocks, Blocks.MXFP4, outputs, 32 * groups, stacked_order(stack))

    def _floats(self, name: str) -> Tensor:
        tensor, numbers = self._checkpoint.tensors[name], torch.from_numpy(self._checkpoint.bytes(name).copy())
        return numbers.view(_VECTORS[Blocks(tensor.blocks)]).float()

    def _expect(self, right: bool, name: str) -> None:
        if not right:
            raise ConfigError(f"model: {self._checkpoint.source}: weights have the wrong shape: {name}")


def stored_tensors(module: Any) -> dict[str, Tensor]:
    """Return what a checkpoint of the module holds, by name: parameters, tied ones once, and
    persistent buffers.
    """
    persistent = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return dict(module.named_parameters()) | buffers


def interleaved(outputs: int, heads: int) -> NDArray[np.int64]:
    """Return the file's row for each output, if each head's two halves are interleaved."""
    return np.arange(outputs).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
