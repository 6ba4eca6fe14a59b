"""GGUF files made from others: the same metadata with some of it changed, and no weights."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter


def write_header(path: Path, source: Path, changes: Mapping[str, Any], left_out: str = "general.") -> Path:
    """`source`'s metadata, without names that begin with `left_out`, and with `changes`; None takes
    a key away."""
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
    return _finish(writer, path)


def _finish(writer: GGUFWriter, path: Path) -> Path:
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


def write_sentencepiece(path: Path, lines: Sequence[str], *, space_in_front: bool) -> Path:
    """A small SentencePiece vocabulary of what is frequent in `lines`, as files of Llama 2 and
    Mistral have it."""
    counts: Counter[str] = Counter()
    for line in lines:
        text = line.replace(" ", "\u2581")
        counts.update(text[i : i + size] for size in range(1, 7) for i in range(len(text) - size + 1))
    # llama.cpp takes some names in angle brackets for control tokens, whatever the file says.
    frequent = (piece for piece in counts if len(piece) > 1 and not (piece[0] == "<" and piece[-1] == ">"))
    words = sorted(frequent, key=lambda piece: (-counts[piece], piece))[:2000]
    # of each token, as in trained vocabularies; the other ones become bytes
    characters = sorted(set("".join(words)))
    special = {"<unk>": 2, "<s>": 3, "</s>": 3, **{f"<0x{byte:02X}>": 6 for byte in range(256)}, "McDonald": 4}
    pieces = [*({piece: 1 for piece in (*words, *characters)} | special).items()]
    pieces.sort(key=lambda piece: piece[1] == 1)
    writer = GGUFWriter(path, "llama")
    for name, value in (("context_length", 64), ("embedding_length", 64), ("block_count", 1)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.feed_forward_length", 64)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_types([kind for _, kind in pieces])
    writer.add_token_scores([-float(i) for i in range(len(pieces))])
    writer.add_add_space_prefix(space_in_front)
    return _finish(writer, path)
