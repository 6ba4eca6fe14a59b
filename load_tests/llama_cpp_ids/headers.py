"""GGUF files made from others: the same metadata with some of it changed, and no weights."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def write_header(path: Path, source: Path, changes: Mapping[str, Any], left_out: str = "general.") -> Path:
    """`source`'s metadata, without names that begin with `left_out`, and with `changes`; None takes a key away."""
    values, types = _read(source)
    writer = GGUFWriter(path, values["general.architecture"])
    for name, value in {**values, **changes}.items():
        if value is None or name.startswith(("GGUF.", left_out)):
            continue
        if isinstance(value, list):
            writer.add_array(name, value)
        elif name in types and name not in changes:
            writer.add_key_value(name, value, types[name])
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _read(source: Path) -> tuple[dict[str, Any], dict[str, GGUFValueType]]:
    """Values and their types; takes seconds for a vocabulary."""
    fields = GGUFReader(source).fields
    return {name: field.contents() for name, field in fields.items()}, {n: f.types[0] for n, f in fields.items()}
