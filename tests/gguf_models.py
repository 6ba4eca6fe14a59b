"""Tiny random models as GGUF files with the metadata and the tensors that llama.cpp's converters
write."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFValueType as Value
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.model.sources.skeleton import scale_queries

VOCAB = 96
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_EPS = {"rms_norm_eps": 2e-5}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE, **_EPS, "rope_theta": 500.0},
    "qwen2": {"model_type": "qwen2", **_SHAPE, **_EPS, "rope_theta": 500.0},
    "qwen3": {"model_type": "qwen3", **_SHAPE, **_EPS, "head_dim": 32, "rope_theta": 500.0},
    "qwen2moe": {
        "model_type": "qwen2_moe", **_SHAPE, **_EPS, **_MOE, "rope_theta": 500.0,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3moe": {
        "model_type": "qwen3_moe", **_SHAPE, **_EPS, **_MOE, "head_dim": 32, "rope_theta": 500.0,
        "norm_topk_prob": True,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", **_SHAPE, **_EPS, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 12, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 64,
        },
    },
    "qwen3vl": {"model_type": "qwen3", **_SHAPE, **_EPS, "head_dim": 32, "rope_theta": 500.0},
    "smollm3": {"model_type": "smollm3", **_SHAPE, **_EPS, "num_hidden_layers": 5, "rope_theta": 500.0},
    "mistral3": {
        "model_type": "ministral3", **_SHAPE, **_EPS, "head_dim": 32, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0, "beta_fast": 24.0, "beta_slow": 2.0,
            "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4,
        },
    },
    "phi3": {
        "model_type": "phi3", **_SHAPE, **_EPS, "rope_theta": 500.0, "partial_rotary_factor": 0.5,
        "sliding_window": 12, "original_max_position_embeddings": 256,
    },
    "gemma2": {
        "model_type": "gemma2", **_SHAPE, **_EPS, "head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", **_SHAPE, **_EPS, "num_hidden_layers": 7, "head_dim": 32, "sliding_window": 12,
        "query_pre_attn_scalar": 32, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gemma4": {
        "model_type": "gemma4_text", **_SHAPE, **_EPS, "num_hidden_layers": 6, "head_dim": 32, "sliding_window": 12,
        "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0, "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "stablelm": {
        "model_type": "stablelm", **_SHAPE, "layer_norm_eps": 2e-5, "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
    },
    "starcoder2": {"model_type": "starcoder2", **_SHAPE, "norm_epsilon": 2e-5, "rope_theta": 500.0},
    "nemotron": {
        "model_type": "nemotron", **_SHAPE, "norm_eps": 2e-5, "rope_theta": 500.0, "partial_rotary_factor": 0.25,
    },
    "gpt2": {
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256,
        "n_inner": 96, "layer_norm_epsilon": 2e-5, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
"""By GGUF's name of the architecture: transformers' configuration, with no value that is a
default."""

Keys = Sequence[tuple[str, Any, Value] | tuple[str, Any, Value, Value]]


def module_of(architecture: str, **changes: Any) -> Any:
    """A random causal LM in float32, in eval mode. Biases, norms and persistent buffers are random
    too."""
    config = AutoConfig.for_model(**{**CONFIGS[architecture], **changes})
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, module.state_dict().values()):
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.2)
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    scale_queries(module)
    return module.eval()


def converter_keys(architecture: str, config: Any) -> Keys:
    """As llama.cpp's converter writes them for the architecture."""
    return [(f"{architecture}.{key}", *value) for key, *value in _keys(architecture, config)]


def _keys(architecture: str, config: Any) -> Iterator[tuple[Any, ...]]:
    yield "block_count", config.num_hidden_layers, Value.UINT32
    yield "context_length", config.max_position_embeddings, Value.UINT32
    yield "embedding_length", config.hidden_size, Value.UINT32
    width = config.n_inner if architecture == "gpt2" else config.intermediate_size
    yield "feed_forward_length", width, Value.UINT32
    yield "attention.head_count", config.num_attention_heads, Value.UINT32
    if architecture == "gpt2":
        yield "attention.layer_norm_epsilon", config.layer_norm_epsilon, Value.FLOAT32
        return
    if architecture == "gemma4":
        yield from _gemma4_keys(config)
        return
    yield "attention.head_count_kv", config.num_key_value_heads, Value.UINT32
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "head_dim"):
        yield "attention.key_length", head_dim, Value.UINT32
        yield "attention.value_length", head_dim, Value.UINT32
    for name in ("rms_norm_eps", "norm_eps"):
        if hasattr(config, name):
            yield "attention.layer_norm_rms_epsilon", getattr(config, name), Value.FLOAT32
    for name in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if hasattr(config, name):
            yield "attention.layer_norm_epsilon", getattr(config, name), Value.FLOAT32
    yield from _rope_keys(architecture, config, head_dim)
    yield from _special_keys(architecture, config)


