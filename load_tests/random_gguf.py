"""GGUF files with random weights in the shapes of real models, for their speed and memory; their
text is noise.

`python -m load_tests.random_gguf llama-3.1-8b FILE` writes one with types as in files called
Q4_K_M. Its vocabulary is the default model's, filled up with names, so that every server that reads
GGUF serves it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import typer
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from serve_app.checkpoints.model_files import locate_model

SHAPES = Path(__file__).parent / "shapes"

_FACTORS: Mapping[Kind, Mapping[int, float]] = {
    Kind.Q4_0: {0: 1 / 4.6},
    Kind.Q4_1: {0: 1 / 4.6, 1: -7.5 / 4.6},
    Kind.Q5_0: {0: 1 / 9.2},
    Kind.Q5_1: {0: 1 / 9.2, 1: -15.5 / 9.2},
    Kind.Q8_0: {0: 1 / 74},
    Kind.Q4_K: {0: 1 / 200, 1: 7.5 / 200},
    Kind.Q5_K: {0: 1 / 400, 1: 15.5 / 400},
    Kind.Q6_K: {104: 1 / 1370},
}
"""Of which size the scales of blocks of random bytes must be for weights of standard deviation 1
around 0: by the scale's place among the block's 16-bit numbers."""

Contents = Callable[[str, tuple[int, ...], Kind], NDArray[Any]]
"""A tensor's rows as the file has them, from its name, shape and kind."""


def mixed_kinds(name: str, layer: int, num_layers: int) -> Kind:
    """As in files called Q4_K_M: the output, and some layers' values and down projections, in 6
    bits."""
    if name == "output":
        return Kind.Q6_K
    more_bits = layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2
    return Kind.Q6_K if name in ("attn_v", "ffn_down") and more_bits else Kind.Q4_K


def random_contents(seed: int = 0) -> Contents:
    """Weights of standard deviation 1 / sqrt(inputs), norms around 1, biases around 0."""
    rng = np.random.default_rng(seed)

    def contents(name: str, shape: tuple[int, ...], kind: Kind) -> NDArray[Any]:
        if name == "rope_freqs.weight":  # Llama 3.1's are 1 for short waves and 8 for long ones
            return np.linspace(1.0, 8.0, shape[0], dtype=np.float32)
        if len(shape) == 1:
            return rng.normal(0.0 if name.endswith("bias") else 1.0, 0.1, shape).astype(np.float32)
        deviation = shape[1] ** -0.5
        if kind not in _FACTORS:
            rows: NDArray[Any] = gguf.quantize((rng.normal(size=shape) * deviation).astype(np.float32), kind)
            return rows
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.frombuffer(bytearray(rng.bytes(shape[0] * shape[1] // weights * size)), np.uint16)
        blocks = blocks.reshape(shape[0], -1, size // 2)
        for place, factor in _FACTORS[kind].items():
            scales = rng.uniform(0.8, 1.2, blocks.shape[:2]) * deviation * factor
            blocks[..., place] = scales.astype(np.float16).view(np.uint16)
        return blocks.view(np.uint8).reshape(shape[0], -1)

    return contents


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a dense Llama, Qwen 2 or Qwen 3: llama.cpp's names, [outputs, inputs]."""
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    if config["rope_parameters"].get("rope_type") == "llama3":
        shapes["rope_freqs.weight"] = (head_dim // 2,)
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (query, hidden),
            "attn_k.weight": (key, hidden),
            "attn_v.weight": (key, hidden),
            "attn_output.weight": (hidden, query),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (intermediate, hidden),
            "ffn_up.weight": (intermediate, hidden),
            "ffn_down.weight": (hidden, intermediate),
        }
        if config["model_type"] == "qwen2":
            of_layer |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
        if config["model_type"] == "qwen3":
            of_layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    kinds: Callable[[str, int, int], Kind] = mixed_kinds,
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    contents: Contents | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """kinds: by a matrix' name without its layer, its layer, and how many there are. shapes: other
    tensors than the configuration's. tokenizer: a GGUF file whose vocabulary is taken over and
    filled up."""
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_name(path.stem)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if tokenizer is not None:
        _copy_tokenizer(gguf.GGUFReader(tokenizer), writer, config["vocab_size"])
    stored = {}
    for name, shape in (shapes or tensor_shapes(config)).items():
        layer, _, short = name.removeprefix("blk.").removesuffix(".weight").rpartition(".")
        kind = Kind.F32 if len(shape) == 1 else kinds(short, int(layer or 0), config["num_hidden_layers"])
        stored[name] = (shape, kind)
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(shape)) // weights * size
        if kind in (Kind.F32, Kind.F16):
            writer.add_tensor_info(name, shape, np.dtype(f"float{8 * size}"), num_bytes)
        else:
            row_bytes = (*shape[:-1], shape[-1] // weights * size)
            writer.add_tensor_info(name, row_bytes, np.dtype(np.uint8), num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    contents = contents or random_contents()
    for name, (shape, kind) in stored.items():
        writer.write_tensor_data(contents(name, shape, kind))
    writer.close()
    return path


def _copy_tokenizer(source: gguf.GGUFReader, writer: gguf.GGUFWriter, vocab_size: int) -> None:
    for name, field in source.fields.items():
        if not name.startswith("tokenizer."):
            continue
        value = field.contents()
        if name == "tokenizer.ggml.tokens":
            value = [*value, *(f"<more {number}>" for number in range(vocab_size - len(value)))]
        elif name == "tokenizer.ggml.token_type":
            value = [*value, *[int(gguf.TokenType.UNUSED)] * (vocab_size - len(value))]
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])


def main(
    shape: Annotated[
        str, typer.Argument(help=f"One of {', '.join(sorted(path.stem for path in SHAPES.glob('*.json')))}.")
    ],
    path: Annotated[Path, typer.Argument(help="The file to write.")],
) -> None:
    """Write a GGUF file of this shape with random weights in Q4_K and Q6_K."""
    config = json.loads((SHAPES / f"{shape}.json").read_text())
    write_gguf(path, config, tokenizer=locate_model("default").path)
    typer.echo(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    typer.run(main)
