"""The C kernels: Llama-like models in float32 on a CPU."""

from pathlib import Path

import torch

from serve_app.model.cpu.build import KernelsUnavailableError, best_build
from serve_app.model.cpu.decoder import CpuDecoder
from serve_app.model.cpu.ops import Kernels
from serve_app.model.executors.base import Demand, ModelExecutor, UnsupportedModelError
from serve_app.model.llama import recognise
from serve_app.model.options import ModelOptions, Progress
from serve_app.model.source_model import ModelFacts, SourceModel
from serve_app.model.verification import verify_model

NAME = "the CPU kernels"

_EXACT_TOLERANCE = 1e-3
"""Of `verify_model`, for exact mode: it computes the same sums in another order."""
_INT8_TOLERANCE = 0.5
"""The same for int8 mode: enough to see that something is broken; how good it is, is measured elsewhere."""


def demand(facts: ModelFacts, options: ModelOptions) -> Demand:
    """Required when asked for by name, or for what only they can do; else wanted wherever they are faster."""
    if options.attention_backend == "kernels" or options.quantization == "int8":
        return Demand.REQUIRED
    if options.attention_backend != "auto" or options.uses_fp8 or not _computes_here(facts):
        return Demand.NONE
    return Demand.OPTIONAL


def load(source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
    """The model on the C kernels. Raises UnsupportedModelError."""
    facts = source.facts
    if options.attention_backend not in ("auto", "kernels"):
        raise UnsupportedModelError(f"attention_backend is {options.attention_backend}")
    if options.uses_fp8:
        raise UnsupportedModelError("fp8, for weights or the KV cache, needs a GPU")
    if not _computes_here(facts):
        raise UnsupportedModelError(f"they are for float32 on a CPU, not {facts.dtype} on {facts.device}")
    build = best_build()
    if build == "portable" and demand(facts, options) is Demand.OPTIONAL:
        raise UnsupportedModelError("this CPU has no AVX2; torch is faster")
    try:
        llama = recognise(source.head, source.base, facts.layers, facts.max_model_len)
        decoder = CpuDecoder(Kernels(build, Path(options.cache_dir).expanduser()), llama)
    except KernelsUnavailableError as error:
        raise UnsupportedModelError(str(error)) from error
    verify_model(decoder, source.reference, facts.layers, _EXACT_TOLERANCE)
    if options.quantization != "none":
        decoder.quantize()
        verify_model(decoder, source.reference, facts.layers, _INT8_TOLERANCE)
    decoder.release()
    report("optimizing", 1.0)
    report("verifying", 1.0)
    return decoder


def _computes_here(facts: ModelFacts) -> bool:
    return facts.device.type == "cpu" and facts.dtype == torch.float32