def _gemma4_keys(config: Any) -> Iterator[tuple[Any, ...]]:
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    heads = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    yield "attention.layer_norm_rms_epsilon", config.rms_norm_eps, Value.FLOAT32
    yield "attention.sliding_window", config.sliding_window, Value.UINT32
    yield "attention.shared_kv_layers", 0, Value.UINT32
    yield "embedding_length_per_layer_input", 0, Value.UINT32
    yield "attention.sliding_window_pattern", windowed, Value.ARRAY, Value.BOOL
    yield "attention.head_count_kv", [layer.num_key_value_heads for layer in heads], Value.ARRAY, Value.UINT32
    for suffix, layer in (("", heads[-1]), ("_swa", heads[0])):
        yield f"attention.key_length{suffix}", layer.head_dim, Value.UINT32
        yield f"attention.value_length{suffix}", layer.head_dim, Value.UINT32
        yield f"rope.dimension_count{suffix}", layer.head_dim, Value.UINT32
    yield "final_logit_softcapping", config.final_logit_softcapping, Value.FLOAT32
    yield "rope.freq_base", config.rope_parameters["full_attention"]["rope_theta"], Value.FLOAT32
    yield "rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"], Value.FLOAT32


def _rope_keys(architecture: str, config: Any, head_dim: int) -> Iterator[tuple[str, Any, Value]]:
    parameters = config.rope_parameters
    full = parameters.get("full_attention", parameters)
    if architecture not in ("gemma2", "stablelm"):
        yield "rope.freq_base", float(full["rope_theta"]), Value.FLOAT32
    if architecture == "gemma3":
        yield "rope.freq_base_swa", parameters["sliding_attention"]["rope_theta"], Value.FLOAT32
    if architecture in ("llama", "mistral3", "smollm3", "phi3", "stablelm", "nemotron"):
        part = full.get("partial_rotary_factor", 1.0)
        yield "rope.dimension_count", int(part * head_dim), Value.UINT32
    if full["rope_type"] == "yarn":
        yield "rope.scaling.type", "yarn", Value.STRING
        yield "rope.scaling.factor", full["factor"], Value.FLOAT32
        yield "rope.scaling.original_context_length", full["original_max_position_embeddings"], Value.UINT32
    if architecture == "phi3":
        yield "rope.scaling.original_context_length", config.original_max_position_embeddings, Value.UINT32
    if architecture == "nemotron":
        yield "rope.scaling.type", "none", Value.STRING
    if architecture == "mistral3":
        yield "rope.scaling.type", "yarn", Value.STRING
        yield "rope.scaling.factor", full["factor"], Value.FLOAT32
        yield "rope.scaling.original_context_length", full["original_max_position_embeddings"], Value.UINT32
        yield "rope.scaling.yarn_beta_fast", full["beta_fast"], Value.FLOAT32
        yield "rope.scaling.yarn_beta_slow", full["beta_slow"], Value.FLOAT32
        yield "rope.scaling.yarn_log_multiplier", full["mscale_all_dim"], Value.FLOAT32
        yield "attention.temperature_scale", full["llama_4_scaling_beta"], Value.FLOAT32
    if full["rope_type"] == "linear":
        yield "rope.scaling.type", "linear", Value.STRING
        yield "rope.scaling.factor", full["factor"], Value.FLOAT32


def _special_keys(architecture: str, config: Any) -> Iterator[tuple[str, Any, Value]]:
    if architecture == "qwen3vl":
        yield "n_deepstack_layers", 3, Value.UINT32
        yield "rope.dimension_sections", 12, Value.UINT32
    if architecture in ("llama", "mistral3", "nemotron", "smollm3"):
        yield "vocab_size", config.vocab_size, Value.UINT32
    if architecture in ("phi3", "gemma2", "gemma3", "gpt-oss"):
        yield "attention.sliding_window", config.sliding_window, Value.UINT32
    if architecture == "gemma2":
        yield "attn_logit_softcapping", config.attn_logit_softcapping, Value.FLOAT32
        yield "final_logit_softcapping", config.final_logit_softcapping, Value.FLOAT32
    if architecture == "stablelm":
        yield "use_parallel_residual", config.use_parallel_residual, Value.BOOL
    if architecture in ("qwen2moe", "qwen3moe", "gpt-oss"):
        yield "expert_count", config.num_experts, Value.UINT32
        yield "expert_used_count", config.num_experts_per_tok, Value.UINT32
        width = config.intermediate_size if architecture == "gpt-oss" else config.moe_intermediate_size
        yield "expert_feed_forward_length", width, Value.UINT32
    if architecture == "qwen2moe":
        yield "expert_shared_feed_forward_length", config.shared_expert_intermediate_size, Value.UINT32


