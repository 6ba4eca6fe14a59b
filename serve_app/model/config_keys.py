"""A folder's config.json: each key is used by transformers' configuration, harmless, or refused.

transformers keeps keys that it does not know as attributes, and nothing reads them. A key counts as used if the
configuration's class declares it or takes it over into another attribute.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from serve_app.errors import ConfigError
from serve_app.model.refused_keys import check_refused

_TRAINING = "of training"
_ORIGIN = "of where the file comes from"
_OUTPUTS = "of what transformers returns"
_STATED = "the weights' shapes or another key state it"
_ENGINE = "of how another engine computes the same"
HARMLESS: Mapping[str, str] = {
    "_attn_implementation_autoset": _ENGINE,
    "_flash_attn_2_enabled": _ENGINE,
    "attention_probs_dropout_prob": _TRAINING,
    "attn_implementation": _ENGINE,
    "auto_map": "names code of the folder, which is never run",
    "cache_implementation": _ENGINE,
    "dropout": _TRAINING,
    "embd_pdrop": _TRAINING,
    "flash_attn": _ENGINE,
    "gradient_checkpointing": _TRAINING,
    "gradient_checkpointing_use_reentrant": _TRAINING,
    "head_dim": _STATED,
    "hidden_dropout": _TRAINING,
    "initializer_factor": _TRAINING,
    "initializer_range": _TRAINING,
    "is_llama_config": _ORIGIN,
    "keys_to_ignore_at_inference": _OUTPUTS,
    "license": _ORIGIN,
    "max_sequence_length": _STATED,
    "max_window_layers": "counts only where `use_sliding_window` is true, whose class declares it",
    "model_max_length": _STATED,
    "model_name": _ORIGIN,
    "n_ctx": _STATED,
    "name": _ORIGIN,
    "original_architecture": _ORIGIN,
    "output_router_logits": _OUTPUTS,
    "pretraining_tp": _ENGINE,
    "quantization_config": "transformers' quantizers read it, or refuse it",
    "resid_pdrop": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    "seq_length": _STATED,
    "task_specific_params": "parameters of generation, which requests contain",
    "tokenizer_class": "is the tokenizer's",
    "tokenizer_model_max_length": _STATED,
    "torch_dtype": _STATED,
    "transformers.js_config": _ENGINE,
    "unsloth_fixed": _ORIGIN,
    "unsloth_version": _ORIGIN,
    "use_cache": _ENGINE,
    "use_flash_attn": _ENGINE,
}
"""Keys that change no result in a class that does not use them, with the reason."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0, 0.0),
    "attention_softmax_in_fp32": (True,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "is_decoder": (True, False),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "mlp_type": ("default",),
    "norm_type": ("layer_norm", "rms_norm"),
    "qk_layernorm": (False,),
    "rope_interleaved": (False,),
    "scale_attention_softmax_in_fp32": (True,),
    "scale_attn_weights": (True,),
    "sliding_window": (None,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}
"""Keys that are refused in a class that does not use them, but for these values."""
_ALIASES = {"activation_function": "hidden_act", "hidden_act": "hidden_activation", "layer_norm_epsilon": "norm_epsilon"}
"""Older names, which the class of some models ignores for the name beside it, which the file has too or the class
fixes."""

_ROPE_KEYS: Mapping[str, Collection[str]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "proportional": ("factor",),
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim",
        "original_max_position_embeddings", "truncate",
    ),
    "longrope": ("attention_factor", "factor", "long_factor", "original_max_position_embeddings", "short_factor"),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip
"""By the type of rotary positions, what transformers computes with."""
_EVERY_ROPE = {"rope_theta", "rope_type", "type", "finetuned"}
_ROPE = ("rope_scaling", "rope_parameters")
_NEUTRAL_ROPE: Mapping[str, tuple[Any, ...]] = {"partial_rotary_factor": (1.0,)}


def read_config(source: str, ignored: Collection[str], commit: str = "main") -> Any:
    """transformers' configuration of a folder or a hub id. ignored: the setting `ignore_model_keys`.

    Raises ConfigError for what cannot be read, is no causal LM's, or has keys that are not used.
    """
    try:
        written, _ = PretrainedConfig.get_config_dict(source, revision=commit)
        config = AutoConfig.from_pretrained(source, revision=commit, trust_remote_code=False)
        refused = dict(_refused(written, config))
    except Exception as error:  # transformers raises whatever its validators and readers raise; here it all means this
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"model: cannot load {source}: {reason}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model: {source} is an encoder-decoder model ({config.model_type}), not a causal LM")
    check_refused(f"{source}/config.json", refused, ignored)
    return config


def _refused(written: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Key and reason."""
    kind = type(config)
    declared = {field.name for field in fields(kind)} | kind.attribute_map.keys()
    text = config.get_text_config()
    for key, value in written.items():
        if isinstance(value, Mapping) and text is not config and getattr(config, key, None) is text:
            yield from _refused(value, text, f"{prefix}{key}.")
        elif value is not None and not (key in declared or _taken_over(key, config) or _says_nothing(key, value, config)):
            yield f"{prefix}{key}", f"{kind.__name__} does not use it"
    for name, parameters in _rope_parameters(config):
        yield from _refused_rope(f"{prefix}{name}", parameters, kind)


def _taken_over(key: str, config: Any) -> bool:
    """Whether the class has made another attribute of it. What it does not know, it keeps."""
    if key in (*_ROPE, "rope_theta", "partial_rotary_factor"):
        return "rope_parameters" in {field.name for field in fields(type(config))}
    return key not in vars(config)


def _says_nothing(key: str, value: Any, config: Any) -> bool:
    used = _ALIASES.get(key)
    return key in HARMLESS or value in NEUTRAL.get(key, ()) or (used is not None and hasattr(config, used))


def _rope_parameters(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and parameters: one set, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = config.nested_rope_parameter_keys(parameters)
    for key in nested:
        if parameters[key] is not None:
            yield f"rope_parameters.{key}", parameters[key]
    if parameters and not nested:
        yield "rope_parameters", parameters


def _refused_rope(name: str, parameters: Mapping[str, Any], kind: type) -> Iterator[tuple[str, str]]:
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _ROPE_KEYS:
        yield f"{name}.rope_type", f"{rope_type!r} is not known; known: {', '.join(_ROPE_KEYS)}"
        return
    known = {*_EVERY_ROPE, *_ROPE_KEYS[rope_type], *_own_rope_keys(kind)}
    for key, value in parameters.items():
        if key not in known and value is not None and value not in _NEUTRAL_ROPE.get(key, ()):
            yield f"{name}.{key}", f"{kind.__name__} does not use it with rope_type {rope_type!r}"


def _own_rope_keys(kind: Any) -> Collection[str]:
    """What the class computes with besides: it has defaults for these, or exempts them from transformers' check."""
    usual = getattr(kind(), "rope_parameters", None) or {}
    return {*usual, *(kind.ignore_keys_at_rope_validation or ())}
