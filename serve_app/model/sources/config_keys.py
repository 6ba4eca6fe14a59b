"""A folder's config.json: each key is used by transformers' configuration, harmless, or refused.

transformers keeps unknown keys as attributes that nothing reads. A key counts as used if the
configuration's class declares it or converts it to another attribute.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from serve_app.errors import ConfigError, one_line
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.sources.refused_keys import check_refused

HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout",
            "embd_pdrop", "embedding_dropout", "gradient_checkpointing", "gradient_checkpointing_use_reentrant",
            "hidden_dropout", "hidden_dropout_prob", "initializer_factor", "initializer_range", "layerdrop",
            "resid_pdrop", "residual_dropout", "router_aux_loss_coef",
        ),
        "of training",
    ),
    **dict.fromkeys(
        (
            "_name_or_path", "is_llama_config", "license", "model_name", "name", "original_architecture",
            "unsloth_fixed", "unsloth_version",
        ),
        "about the file's origin",
    ),
    **dict.fromkeys(
        (
            "_attn_implementation_autoset", "_flash_attn_2_enabled", "attn_implementation", "cache_implementation",
            "flash_attn", "keys_to_ignore_at_inference", "output_router_logits", "pretraining_tp",
            "transformers.js_config", "use_cache", "use_flash_attn",
        ),
        "about how programs compute or return the same result",
    ),
    **dict.fromkeys(
        (
            "head_dim", "intermediate_size", "max_seq_len", "max_seq_length", "max_sequence_length",
            "model_max_length", "model_type", "n_ctx", "num_heads", "seq_length", "tokenizer_model_max_length",
            "torch_dtype",
        ),
        "follows from the weights' shapes or another key",
    ),
    **dict.fromkeys(
        (
            "bos_token", "bos_token_id", "chat_template", "eos_token", "eos_token_id", "pad_token", "pad_token_id",
            "prefix", "sep_token_id", "task_specific_params", "tokenizer_class", "unk_token_id",
        ),
        "about tokens and pipelines; read elsewhere or unused",
    ),
    "auto_map": "names code in the folder, which is never run",
    "max_window_layers": "only applies with `use_sliding_window`",
    "quantization_config": "transformers' quantizers read it, or refuse it",
    "_sliding_window_pattern": "`layer_types` states it",
    "sliding_window_pattern": "only applies with `sliding_window`",
}  # fmt: skip
"""Keys that change no result in a class that does not use them, with the reason."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "activation": ("swiglu",),
    "attention_bias": (False,),
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
"""Keys that are refused in a class that does not use them, unless they have one of these values."""
_ALIASES = {
    "activation_function": "hidden_act",
    "hidden_act": "hidden_activation",
    "layer_norm_epsilon": "norm_epsilon",
}
"""Older names of keys, with the newer name. The older one is ignored if both are given."""

_ROPE_KEYS: Mapping[str, Collection[str]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "proportional": ("factor", "partial_rotary_factor"),
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim",
        "original_max_position_embeddings", "truncate",
    ),
    "longrope": ("attention_factor", "factor", "long_factor", "original_max_position_embeddings", "short_factor"),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip
"""The keys that transformers uses for each type of rotary positions."""
GENERATION: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers", "exponential_decay_length_penalty",
            "force_words_ids", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "stop_strings",
            "suppress_tokens", "watermarking_config",
        ),
        ([], {}, ""),
    ),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), (1,)),
    **dict.fromkeys(
        (
            "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_length", "min_new_tokens",
            "no_repeat_ngram_size", "penalty_alpha",
        ),
        (0,),
    ),
    "token_healing": (False,),
    "num_beams": (1,),
}  # fmt: skip
"""Keys of generation_config.json that change answers, with their neutral values. Parameters of
requests (temperature, `top_p`, `repetition_penalty`, ...) are not listed: each request sets them.
"""
_EVERY_ROPE = {"rope_theta", "rope_type", "type", "finetuned"}
_ROPE = ("rope_scaling", "rope_parameters")
_NEUTRAL_ROPE: Mapping[str, tuple[Any, ...]] = {"partial_rotary_factor": (1.0,)}


def read_config(source: str, ignored: Collection[str], commit: str = "main") -> Any:
    """Return transformers' configuration of a folder or a hub id. ignored: the setting
    `ignore_model_keys`.

    Raises ConfigError if it cannot be read, is not a causal LM's, or has unused keys.
    """
    try:
        written, _ = PretrainedConfig.get_config_dict(source, revision=commit)
        config = AutoConfig.from_pretrained(source, revision=commit, trust_remote_code=False)
        refused = {**dict(_refused(written, config)), **dict(_refused_generation(Path(source)))}
    except Exception as error:  # transformers' validators and readers may raise anything
        raise ConfigError(f"model: cannot load {source}: {one_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"model: {source} is an encoder-decoder model ({config.model_type}), not a causal LM")
    check_refused(f"{source}/config.json", refused, ignored)
    return config


def _refused_generation(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield key and reason of unsupported settings in a folder's generation_config.json."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    written = json.loads(path.read_text())
    for key, neutral in GENERATION.items():
        value = written.get(key) if isinstance(written, dict) else None
        if value is not None and value not in neutral:
            yield f"generation_config.{key}", "it is not applied to the logits"


def _refused(written: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key and reason of each refused key."""
    kind = type(config)
    declared = {field.name for field in fields(kind)} | {*kind.attribute_map, *kind.attribute_map.values()}
    text = config.get_text_config()
    for key, value in written.items():
        if isinstance(value, Mapping) and text is not config and getattr(config, key, None) is text:
            yield from _refused(value, text, f"{prefix}{key}.")
        elif value is None or key in declared or _taken_over(key, config) or _says_nothing(key, written):
            continue
        elif not _computed(key, written, kind):
            yield f"{prefix}{key}", f"{kind.__name__} does not use it"
    for name, parameters in _rope_parameters(config):
        yield from _refused_rope(f"{prefix}{name}", parameters, kind)


def _taken_over(key: str, config: Any) -> bool:
    """Whether the class converts the key to another attribute. Unknown keys stay attributes."""
    if key in (*_ROPE, "rope_theta", "partial_rotary_factor"):
        return "rope_parameters" in {field.name for field in fields(type(config))}
    return key not in vars(config)


def _computed(key: str, written: Mapping[str, Any], kind: Any) -> bool:
    """Whether the class sets the attribute itself, to the same value. transformers saves those."""
    alone = kind.from_dict({name: value for name, value in written.items() if name != key})
    return key in vars(alone) and vars(alone)[key] == written[key]


def _says_nothing(key: str, written: Mapping[str, Any]) -> bool:
    return key in HARMLESS or written[key] in NEUTRAL.get(key, ()) or _ALIASES.get(key) in written


def _rope_parameters(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and parameters: one set, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    for key, value in nested.items():
        yield f"rope_parameters.{key}", value
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
    """Return the additional keys that the class uses: it has defaults for them, or exempts them
    from transformers' check.
    """
    usual = getattr(kind(), "rope_parameters", None) or {}
    nested = {key for value in usual.values() if isinstance(value, Mapping) for key in value}
    return {*usual, *nested, *(kind.ignore_keys_at_rope_validation or ())}


def check_quantization(config: Any) -> None:
    """Raise UnsupportedModelError for weights in a format that is not read from the files
    unchanged.
    """
    quantization: Any = getattr(config, "quantization_config", None) or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    if quantization and method != "mxfp4":
        raise UnsupportedModelError(f"its weights are quantized ({method})")
