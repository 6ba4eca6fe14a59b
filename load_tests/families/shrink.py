"""Makes the default configuration of a family small, so that a random model of it builds at once.

Keys are shrunk by their names, which families share. What makes a family different (its kinds of
layers, norms, experts, positions) stays as its defaults have it.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 200
LAYERS = 2
CONTEXT = 512
_HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN = 4, 2, 32, 64

_VALUES: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "dim"), _HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num", "num_query_groups", "num_kv_heads"), _KV_HEADS),
    **dict.fromkeys(("num_global_key_value_heads", "swa_num_key_value_heads"), _KV_HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "num_swa_attention_heads"), _HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim", "global_head_dim"), _HEAD_DIM),
    **dict.fromkeys(("attention_head_dim", "index_head_dim", "d_kv"), _HEAD_DIM),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "shared_intermediate_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_ffn_hidden_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), CONTEXT),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention_window"), 24),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input", "laurel_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 16),
    "qk_head_dim": 32,
    "rotary_dim": 16,
    "index_n_heads": 2,
    "index_topk": 16,
    "num_kv_shared_layers": 0,
    "decoder_attention_heads": _HEADS,
    "encoder_layers": 1,
    "encoder_attention_heads": _HEADS,
    "encoder_ffn_dim": 64,
    "depth": 1,
    "out_hidden_size": _HIDDEN,
    "image_size": 28,
    "patch_size": 14,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "block_types", "layer_type_list")
"""Lists with one entry per layer, made as long as the model has layers."""
_AXES = {
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), [8, 12, 12]),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "paddleocr_vl_text"), [16, 24, 24]),
}
"""Sections of positions that are in the code and not in the default configuration."""
_TOKENS = ("_token_id", "_token_index", "_token_ids")
_UNUSED = ("id2label", "label2id", "per_layer_config", "problem_type", "transformers_version")


def shrink(kind: Any) -> Any:
    """Return a small configuration of a class of transformers' configurations."""
    return kind(**_small(kind()))


def _small(config: Any) -> dict[str, Any]:
    """Return the values of the keys that the configuration's class declares."""
    declared = {field.name for field in fields(type(config))} - {*_UNUSED}
    values = {key: value for key, value in vars(config).items() if key in declared and value is not None}
    small = {key: _small_value(key, value) for key, value in values.items()}
    layers = max(LAYERS, *(len({*map(str, values.get(key) or ())}) for key in _PER_LAYER))
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if key in small:
            small[key] = layers
    for key, value in values.items():
        if isinstance(value, list) and len(value) == values.get("num_hidden_layers"):
            size = _VALUES.get(key.removesuffix("_per_layer"))
            small[key] = _one_of_each(value, layers) if key in _PER_LAYER or size is None else [size] * layers
    if "qk_rope_head_dim" in small:  # latent attention has as many keys as queries
        small |= {key: value for key, value in {"head_dim": 16, "num_key_value_heads": _HEADS}.items() if key in small}
    elif small.get("head_dim") and values["head_dim"] * values["num_attention_heads"] == values["hidden_size"]:
        small["head_dim"] = _HIDDEN // _HEADS
    elif "head_dim" in declared:
        small.setdefault("head_dim", _HIDDEN // _HEADS)
    return _small_positions(small, config.model_type)


def _small_value(key: str, value: Any) -> Any:
    if isinstance(value, PretrainedConfig):
        return {**_small(value), "model_type": value.model_type}
    if key.endswith(_TOKENS):
        return [1] if isinstance(value, list) else min(value, VOCABULARY - 1) if type(value) is int else value
    return _VALUES[key] if key in _VALUES and type(value) is int else value


def _small_positions(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """Fit the sections of positions with several axes to the width of the heads."""
    rope = values.get("rope_parameters")
    old = rope.get("mrope_section", _AXES.get(kind)) if isinstance(rope, Mapping) else None
    if rope and old:
        width = values.get("head_dim") or _HIDDEN // _HEADS
        pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        section = [size * pairs // sum(old) for size in old[:-1]]
        values["rope_parameters"] = {**rope, "mrope_section": [*section, pairs - sum(section)]}
    return values


def _one_of_each(entries: list[Any], layers: int) -> list[Any]:
    """Return `layers` entries with each value once, in the order of the list, the last repeated."""
    first = [entries[0], *(entry for at, entry in enumerate(entries[1:], 1) if entry not in entries[:at])]
    return (first + [first[-1]] * layers)[:layers]
