"""What stands in a GGUF file before its weights: metadata, and where the tensors are. Decides nothing.

transformers makes configuration and tokenizer of it, by way of the reader of the package gguf, which makes arrays of
every number and every string by itself: seconds for a vocabulary. `GgufHeader` has the parts of that reader's interface
that transformers uses, and takes milliseconds; `in_transformers` puts it in the other one's place.
"""

import math
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serve_app.errors import ConfigError, one_line

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""The format's types of values that have a size of their own."""
_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Of the weights, in bytes, where the file does not say otherwise."""
_IN_PLACE = threading.Lock()


@dataclass(frozen=True, slots=True)
class Field:
    """A value, or an array. types: the format's number of its type; for arrays, that of arrays and that of an element.
    parts: the elements, strings as bytes, numbers as arrays of one."""

    types: list[int]
    parts: Sequence[Any]

    @property
    def data(self) -> range:
        """Which of `parts` are elements."""
        return range(len(self.parts))

    @property
    def value(self) -> Any:
        """The number, truth value or string; for arrays, a list of them. Raises ValueError for what is not UTF-8."""
        elements = [part.decode() if isinstance(part, bytes) else part[0].item() for part in self.parts]
        return elements if self.types[0] == _ARRAY else elements[0]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is. shape: int64, the fastest dimension first; tensor_type: gguf's GGMLQuantizationType."""

    name: str
    shape: NDArray[np.int64]
    tensor_type: Any
    data_offset: int
    n_bytes: int
    path: Path

    @property
    def data(self) -> NDArray[Any]:
        """Its numbers [..., fastest dimension], mapped; uint8 in whole blocks where they are no floats."""
        dtype = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(self.tensor_type.name, np.uint8)
        rows = tuple(int(size) for size in reversed(self.shape))[:-1]
        count = self.n_bytes // np.dtype(dtype).itemsize
        return np.memmap(self.path, dtype, "r", self.data_offset, (count,)).reshape(*rows, -1)


class DamagedGgufError(ConfigError, ValueError):
    """The file is no GGUF file, is cut off, or its header contradicts itself."""


class GgufHeader:
    """Reads `path`. Raises DamagedGgufError."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._read()
        except Exception as error:  # sizes and offsets that make no sense raise whatever they provoke
            raise DamagedGgufError(f"model: cannot read {self._path}: {one_line(error)}") from error

    def _read(self) -> None:
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(content)
            magic, version, num_tensors, num_fields = cursor.unpack("<4sIQQ")
            if magic != b"GGUF" or version not in _VERSIONS:
                raise ValueError("this is no GGUF file of version 2 or 3, little-endian")
            self.fields = {cursor.string().decode(): cursor.field() for _ in range(num_fields)}
            self.tensors = self._tensors(cursor, num_tensors)

    def _tensors(self, cursor: "_Cursor", num_tensors: int) -> list[TensorInfo]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        found = []
        for _ in range(num_tensors):
            name = cursor.string().decode()
            shape = np.array(cursor.unpack(f"<{cursor.unpack('<I')[0]}Q"), dtype=np.int64)
            number, offset = cursor.unpack("<IQ")
            found.append((name, shape, GGMLQuantizationType(number), offset))
        alignment = self.fields.get("general.alignment")
        step = _ALIGNMENT if alignment is None else int(alignment.parts[0][0])
        start = -(-cursor.at // step) * step
        tensors = []
        for name, shape, kind, offset in found:
            weights, size = GGML_QUANT_SIZES[kind]
            count = math.prod(int(length) for length in shape)  # which numpy would let overflow
            tensors.append(TensorInfo(name, shape, kind, start + offset, count // weights * size, self._path))
            if start + offset + tensors[-1].n_bytes > len(cursor.content):
                raise ValueError(f"the file ends before its tensor {name} does")
        return tensors


class _Cursor:
    """Reads one thing after the other. Raises ValueError at the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content = content
        self.at = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.content):
            raise ValueError("the file ends before its weights")
        found = self.content[self.at : end]
        self.at = end
        return found

    def string(self) -> bytes:
        return self.take(int.from_bytes(self.take(8), "little"))

    def field(self) -> Field:
        kind = self.unpack("<I")[0]
        if kind != _ARRAY:
            return Field([kind], self._elements(kind, 1))
        kind, count = self.unpack("<IQ")
        return Field([_ARRAY, kind], self._elements(kind, count))

    def _elements(self, kind: int, count: int) -> Sequence[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind}, which is not known")
        dtype = np.dtype(_NUMBERS[kind])
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return list(numbers.reshape(-1, 1))


@contextmanager
def in_transformers() -> Iterator[None]:
    """While it is open, transformers reads GGUF files with `GgufHeader`. One thread at a time."""
    import gguf

    with _IN_PLACE:
        theirs = gguf.GGUFReader
        gguf.GGUFReader = GgufHeader
        try:
            yield
        finally:
            gguf.GGUFReader = theirs
