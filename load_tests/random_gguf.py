"""GGUF files with random weights in the shapes of real models, for their speed and memory; their
text is noise.

`python -m load_tests.random_gguf llama-3.1-8b FILE` writes one with types as in files called
Q4_K_M. Qwen3-MoE's matrices are in Q4_0; gpt-oss' experts are in MXFP4, its other matrices in Q8_0.
`--layers 22` writes fewer layers than the model has. The vocabulary is the default model's, filled
up with names, so that every server that reads GGUF serves the file.
"""

import json
import math
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
around 0: by the scale's place among the block's 16-bit numbers. Half of the blocks get negative
scales: values that are not balanced around 0 make texts repeat one token."""
_MXFP4_DEVIATION = 2.93
"""Of the sixteen values of four bits."""
_ARCHITECTURES = {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}
"""llama.cpp's names of transformers' model types, where they differ."""

Contents = Callable[[str, tuple[int, ...], Kind], NDArray[Any]]
"""A tensor's rows as the file has them, from its name, shape and kind."""


def mixed_kinds(name: str, layer: int, num_layers: int) -> Kind:
    """As in files called Q4_K_M: the output, and some layers' values and down projections, in 6
    bits."""
    if name == "output":
        return Kind.Q6_K
    more_bits = layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2
    return Kind.Q6_K if name in ("attn_v", "ffn_down") and more_bits else Kind.Q4_K


def uniform_kinds(name: str, layer: int, num_layers: int) -> Kind:
    """Q4_0, and the output in 6 bits."""
    return Kind.Q6_K if name == "output" else Kind.Q4_0


def gpt_oss_kinds(name: str, layer: int, num_layers: int) -> Kind:
    """As in the published files."""
    return Kind.MXFP4 if name.endswith("_exps") else Kind.Q8_0


_KINDS = {"gpt_oss": gpt_oss_kinds, "qwen3_moe": uniform_kinds}
"""By model type; `mixed_kinds` for all others."""


def random_contents(seed: int = 0) -> Contents:
    """Weights of standard deviation 1 / sqrt(inputs), norms around 1, biases around 0."""
    rng = np.random.default_rng(seed)

    def contents(name: str, shape: tuple[int, ...], kind: Kind) -> NDArray[Any]:
        if name == "rope_freqs.weight":  # Llama 3.1's are 1 for short waves and 8 for long ones
            return np.linspace(1.0, 8.0, shape[0], dtype=np.float32)
        if len(shape) == 1 or name.endswith("bias"):
            centre = 0.0 if name.endswith(("bias", "sinks.weight")) else 1.0
            return rng.normal(centre, 0.1, shape).astype(np.float32)
        deviation = shape[-1] ** -0.5
        if kind is Kind.MXFP4:
            return _random_mxfp4(rng, shape, deviation)
        if kind not in _FACTORS:
            rows: NDArray[Any] = gguf.quantize((rng.normal(size=shape) * deviation).astype(np.float32), kind)
            return rows
        weights, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.frombuffer(bytearray(rng.bytes(math.prod(shape) // weights * size)), np.uint16)
        blocks = blocks.reshape(*shape[:-1], -1, size // 2)
        signs = rng.integers(0, 2, blocks.shape[:-1]) * 2 - 1
        for place, factor in _FACTORS[kind].items():
            scales = rng.uniform(0.8, 1.2, blocks.shape[:-1]) * deviation * factor * signs
            blocks[..., place] = scales.astype(np.float16).view(np.uint16)
        return blocks.view(np.uint8).reshape(*shape[:-1], -1)

    return contents


def _random_mxfp4(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> NDArray[np.uint8]:
    weights, size = gguf.GGML_QUANT_SIZES[Kind.MXFP4]
    blocks = np.frombuffer(bytearray(rng.bytes(math.prod(shape) // weights * size)), np.uint8).reshape(-1, size)
    exponent = 127 + math.log2(deviation / _MXFP4_DEVIATION)
    blocks[:, 0] = np.floor(exponent + rng.random(len(blocks)))
    return blocks.reshape(*shape[:-1], -1)


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of a Llama, Qwen 2, Qwen 3, Qwen3-MoE or gpt-oss: llama.cpp's names, [outputs, inputs]."""
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
        }
        if config["model_type"] in _ARCHITECTURES:
            of_layer |= _expert_shapes(config)
        else:
            of_layer |= {
                "ffn_norm.weight": (hidden,),
                "ffn_gate.weight": (intermediate, hidden),
                "ffn_up.weight": (intermediate, hidden),
                "ffn_down.weight": (hidden, intermediate),
            }
        if config["model_type"] in ("qwen2", "gpt_oss"):
            of_layer |= {"attn_q.bias": (query,), "attn_k.bias": (key,), "attn_v.bias": (key,)}
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            of_layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _expert_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, experts = config["hidden_size"], config["num_experts"]
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_exps.weight": (experts, width, hidden),
        "ffn_up_exps.weight": (experts, width, hidden),
        "ffn_down_exps.weight": (experts, hidden, width),
    }
    if config["model_type"] != "gpt_oss":
        return shapes | {"ffn_norm.weight": (hidden,)}
    return shapes | {
        "post_attention_norm.weight": (hidden,),
        "attn_sinks.weight": (config["num_attention_heads"],),
        "attn_output.bias": (hidden,),
        "ffn_gate_inp.bias": (experts,),
        "ffn_gate_exps.bias": (experts, width),
        "ffn_up_exps.bias": (experts, width),
        "ffn_down_exps.bias": (experts, hidden),
    }


def _add_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if config["model_type"] == "gpt_oss":
        rope = config["rope_parameters"]
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


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
    writer = gguf.GGUFWriter(path, _ARCHITECTURES.get(config["model_type"], config["model_type"]))
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
    if "num_experts" in config:
        _add_experts(writer, config)
    if tokenizer is not None:
        _copy_tokenizer(gguf.GGUFReader(tokenizer), writer, config["vocab_size"])
    stored = {}
    for name, shape in (shapes or tensor_shapes(config)).items():
        layer, _, short = name.removeprefix("blk.").removesuffix(".weight").rpartition(".")
        floats = len(shape) == 1 or name.endswith(("bias", "ffn_gate_inp.weight"))
        kind = Kind.F32 if floats else kinds(short, int(layer or 0), config["num_hidden_layers"])
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
    layers: Annotated[int | None, typer.Option(help="Write this many layers. Default: all.")] = None,
) -> None:
    """Write a GGUF file of this shape with random weights in four bits."""
    config = json.loads((SHAPES / f"{shape}.json").read_text())
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    kinds = _KINDS.get(config["model_type"], mixed_kinds)
    write_gguf(path, config, kinds, tokenizer=locate_model("default").path)
    typer.echo(f"{path}: {path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    typer.run(main)
