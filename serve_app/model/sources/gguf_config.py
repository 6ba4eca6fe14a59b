"""Converts a GGUF file's metadata to a transformers configuration, and collects unsupported keys.

transformers' own reader drops keys and tensors that it does not know. Here each is used, listed as
harmless, or refused by name.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.checkpoints.gguf_header import GgufHeader, TensorInfo
from serve_app.errors import ConfigError
from serve_app.model.sources.gguf_keys import (
    ARCHITECTURES,
    HARMLESS,
    HARMLESS_IN,
    HARMLESS_TENSORS,
    NEUTRAL,
    OTHER_PREFIXES,
    REFUSED_ARCHITECTURES,
    Architecture,
)
from serve_app.model.sources.gguf_metadata import Metadata
from serve_app.model.sources.gguf_rope import rope_parameters

_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_FLAGS = ("expert_weights_norm",)
_NUMBERS = ("epsilon", "softcapping")
"""Endings of keys whose values are not integers."""
_OFF_AT_ZERO = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size whose attention is scaled by the width of all heads. llama.cpp detects it
this way.
"""
_GEMMA3_PATTERN = 6
_LOCAL_BASE = 10_000.0
_UNROTATED = 1e20
"""A pair whose frequency is divided by this or more is not rotated."""
_EPSILONS = {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"}
_MOST_SHOWN = 60
_MOST_HEAD_DIM = 2**14


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """The converted metadata. values: transformers' configuration, including `model_type`. refused:
    the reason for each unsupported key. tensors: tensors that are already included in `values`.
    """

    values: Mapping[str, Any]
    refused: Mapping[str, str]
    tensors: Collection[str]


def read_config(header: GgufHeader, source: object) -> GgufConfig:
    """Convert the metadata. source: location of the file, for messages.

    Raises ConfigError for an unsupported architecture, a part of a split file, and invalid values.
    """
    name = _architecture(header, source)
    row = ARCHITECTURES[name]
    keys = Metadata(header, source, name)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if keys.count("block_count") > len(tensors):
        raise keys.error(f"{name}.block_count is {keys.count('block_count')}, and the file has {len(tensors)} tensors")
    values = {"model_type": row.model_type, **row.constants, **_attributes(keys, row, tensors)}
    head_dim = _head_dim(keys, row)
    if "attention.key_length" in row.attributes:
        values["head_dim"] = head_dim
    if row.rotates:
        values["rope_parameters"] = rope_parameters(keys, tensors, head_dim, partial=row.partial)
    _expect_what_is_computed(keys, row, head_dim)
    for attribute, key in _SPECIAL_TOKENS.items():
        field = header.fields.get(key)
        values[attribute] = None if field is None else field.value
    values["tie_word_embeddings"] = "output.weight" not in tensors
    _SPECIALITIES.get(name, _scale)(keys, values, tensors)
    _refuse_left_over(keys)
    return GgufConfig(values, keys.refused, frozenset(keys.used_tensors))


def check_tensors(tensors: Iterable[str], known: Collection[str], source: object) -> None:
    """Raise ConfigError with the names of tensors that are neither `known` nor harmless."""
    known, unknown = set(known), []
    for name in tensors:
        short = name.removeprefix("blk.").partition(".")[2] if name.startswith("blk.") else name
        # transformers' names of merged experts have no suffix.
        if not {name, name.removesuffix(".weight")} & known and short not in HARMLESS_TENSORS:
            unknown.append(name)
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ConfigError(
            f"model: {source}: tensors do not belong to any part of the model: {', '.join(unknown[:3])}{more}"
        )


def _architecture(header: GgufHeader, source: object) -> str:
    """Return the architecture. Raises ConfigError unless this is a whole file of a supported
    language model.
    """
    if "general.architecture" not in header.fields:
        raise ConfigError(f"model: {source}: its metadata has no general.architecture")
    parts = header.fields.get("split.count")
    if parts is not None and parts.value > 1:
        raise ConfigError(
            f"model: {source}: this file is one of {parts.value} parts of a split model; "
            "merge them (llama-gguf-split --merge) and serve the whole file"
        )
    kind = header.fields.get("general.type")
    if kind is not None and kind.value != "model":
        raise ConfigError(f"model: {source}: general.type is {kind.value!r}, and must be 'model'")
    name = header.fields["general.architecture"].value
    if name not in ARCHITECTURES:
        reason = REFUSED_ARCHITECTURES.get(name, f"known: {', '.join(sorted(ARCHITECTURES))}")
        raise ConfigError(f"model: {source}: GGUF files of architecture {name!r} are not supported: {reason}")
    return str(name)


def _attributes(keys: Metadata, row: Architecture, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, attribute in row.attributes.items():
        if key == "attention.head_count_kv" and row.windowed_heads:
            continue
        given = keys.whole(key)
        if given is None and key in row.optional:
            values[attribute] = row.optional[key]
        elif key in _OFF_AT_ZERO and given == 0:
            values[attribute] = None
        elif key in _FLAGS:
            values[attribute] = keys.flag(key)
        else:
            values[attribute] = keys.number(key) if key.endswith(_NUMBERS) else keys.count(key)
    if "num_key_value_heads" in values:
        values["num_key_value_heads"] = keys.count("attention.head_count_kv", keys.count("attention.head_count"))
    if values["vocab_size"] is None and "token_embd.weight" in tensors:
        values["vocab_size"] = int(tensors["token_embd.weight"].shape[-1])
    return values


def _head_dim(keys: Metadata, row: Architecture) -> int:
    head_dim = keys.count("embedding_length") // keys.count("attention.head_count")
    if "attention.key_length" in row.attributes:
        head_dim = keys.count("attention.key_length", head_dim)
    else:
        keys.expect("attention.key_length", head_dim)
    if not 0 < head_dim <= _MOST_HEAD_DIM:
        raise keys.error(f"its heads have a width of {head_dim}, which must be from 1 to {_MOST_HEAD_DIM}")
    return head_dim


def _expect_what_is_computed(keys: Metadata, row: Architecture, head_dim: int) -> None:
    keys.expect("attention.value_length", head_dim)
    windowed = keys.count("attention.key_length_swa") if row.windowed_heads else head_dim
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        keys.expect(key, windowed)
    if "attention.head_count_kv" not in row.attributes:
        keys.expect("attention.head_count_kv", keys.count("attention.head_count"))
    (own,) = _EPSILONS & row.attributes.keys()
    (other,) = _EPSILONS - row.attributes.keys()
    keys.expect(other, keys.number(own))  # converters write both for some models


def _refuse_left_over(keys: Metadata) -> None:
    harmless = HARMLESS | HARMLESS_IN.get(keys.architecture, {})
    for whole in keys.left_over():
        prefix, _, key = whole.partition(".")
        if prefix != keys.architecture:
            if prefix != "split" and prefix not in OTHER_PREFIXES:
                keys.refused[whole] = "it has an unknown prefix"
        elif key not in harmless and (value := keys.whole(key)) not in NEUTRAL.get(key, ()):
            shown = repr(value) if len(repr(value)) <= _MOST_SHOWN else f"{repr(value)[:_MOST_SHOWN]}..."
            keys.refuse(key, f"{shown} is not computed" if key in NEUTRAL else "it is unknown")


def _scale(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    """Accept only a scale of head_dim ** -0.5."""
    usual = values.get("head_dim") or keys.count("embedding_length") // keys.count("attention.head_count")
    if keys.number("attention.scale", 0.0):  # 0 means "not set" in llama.cpp
        keys.expect("attention.scale", usual**-0.5)


def _gemma(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    largest = keys.count("block_count") == _GEMMA_27B_LAYERS[keys.architecture]
    scalar = values["hidden_size"] // values["num_attention_heads"] if largest else values["head_dim"]
    if scale := keys.number("attention.scale", 0.0):
        scalar = max(1, round(scale**-2))
        if not math.isclose(scalar**-0.5, scale, rel_tol=1e-5):
            keys.refuse("attention.scale", f"{scale} is not the inverse root of a whole number")
    values["query_pre_attn_scalar"] = scalar
    # its modules require a number even if no layer has a window
    if values["sliding_window"] is None:
        values["sliding_window"] = values["max_position_embeddings"]
        values["layer_types"] = ["full_attention"] * keys.count("block_count")


def _gemma2(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    _gemma(keys, values, tensors)
    keys.expect("attention.sliding_window_pattern", 2)


def _gemma3(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    """Give layers with a window their own rotary frequencies, which are not scaled."""
    _gemma(keys, values, tensors)
    pattern = keys.whole("attention.sliding_window_pattern")
    if "layer_types" not in values:
        layers = range(keys.count("block_count"))
        if isinstance(pattern, list) and len(pattern) == len(layers):
            windowed = [bool(element) for element in pattern]
        else:
            every = keys.count("attention.sliding_window_pattern", _GEMMA3_PATTERN)
            windowed = [(layer + 1) % every != 0 for layer in layers]
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windowed]
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", _LOCAL_BASE)}
    values["rope_parameters"] = {"full_attention": values["rope_parameters"], "sliding_attention": local}


def _gemma4(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    """Give layers with a window and the others their own heads and rotary frequencies. The others
    may use keys as values, and rotate a part of a head.
    """
    keys.expect("attention.scale", 1.0)
    layers = keys.count("block_count")
    windowed = keys.whole("attention.sliding_window_pattern")
    if not isinstance(windowed, list) or len(windowed) != layers:
        raise keys.error("gemma4.attention.sliding_window_pattern must have a value for each layer")
    counts = keys.whole("attention.head_count_kv")
    counts = counts if isinstance(counts, list) else [counts] * layers
    small, large = ({n for n, w in zip(counts, windowed, strict=True) if bool(w) is kind} for kind in (True, False))
    if len(small) != 1 or len(large) != 1:
        raise keys.error("gemma4.attention.head_count_kv differs between layers of one kind, which is not supported")
    full = [layer for layer, window in enumerate(windowed) if not window]
    alike = not any(f"blk.{layer}.attn_v.weight" in tensors for layer in full)
    if small != large and not alike:
        keys.refuse("attention.head_count_kv", "it differs between layers with values of their own")
    values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windowed]
    values["attention_k_eq_v"] = alike
    values["num_key_value_heads"], values["num_global_key_value_heads"] = small.pop(), large.pop()
    values["head_dim"], values["global_head_dim"] = keys.count("attention.key_length_swa"), values["head_dim"]
    values["rope_parameters"] = {
        "full_attention": _proportional(keys, values["rope_parameters"]),
        "sliding_attention": {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", _LOCAL_BASE)},
    }


def _proportional(keys: Metadata, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of positions whose last pairs are not rotated. The file divides their
    frequencies by a huge number.
    """
    factors = rope.get("long_factor", [1.0])
    rotated = sum(factor == 1.0 for factor in factors)
    known = rope["rope_type"] == "default" or (rope["rope_type"] == "longrope" and rope["attention_factor"] == 1.0)
    if not known or any(factor < _UNROTATED for factor in factors[rotated:]):
        keys.refuse("rope.scaling.type", "only positions that are not scaled are computed")
        return dict(rope)
    part = rotated / len(factors)
    return {"rope_type": "proportional", "partial_rotary_factor": part, "rope_theta": rope["rope_theta"]}


def _mistral3(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    """Ministral 3 scales queries by their position; without that it is Mistral. YaRN's attention
    factor is divided by one of the same form.
    """
    _scale(keys, values, tensors)
    beta = keys.number("attention.temperature_scale", 0.0)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    rope = values["rope_parameters"]
    if multiplier and rope.get("factor", 1.0) > 1.0:
        rope["attention_factor"] /= 0.1 * multiplier * math.log(rope["factor"]) + 1.0
    if not beta:
        values["model_type"] = "mistral"
    elif rope["rope_type"] != "yarn":
        keys.refuse("attention.temperature_scale", "it needs YaRN's original context")
    else:
        rope["llama_4_scaling_beta"] = beta


def _phi3(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    """Set the original context, which has precedence over `rope_parameters` in this class."""
    _scale(keys, values, tensors)
    values["original_max_position_embeddings"] = keys.count(
        "rope.scaling.original_context_length", keys.count("context_length")
    )


def _gpt_oss(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    """Files do not state that the borders of YaRN's frequencies are not rounded, as the model's own
    configuration does.
    """
    _scale(keys, values, tensors)
    values["intermediate_size"] = values.pop("moe_intermediate_size")
    keys.expect("attention.sliding_window_pattern", 2)
    keys.expect("rope.freq_base_swa", values["rope_parameters"]["rope_theta"])
    if values["rope_parameters"]["rope_type"] == "yarn":
        values["rope_parameters"]["truncate"] = False


def _stablelm(keys: Metadata, values: dict[str, Any], tensors: Collection[str]) -> None:
    _scale(keys, values, tensors)
    values["use_qkv_bias"] = any(name.endswith(".attn_q.bias") for name in tensors)
    values["use_parallel_residual"] = not any(name.endswith(".ffn_norm.weight") for name in tensors)


_SPECIALITIES = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "stablelm": _stablelm,
}
"""Conversions for architectures that the tables do not fully describe."""
