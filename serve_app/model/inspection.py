"""Reports how a model would run on this machine (executor, format, memory) without its weights.

It loads a narrow copy with random weights, as the loader does for its checks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from serve_app.checkpoints.gguf_header import GgufHeader
from serve_app.checkpoints.model_files import ModelFiles, check_model, locate_model
from serve_app.errors import ConfigError
from serve_app.model import kv_cache
from serve_app.model.cpu.decoder import CpuDecoder, check_shapes
from serve_app.model.cpu.stored import Blocks
from serve_app.model.executor import ModelExecutor, UnsupportedModelError
from serve_app.model.executors.selection import try_executors
from serve_app.model.executors.transformers import TransformersExecutor
from serve_app.model.facts import ModelFacts
from serve_app.model.families import recognise
from serve_app.model.loader import open_checkpoint, pick_device
from serve_app.model.options import ModelOptions, resolve_dtype
from serve_app.model.quiet import quiet
from serve_app.model.rope import fix_frequencies
from serve_app.model.sources.config_keys import check_quantization, read_config
from serve_app.model.sources.gguf_file import describe, make_config
from serve_app.model.sources.safetensors_files import check_complete, open_safetensors
from serve_app.model.sources.skeleton import empty_text_module, small_copy
from serve_app.model.sources.source_model import SourceModel
from serve_app.model.sources.tensor_names import module_names
from serve_app.model.sources.wrappers import layers_of

_BITS: Mapping[Blocks, float] = {
    Blocks.Q4_0: 4.5,
    Blocks.Q4_1: 5,
    Blocks.Q4_K: 4.5,
    Blocks.Q5_0: 9,
    Blocks.Q5_1: 9,
    Blocks.Q8_0: 9,
    Blocks.Q6_K: 6.6,
    Blocks.BF16: 16,
    Blocks.MXFP4: 4.25,
}
"""Bits per weight on the C kernels in exact mode; all others are widened to 32."""
_INT8_BITS = 9


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model that can be served here.

    name: transformers' class. reason: why transformers' modules are used; empty if kernels are
    used. stored: the dtypes of the files. weight_bytes: an estimate. kv_bytes_per_token: over all
    layers.
    """

    files: ModelFiles
    model_type: str
    name: str
    device: torch.device
    fast: bool
    reason: str
    stored: str
    weight_bytes: int
    kv_bytes_per_token: int
    block_size: int
    max_model_len: int


@torch.inference_mode()
def inspect_model(options: ModelOptions) -> Inspection:
    """Inspect the model, reading only configurations and headers. Raises ConfigError with the
    reason if it cannot be served.
    """
    device = pick_device(options.device)
    files = locate_model(options.model)
    check_model(files, options.max_model_len)
    with quiet():
        return _inspect(files, device, options)


def _inspect(files: ModelFiles, device: torch.device, options: ModelOptions) -> Inspection:
    config = _read_config(files, options)
    dtype = resolve_dtype(options.dtype, config.dtype, device)
    try:
        module, left_out = empty_text_module(config)
    except UnsupportedModelError as error:
        raise ConfigError(f"model {files.name}: {config.model_type} cannot be served: {error}") from error
    try:
        small = small_copy(config)
    except UnsupportedModelError as error:
        raise ConfigError(
            f"model {files.name}: {config.model_type} can only be checked by starting the server: {error}"
        ) from error
    source = SourceModel.take(small.to(device=device, dtype=dtype), files.name, options.max_model_len)
    facts = source.facts.of_whole(module)
    executor, reason = try_executors(source, options, lambda stage, fraction: None)
    fast = not isinstance(executor, TransformersExecutor)
    formats, problem = _formats(files, config, module, left_out, options)
    if fast and (problem := problem or _problem(executor, module, facts)):
        fast, reason = False, problem
    cache_dtype = executor.cache_dtype if fast else dtype
    size = executor.backend.block_size
    return Inspection(
        files=files,
        model_type=config.model_type,
        name=type(module).__name__,
        device=device,
        fast=fast,
        reason="" if fast else reason,
        stored=_stored(files) or str(config.dtype).removeprefix("torch."),
        weight_bytes=_weight_bytes(executor if fast else None, module, formats, dtype),
        kv_bytes_per_token=kv_cache.bytes_per_block(facts.layers, size, cache_dtype) // size,
        block_size=size,
        max_model_len=facts.max_model_len,
    )


def _read_config(files: ModelFiles, options: ModelOptions) -> Any:
    if files.kind != "gguf":
        return read_config(files.source, options.ignore_model_keys, files.commit or "main")
    path = Path(files.source, files.gguf_file or "")
    return make_config(path, describe(path, options.ignore_model_keys)[1])


def _formats(
    files: ModelFiles, config: Any, module: Any, left_out: frozenset[str], options: ModelOptions
) -> tuple[Mapping[str, Blocks], str]:
    """Return the format of each of the module's matrices, and why they cannot be used unchanged, or
    an empty text. Files of a hub are not read.
    """
    try:
        check_quantization(config)
        if files.path is None:
            return {}, ""
        checkpoint = open_checkpoint(files, options)
        if files.kind == "folder":
            checkpoint = checkpoint.renamed(module_names(checkpoint.tensors, module, left_out))
            check_complete(checkpoint, module)
        return {name: Blocks(tensor.blocks) for name, tensor in checkpoint.tensors.items()}, ""
    except UnsupportedModelError as error:
        return {}, str(error)


def _stored(files: ModelFiles) -> str:
    """Return the formats of the files' tensors; empty if they are not known."""
    if files.path is None:
        return ""
    if files.kind == "gguf":
        return ", ".join(sorted({tensor.tensor_type.name for tensor in GgufHeader(files.path).tensors}))
    try:
        tensors = open_safetensors(files.path).tensors.values()
    except UnsupportedModelError:
        return ""
    return ", ".join(sorted({Blocks(tensor.blocks).name for tensor in tensors}))


def _problem(executor: ModelExecutor, module: Any, facts: ModelFacts) -> str:
    """Return why the whole model does not run as its narrow copy does, or an empty text."""
    fix_frequencies(module, facts.max_model_len)
    try:
        record = recognise(module, layers_of(module), facts.layers, facts.max_model_len)
        if isinstance(executor, CpuDecoder):
            check_shapes(record)
    except UnsupportedModelError as error:
        return str(error)
    return ""


def _weight_bytes(
    executor: ModelExecutor | None, module: Any, formats: Mapping[str, Blocks], dtype: torch.dtype
) -> int:
    bits = 0.0
    for name, parameter in module.named_parameters():
        usual = 8.0 * dtype.itemsize
        if isinstance(executor, CpuDecoder):
            usual = _BITS.get(formats.get(name, Blocks.F32), 32)
            if executor.quantization == "int8" and parameter.dim() > 1:
                usual = min(usual, _INT8_BITS)
        bits += usual * parameter.numel()
    return int(bits / 8)
