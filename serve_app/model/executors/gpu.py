"""The Triton kernels, on a GPU. Triton is not installed everywhere, so it is imported only in
`load`.
"""

import torch

from serve_app.model.attention.verification import verify_backend
from serve_app.model.executor import Demand, ModelExecutor, UnsupportedModelError
from serve_app.model.facts import ModelFacts
from serve_app.model.families import recognise
from serve_app.model.options import KernelOptions, ModelOptions, Progress
from serve_app.model.sources.source_model import SourceModel
from serve_app.model.verification import TOLERANCE, verify_model

NAME = "the GPU kernels"

_FP8_CAPABILITY = (8, 9)
_FP8_TOLERANCE = 1.0
"""Tolerance of `verify_model` for products or a KV cache in fp8, whose numbers have 4 significant
bits. The difference is up to 0.34 with the default model's weights, emulated on a CPU.
"""


def demand(facts: ModelFacts, options: ModelOptions) -> Demand:
    """Required for fp8 and for deterministic products on a GPU, which only these kernels support.
    Otherwise optional on every GPU.
    """
    if options.uses_fp8:
        return Demand.REQUIRED
    if options.attention_backend != "triton" and (options.attention_backend != "auto" or facts.device.type != "cuda"):
        return Demand.NONE
    return Demand.OPTIONAL if options.kernel_options == KernelOptions() else Demand.REQUIRED


def load(source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
    """Build the model on the Triton kernels. Raises UnsupportedModelError."""
    _check_options(source.facts, options)
    try:
        decoder = _build(source, options)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a kernel may raise anything on untested hardware
        raise UnsupportedModelError(str(error)) from error
    report("optimizing", 1.0)
    report("verifying", 1.0)
    return decoder


def _build(source: SourceModel, options: ModelOptions) -> ModelExecutor:
    from serve_app.model.gpu.attention import TritonAttention
    from serve_app.model.gpu.decoder import GpuDecoder

    facts, kernels = source.facts, options.kernel_options
    backend = TritonAttention(deterministic=kernels.deterministic)
    if problem := verify_backend(backend, facts.layers, facts.dtype, facts.device):
        raise UnsupportedModelError(problem)
    record = recognise(source.head, source.base, facts.layers, facts.max_model_len)
    fp8 = options.quantization == "fp8"
    tolerance = TOLERANCE[facts.dtype]
    if options.uses_fp8:  # without fp8 first: its noise would hide most errors
        verify_model(GpuDecoder(record, backend, facts.max_model_len), source.reference, facts.layers, tolerance)
        tolerance = _FP8_TOLERANCE
    decoder = GpuDecoder(record, backend, facts.max_model_len, fp8=fp8, fp8_cache=kernels.fp8_cache)
    verify_model(decoder, source.reference, facts.layers, tolerance)
    return decoder


def _check_options(facts: ModelFacts, options: ModelOptions) -> None:
    """Raise UnsupportedModelError if the device does not support fp8, or if another backend is
    configured.
    """
    if options.attention_backend not in ("auto", "triton"):
        raise UnsupportedModelError(f"attention_backend is {options.attention_backend}")
    if not options.uses_fp8:
        return
    if facts.device.type == "cuda":
        capability = torch.cuda.get_device_capability(facts.device)
        if capability < _FP8_CAPABILITY:
            name = torch.cuda.get_device_name(facts.device)
            raise UnsupportedModelError(f"fp8 (weights or KV cache) requires a newer GPU than {name} {capability}")
    elif options.attention_backend != "triton":
        raise UnsupportedModelError(f"fp8 (weights or KV cache) requires a GPU; the model runs on {facts.device}")
