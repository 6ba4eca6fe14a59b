"""Tiny random transformers models, one per architecture, for tests, and what tests of the CPU
kernels need."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.checkpoints.model_files import CACHE_DIR
from serve_app.model.attention_backend import LayerCache
from serve_app.model.cpu.build import find_compiler, usable_builds
from serve_app.model.loader import from_module
from serve_app.model.paged_model import PagedModel
from serve_app.model.sources.skeleton import scale_queries

needs_compiler = pytest.mark.skipif(
    find_compiler() is None, reason="there is no C compiler (cc, gcc or clang) for the CPU kernels"
)
needs_bfloat16 = pytest.mark.skipif("avx512bf16" not in usable_builds(), reason="this CPU has no AVX512-BF16")

KERNEL_MODES = ("none", "int8", pytest.param("bfloat16", marks=needs_bfloat16))
"""For `in_mode`."""

VOCAB_SIZE = 200
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GQA: dict[str, Any] = {**_SHAPE, "num_key_value_heads": 2}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "gpt2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "llama": ("llama", _GQA),
    "qwen2": ("qwen2", _GQA),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 32}),
    "mistral": ("mistral", {**_GQA, "sliding_window": 24}),
    "gemma2": ("gemma2", {**_GQA, "head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {**_GQA, "head_dim": 32, "sliding_window": 24, "num_hidden_layers": 7}),
    "gemma4": (
        "gemma4_text",
        {
            **_GQA,
            "head_dim": 32,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4_small": (
        "gemma4_text",
        {
            **_GQA,
            "head_dim": 32,
            "global_head_dim": 64,
            "sliding_window": 24,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "smollm3": ("smollm3", {**_GQA, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]}),
    "phi": ("phi", _SHAPE),
    "phi3": ("phi3", {**_GQA, "original_max_position_embeddings": 512}),
    "olmo2": ("olmo2", _GQA),
    "gpt_neox": ("gpt_neox", _SHAPE),
    "opt": ("opt", {**_SHAPE, "ffn_dim": 128, "word_embed_proj_dim": 64}),
}
ARCHITECTURES = tuple(_CONFIGS)
_MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**_GQA, "num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_GQA, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
MIXTURES_OF_EXPERTS = tuple(_MIXTURES)
"""Not for float64, in which torch has no products of grouped rows."""
_MIXTURES["gpt_oss"] = (
    "gpt_oss",
    {
        **_GQA,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "sliding_window": 24,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
    },
)


def tiny_model(arch: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Any:
    """A random causal LM of this architecture in eval mode: vocabulary 200, context 512, 2 layers
    (Gemma 3 and 4, SmolLM 3: 4 to 7).

    Weights are spread more widely than at initialization, so that logits differ clearly between
    tokens. Norms, biases and persistent buffers are random too. changes: of the configuration.
    """
    model_type, values = {**_CONFIGS, **_MIXTURES}[arch]
    config = AutoConfig.for_model(model_type, **{**values, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in filter(torch.is_floating_point, model.state_dict().values()):
            noise = torch.randn(tensor.shape, generator=generator).to(dtype) * 0.1
            tensor.copy_(noise if tensor.dim() > 1 else tensor + noise)
        scale_queries(model)
    return model.eval()


def in_mode(mode: str, module: Any, **options: Any) -> PagedModel:
    """`module` on the C kernels, in one of their modes."""
    if mode == "bfloat16":
        return from_module(module.bfloat16(), attention_backend="kernels", **options)
    return from_module(module, attention_backend="kernels", quantization=mode, **options)


def poison(cache: LayerCache, block_dim: int = 0, first_block: int = 0) -> None:
    """What no token of a sequence has written must not be used: NaN from `first_block` on. In int8
    the keys' scales are NaN; the values', which are always finite, are 8e37."""
    for pool, byte in zip(cache, (-1, 0x7E), strict=True):
        pool.movedim(block_dim, 0)[first_block:].fill_(byte if pool.dtype == torch.int8 else torch.nan)


def own_cache(folder: Path) -> str:
    """A `cache_dir` in `folder` that is empty but for the compiled kernels, which are
    everybody's."""
    cache, kernels = folder / "cache", CACHE_DIR.expanduser() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    cache.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process may be making the same
        (cache / "kernels").symlink_to(kernels)
    return str(cache)
