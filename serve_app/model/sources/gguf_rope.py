"""Converts the rotary positions of a GGUF file, from metadata and tensors, to transformers'
`rope_parameters`.

llama.cpp multiplies a position by the pair's frequency and 1 / factor. It divides by the pair's
number in `rope_freqs.weight` (Llama 3.1), or in `rope_factors_long` or `_short` (Phi 3.5). It
multiplies cosine and sine by the attention factor.
"""

import math
from collections.abc import Mapping
from typing import Any

from serve_app.checkpoints.gguf_header import TensorInfo
from serve_app.model.sources.gguf_metadata import Metadata

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_TYPES = ("none", "linear", "yarn", "longrope")
_BASE = 10_000.0


def rope_parameters(
    keys: Metadata, tensors: Mapping[str, TensorInfo], head_dim: int, *, partial: bool
) -> dict[str, Any]:
    """Return transformers' parameters of layers with full attention. partial: the module can rotate
    a part of a head.

    Raises ConfigError for tensors whose length is not half the rotated width.
    """
    rotated = keys.count("rope.dimension_count", head_dim)
    if rotated != head_dim and not (partial and rotated < head_dim):
        keys.refuse("rope.dimension_count", f"{rotated} of a head's {head_dim} dimensions cannot be rotated")
        rotated = head_dim
    scaling = _scaling(keys, tensors, rotated)
    parameters = {"rope_theta": keys.number("rope.freq_base", _BASE), **scaling}
    if partial:
        parameters["partial_rotary_factor"] = _part(rotated, head_dim)
    return parameters


def _scaling(keys: Metadata, tensors: Mapping[str, TensorInfo], rotated: int) -> dict[str, Any]:
    kind, factor = _kind_and_factor(keys)
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    context = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    yarn = _yarn(keys, factor, attention_factor)
    long, short = (_factors(keys, tensors, name, rotated) for name in (LONG, SHORT))
    divided = _factors(keys, tensors, FREQUENCIES, rotated)
    if kind == "longrope" and long is None:
        keys.refuse("rope.scaling.type", f"longrope requires the tensor {LONG}")
    if kind == "yarn":
        if long is not None or divided is not None:
            keys.refuse("rope.scaling.type", "yarn with frequency factors is not supported")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context, **yarn}
    if long is None and divided is None and attention_factor == 1.0:
        return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    ones = divided or [1.0] * (rotated // 2)
    return {
        "rope_type": "longrope",  # transformers' type with a number per pair
        "short_factor": [factor * number for number in short or ones],
        "long_factor": [factor * number for number in long or ones],
        "factor": 1.0,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": context,
    }


def _kind_and_factor(keys: Metadata) -> tuple[str, float]:
    """Return type and factor as in llama.cpp: a factor without a type is linear, and a factor of 0
    means none.
    """
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    if kind not in _TYPES:
        keys.refuse("rope.scaling.type", f"{kind!r} is not known; known: {', '.join(_TYPES)}")
        return "none", 1.0
    if factor < 0:
        keys.refuse("rope.scaling.factor", f"{factor} is negative")
    return kind, 1.0 if kind == "none" else factor


def _yarn(keys: Metadata, factor: float, attention_factor: float) -> dict[str, Any]:
    """Read the YaRN keys for any type: other types ignore them."""
    extrapolation = keys.number("rope.scaling.yarn_ext_factor", 1.0)
    # llama.cpp reads a negative number as "not set"
    if extrapolation >= 0 and extrapolation != 1.0:
        keys.refuse("rope.scaling.yarn_ext_factor", f"{extrapolation}: only 1 is computed")
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return {
        "attention_factor": attention_factor * keys.number("rope.scaling.yarn_attn_factor", usual),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _factors(keys: Metadata, tensors: Mapping[str, TensorInfo], name: str, rotated: int) -> list[float] | None:
    if name not in tensors:
        return None
    keys.use_tensor(name)
    numbers: list[float] = tensors[name].data.reshape(-1).astype(float).tolist()
    if len(numbers) != rotated // 2:
        raise keys.error(
            f"{name} must contain {rotated // 2} numbers, one per rotated pair of a head, got {len(numbers)}"
        )
    return numbers


def _part(rotated: int, head_dim: int) -> float:
    """Return the fraction of a head that transformers rounds to exactly `rotated` dimensions."""
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else math.nextafter(part, 1.0)