_DESCRIPTION: Keys = [
    ("general.type", "model", Value.STRING),
    ("general.name", "Tiny", Value.STRING),
    ("general.size_label", "1K", Value.STRING),
    ("general.license", "mit", Value.STRING),
    ("general.tags", ["text-generation"], Value.ARRAY, Value.STRING),
    ("general.base_model.count", 1, Value.UINT32),
    ("general.base_model.0.name", "Tiny", Value.STRING),
    ("general.sampling.temp", 0.7, Value.FLOAT32),
    ("general.file_type", 0, Value.UINT32),
    ("general.quantization_version", 2, Value.UINT32),
    ("quantize.imatrix.file", "tiny.imatrix", Value.STRING),
    ("quantize.imatrix.entries_count", 12, Value.UINT32),
    ("split.count", 0, Value.UINT16),
    ("tokenizer.ggml.model", "gpt2", Value.STRING),
    ("tokenizer.ggml.pre", "default", Value.STRING),
    ("tokenizer.ggml.tokens", [f"<{index}>" for index in range(VOCAB)], Value.ARRAY, Value.STRING),
    ("tokenizer.ggml.token_type", [1] * VOCAB, Value.ARRAY, Value.INT32),
    ("tokenizer.ggml.bos_token_id", 1, Value.UINT32),
    ("tokenizer.ggml.eos_token_id", 2, Value.UINT32),
]


def write_model(
    path: Path,
    architecture: str,
    module: Any,
    *,
    keys: Keys = (),
    without: Sequence[str] = (),
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    quantized: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """keys, tensors: besides what the converter writes, or in its place; without: keys, without
    their prefix, that it is to leave out; quantized: the kinds of `tensors` that are blocks."""
    writer = gguf.GGUFWriter(path, architecture)
    left_out = {f"{architecture}.{key}" for key in without}
    merged = {key[0]: key for key in [*_DESCRIPTION, *converter_keys(architecture, module.config), *keys]}
    for name, value, *kinds in merged.values():
        if name not in left_out:
            writer.add_key_value(name, value, *kinds)
    for name, tensor in {**dict(_tensors(architecture, module)), **(tensors or {})}.items():
        if quantized and name in quantized:
            writer.add_tensor(name, tensor, raw_dtype=quantized[name])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(architecture: str, module: Any) -> Iterator[tuple[str, Any]]:
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, module.config.num_hidden_layers)
    tied = module.config.tie_word_embeddings
    if architecture == "gemma4":
        rotated, pairs = 8, 32
        yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated))
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if architecture == "gpt-oss" and ".experts." in name:
            merged = _gpt_oss_experts(name, tensor)
        elif name.endswith("experts.gate_up_proj"):
            parts = zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
            merged = [(name.replace("gate_up_proj", part), rows) for part, rows in parts]
        else:
            merged = [(name, tensor)]
        for part, rows in merged:
            stem, ending = part.rsplit(".", 1)
            stem, ending = (stem, ending) if ending in ("weight", "bias") else (part, "weight")
            found = names.get_name(stem)
            assert found is not None, part
            yield f"{found}.{ending}", _as_converted(architecture, found, ending, rows, module.config).numpy()


def _gpt_oss_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Matrices with outputs as rows; gate and up apart, which the module has row by row."""
    stem = name.removesuffix("_bias")
    rows, ending = (tensor, "bias") if name.endswith("_bias") else (tensor.mT, "weight")
    if not stem.endswith("gate_up_proj"):
        return [(f"{stem}.{ending}", rows)]
    prefix = stem.removesuffix("gate_up_proj")
    return [(f"{prefix}{part}_proj.{ending}", rows[:, first::2]) for first, part in enumerate(("gate", "up"))]


def _as_converted(architecture: str, name: str, ending: str, rows: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows in the file's order, norms with one added where the file has it so."""
    short = name.rpartition(".")[2]
    if architecture in ("llama", "mistral3", "smollm3") and short in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
        return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    if architecture in ("gemma2", "gemma3", "nemotron") and short.endswith("norm") and ending == "weight":
        return rows + 1
    if architecture == "gpt2" and short in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and ending == "weight":
        return rows.T
    if architecture == "qwen2moe" and short == "ffn_gate_inp_shexp":
        return rows[0]
    return rows
