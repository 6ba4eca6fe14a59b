"""Reads the header of a GGUF file: metadata and tensor locations.

The reader of the gguf package makes an array of every number and every string, which takes seconds
for a vocabulary. `GgufHeader` takes milliseconds and has the same attribute names.
"""

import math
import mmap
import struct
from collections.abc import Sequence
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
"""The format's value types of fixed size."""
_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Default alignment of the weights, in bytes."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value or an array.

    types: the format's type number; for arrays, the number of the array type and of the element
    type. parts: the elements: strings as bytes, numbers as arrays of length one.
    """

    types: list[int]
    parts: Sequence[Any]

    @property
    def data(self) -> range:
        """Indices of the elements in `parts`."""
        return range(len(self.parts))

    @property
    def value(self) -> Any:
        """The number, boolean or string; a list for arrays.

        Raises ValueError if a string is not UTF-8.
        """
        elements = [part.decode() if isinstance(part, bytes) else part[0].item() for part in self.parts]
        return elements if self.types[0] == _ARRAY else elements[0]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Location of a tensor.

    shape: int64, fastest dimension first. tensor_type: gguf's GGMLQuantizationType.
    """

    name: str
    shape: NDArray[np.int64]
    tensor_type: Any
    data_offset: int
    n_bytes: int
    path: Path

    @property
    def data(self) -> NDArray[Any]:
        """The mapped weights [..., fastest dimension]; uint8 in whole blocks if not floats."""
        dtype = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(self.tensor_type.name, np.uint8)
        rows = tuple(int(size) for size in reversed(self.shape))[:-1]
        count = self.n_bytes // np.dtype(dtype).itemsize
        return np.memmap(self.path, dtype, "r", self.data_offset, (count,)).reshape(*rows, -1)


class DamagedGgufError(ConfigError, ValueError):
    """The file is not a GGUF file, is truncated, or has an inconsistent header."""


class GgufHeader:
    """The parsed header of `path`. Raises DamagedGgufError."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        try:
            self._read()
        except Exception as error:  # invalid sizes and offsets can raise any error
            raise DamagedGgufError(f"model: cannot read {self._path}: {one_line(error)}") from error

    def _read(self) -> None:
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(content)
            magic, version, num_tensors, num_fields = cursor.unpack("<4sIQQ")
            if magic != b"GGUF" or version not in _VERSIONS:
                raise ValueError("this is not a little-endian GGUF file of version 2 or 3")
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
            count = math.prod(int(length) for length in shape)  # numpy's product would overflow
            tensors.append(TensorInfo(name, shape, kind, start + offset, count // weights * size, self._path))
            if start + offset + tensors[-1].n_bytes > len(cursor.content):
                raise ValueError(f"the file ends inside tensor {name}")
        return tensors


class _Cursor:
    """Reads values one after another. Raises ValueError at the end of the file."""

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
            raise ValueError(f"a value of type {kind}, which is unknown")
        dtype = np.dtype(_NUMBERS[kind])
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        return list(numbers.reshape(-1, 1))
