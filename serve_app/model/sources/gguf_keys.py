"""Tables of supported and harmless GGUF metadata keys, by architecture, with reasons.

`gguf_config` reads them. A key that is in no table is refused, because it may change the answer.
The facts come from llama.cpp's converters and loaders. Keys under the architecture's prefix are
listed without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SHAPE = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_DECODER = _SHAPE | {"attention.head_count_kv": "num_key_value_heads", "vocab_size": "vocab_size"}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_HEADS = {"attention.key_length": "head_dim"}
_LLAMA = _DECODER | _RMS | _HEADS
_MIXTURE = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_NORMED_EXPERTS = {"expert_weights_norm": "norm_topk_prob"}
_GEMMA = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Maps the metadata of one architecture to transformers' configuration.

    attributes: the configuration's attribute for each key. optional: keys that a file may lack,
    with the attribute's value in that case. partial: the module can rotate a part of each head.
    rotates: it has rotary positions. windowed_heads: layers with a window have heads of another
    width and number. constants: attributes that are fixed in llama.cpp's code and not in the file.
    """

    model_type: str
    attributes: Mapping[str, str]
    optional: Mapping[str, Any]
    partial: bool = False
    rotates: bool = True
    windowed_heads: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)


_ABSENT: Mapping[str, Any] = {"attention.head_count_kv": None, "attention.key_length": None, "vocab_size": None}
"""Values that follow from other keys and from the tensors' shapes."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA, _ABSENT),
    "qwen2": Architecture("qwen2", _LLAMA, _ABSENT),
    "qwen3": Architecture("qwen3", _LLAMA, _ABSENT),
    "qwen3vl": Architecture("qwen3", _LLAMA, _ABSENT),
    "smollm3": Architecture("smollm3", _LLAMA, _ABSENT),
    "mistral3": Architecture("ministral3", _LLAMA, _ABSENT, constants={"sliding_window": None}),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _LLAMA | _MIXTURE | _NORMED_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {**_ABSENT, "expert_weights_norm": False},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", _LLAMA | _MIXTURE | _NORMED_EXPERTS, {**_ABSENT, "expert_weights_norm": True}
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _LLAMA | _MIXTURE | {"attention.sliding_window": "sliding_window"},
        _ABSENT,
    ),
    "phi3": Architecture(
        "phi3",
        _LLAMA | {"attention.sliding_window": "sliding_window"},
        {**_ABSENT, "attention.sliding_window": None},
        partial=True,
    ),
    "gemma2": Architecture(
        "gemma2",
        _LLAMA | _GEMMA,
        {
            **_ABSENT,
            "attention.sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _LLAMA | _GEMMA,
        {
            **_ABSENT,
            "attention.sliding_window": None,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma4": Architecture(
        "gemma4_text",
        _LLAMA
        | {
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        {**_ABSENT, "final_logit_softcapping": None},
        windowed_heads=True,
        constants={"hidden_size_per_layer_input": 0},
    ),
    "stablelm": Architecture(
        "stablelm", _DECODER | {"attention.layer_norm_epsilon": "layer_norm_eps"}, _ABSENT, partial=True
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _DECODER | _HEADS | {"attention.layer_norm_epsilon": "norm_epsilon"},
        _ABSENT,
        constants={"sliding_window": None},
    ),
    "nemotron": Architecture(
        "nemotron", _DECODER | _HEADS | {"attention.layer_norm_epsilon": "norm_eps"}, _ABSENT, partial=True
    ),
    "gpt2": Architecture(
        "gpt2",
        {
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "vocab_size": "vocab_size",
        },
        _ABSENT,
        rotates=False,
    ),
}

_NO_INTERFACE = "its modules do not use transformers' attention interface"
_RECURRENT = "it has layers with a recurrent state or a convolution"
_ENCODER = "it has an encoder"
REFUSED_ARCHITECTURES: Mapping[str, str] = {
    "bloom": _NO_INTERFACE,
    "falcon": _NO_INTERFACE,
    "deci": "its layers have different shapes",
    "gpt_oss": "its files are of the architecture gpt-oss",
    "lfm2": _RECURRENT,
    "mamba": _RECURRENT,
    "qwen35": _RECURRENT,
    "qwen35moe": _RECURRENT,
    "minimax-m2": "its rotary positions and expert scores were not compared with transformers'",
    "minimax_m2": "its files are of the architecture minimax-m2",
    "mistral": "its files are of the architecture llama",
    "qwen2_moe": "its files are of the architecture qwen2moe",
    "qwen3_moe": "its files are of the architecture qwen3moe",
    "t5": _ENCODER,
    "t5encoder": _ENCODER,
    "umt5": _ENCODER,
}
"""Other architectures that transformers' reader accepts, with the reason why they are not served.
"""

HARMLESS: dict[str, str] = {
    "rope.scaling.finetuned": "says how the model was trained; llama.cpp prints it",
    "tensor_data_layout": "all files of one architecture have their rows in one order",
}
"""Keys under the prefix that change no result, with the reason."""
HARMLESS_IN: dict[str, dict[str, str]] = {
    "qwen3vl": {
        "n_deepstack_layers": "about images, which are not served",
        "rope.dimension_sections": "the positions of text are equal on all axes",
    },
    "stablelm": {"use_parallel_residual": "which norms the file has decides, as in llama.cpp"},
}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0, 3),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that are refused if no attribute takes them, unless they have one of these values, which
match the computation.
"""

OTHER_PREFIXES: Mapping[str, str] = {
    "general": "describes the file; architecture, type and alignment are read",
    "tokenizer": "is the tokenizer's",
    "quantize": "says how the file was quantized; each tensor states its own type",
    "imatrix": "says how the file was quantized",
    "mradermacher": "says how the file was quantized",
}
"""First parts of keys other than the architecture's and `split`."""

HARMLESS_TENSORS: Mapping[str, str] = {
    "attn_rot_embd.weight": "rotary frequencies, which the metadata state too",
}
"""By the tensor's name without its layer."""
