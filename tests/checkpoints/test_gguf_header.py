"""Our reader of what stands before the weights against the package gguf's, which it replaces."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.ggml import _gguf_parse_value

from serve_app.checkpoints.gguf_header import GgufHeader

_INTEGERS = {"UINT8": 8, "INT8": 8, "UINT16": 16, "INT16": 16, "UINT32": 32, "INT32": 32, "UINT64": 64, "INT64": 64}


def _values(kind: str) -> st.SearchStrategy[Any]:
    if kind in _INTEGERS:
        bits = _INTEGERS[kind] - kind.startswith("INT")
        return st.integers(-(2**bits) if kind.startswith("INT") else 0, 2**bits - 1)
    if kind == "BOOL":
        return st.booleans()
    return st.text() if kind == "STRING" else st.floats(width=32, allow_nan=False)


_KINDS = [kind.name for kind in GGUFValueType if kind is not GGUFValueType.ARRAY]
_SCALARS = st.sampled_from(_KINDS).flatmap(lambda kind: st.tuples(st.just(kind), _values(kind)))
_ARRAYS = st.sampled_from(_KINDS).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(_values(kind), min_size=1, max_size=5))
)


def _parsed(reader: Any) -> dict[str, tuple[list[int], list[Any]]]:
    """As transformers reads the fields."""
    return {
        key: (
            [int(kind) for kind in field.types],
            [_gguf_parse_value(field.parts[i], field.types) for i in field.data],
        )
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")  # the other reader's own
    }


def _write(path: Path, values: dict[str, tuple[str, Any]], alignment: int | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for key, (kind, value) in values.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, GGUFValueType.ARRAY, GGUFValueType[kind])
        else:
            writer.add_key_value(key, value, GGUFValueType[kind])
    numbers = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    for kind in (Kind.F32, Kind.F16, Kind.Q4_0, Kind.Q8_0, Kind.BF16):
        writer.add_tensor(f"a {kind.name}", gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.add_tensor("vector", numbers[0, :5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@settings(max_examples=50)
@given(
    values=st.dictionaries(st.text(min_size=1).map("key.{}".format), st.one_of(_SCALARS, _ARRAYS), max_size=6),
    alignment=st.sampled_from([None, 8, 64, 256]),
)
def test_reads_what_the_package_reads(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, tuple[str, Any]], alignment: int | None
) -> None:
    path = _write(tmp_path_factory.mktemp("gguf") / "file.gguf", values, alignment)
    theirs, ours = GGUFReader(path), GgufHeader(path)
    assert _parsed(ours) == _parsed(theirs)
    for expected, got in zip(theirs.tensors, ours.tensors, strict=True):
        assert (got.name, got.tensor_type, got.n_bytes) == (expected.name, expected.tensor_type, expected.n_bytes)
        assert (got.data_offset, got.shape.tolist()) == (expected.data_offset, expected.shape.tolist())
        assert (got.data.dtype, got.data.shape) == (expected.data.dtype, expected.data.shape)
        assert np.array_equal(got.data, expected.data)


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.98])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, part: float) -> None:
    path = _write(tmp_path / "file.gguf", {"key": ("STRING", "value"), "keys": ("INT32", [1, 2, 3])})
    whole = path.read_bytes()
    path.write_bytes(whole[: 24 + int(part * (len(whole) - 25))])
    with pytest.raises(ValueError, match="the file ends (before|inside)"):
        GgufHeader(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<4sIQQ", b"GGML", 3, 0, 0), "not a little-endian GGUF file"),
        (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "not a little-endian GGUF file"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "not a little-endian GGUF file"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 13), "type 13"),
        (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**60), "the file ends"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GgufHeader(tmp_path / "file.gguf")
