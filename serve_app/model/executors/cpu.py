"""The C kernels: Llama-like models in float32 on a CPU."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from serve_app.model.cpu.build import KernelsUnavailableError, missing_for_faster, usable_builds
from serve_app.model.cpu.decoder import CpuDecoder
from serve_app.model.cpu.ops import Kernels
from serve_app.model.cpu.stored import Parameters
from serve_app.model.executors.base import Demand, ModelExecutor, UnsupportedModelError
from serve_app.model.llama import recognise
from serve_app.model.options import ModelOptions, Progress
from serve_app.model.source_model import ModelFacts, SourceModel
from serve_app.model.verification import check_finite, verify_model

logger = logging.getLogger(__name__)

NAME = "the CPU kernels"

_EXACT_TOLERANCE = 1e-3
"""Of `verify_model`, for exact mode: it computes the same sums in another order."""
_INT8_TOLERANCE = 0.5
"""The same for int8 mode: enough to see that something is broken; how good it is, is measured elsewhere."""


def demand(facts: ModelFacts, options: ModelOptions) -> Demand:
    """Required when asked for by name, or for what only they can do; else wanted wherever they are faster."""
    return demand_on(facts.device, facts.dtype, options)


def demand_on(device: torch.device, dtype: torch.dtype, options: ModelOptions) -> Demand:
    """The same before anything is known of a model."""
    if options.attention_backend == "kernels" or options.quantization == "int8":
        return Demand.REQUIRED
    if options.attention_backend != "auto" or options.uses_fp8 or not _computes_on(device, dtype):
        return Demand.NONE
    return Demand.OPTIONAL


def load(source: SourceModel, options: ModelOptions, report: Progress) -> ModelExecutor:
    """The model on the C kernels. Raises UnsupportedModelError."""
    decoder = _verified(source, _kernels(source.facts, options), options)
    report("optimizing", 1.0)
    report("verifying", 1.0)
    return decoder


def load_mapped(
    source: SourceModel, module: Any, parameters: Parameters, options: ModelOptions, report: Progress
) -> ModelExecutor:
    """A model whose weights `parameters` reads, for `module` has none. source: the small copy of it, on which the
    kernels are verified. Raises UnsupportedModelError, and ConfigError for weights that are not finite."""
    kernels = _kernels(source.facts, options)
    _verified(source, kernels, options)
    report("verifying", 1.0)
    decoder = CpuDecoder(
        kernels,
        recognise(module, module.base_model, source.facts.layers, source.facts.max_model_len),
        int8=options.quantization != "none",
        parameters=parameters,
        on_progress=lambda fraction: report("loading weights", fraction),
    )
    check_finite(decoder, source.facts.name, source.facts.vocab_size, source.facts.layers)
    return decoder


def _kernels(facts: ModelFacts, options: ModelOptions) -> Kernels:
    """Compiled, and allowed by the options. Raises UnsupportedModelError."""
    if options.attention_backend not in ("auto", "kernels"):
        raise UnsupportedModelError(f"attention_backend is {options.attention_backend}")
    if options.uses_fp8:
        raise UnsupportedModelError("fp8, for weights or the KV cache, needs a GPU")
    if not _computes_on(facts.device, facts.dtype):
        raise UnsupportedModelError(f"they are for float32 on a CPU, not {facts.dtype} on {facts.device}")
    builds = usable_builds()
    if demand(facts, options) is Demand.OPTIONAL:
        builds.remove("portable")
    if not builds:
        raise UnsupportedModelError("this CPU has no AVX2; torch is faster")
    return _fastest(builds, Path(options.cache_dir).expanduser())


def _fastest(builds: Sequence[str], cache_dir: Path) -> Kernels:
    """Of the first build that the compiler can make, which may be older than the CPU. Raises UnsupportedModelError."""
    failures: dict[str, str] = {}
    for build in builds:
        try:
            kernels = Kernels(build, cache_dir)
        except KernelsUnavailableError as error:
            failures[build] = str(error)
            continue
        reasons = {name: f"no {', '.join(sets)}" for name, sets in missing_for_faster(build).items() if sets} | failures
        slower = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        logger.info("the CPU kernels run in the build %s%s", build, f" (not {slower})" if slower else "")
        return kernels
    raise UnsupportedModelError(next(iter(failures.values())))


def _verified(source: SourceModel, kernels: Kernels, options: ModelOptions) -> CpuDecoder:
    """The source's weights in the mode of the options; exact mode is always tried."""
    layers = source.facts.layers
    llama = recognise(source.head, source.base, layers, source.facts.max_model_len)
    decoder = CpuDecoder(kernels, llama, int8=False)
    verify_model(decoder, source.reference, layers, _EXACT_TOLERANCE)
    if options.quantization != "none":
        decoder = CpuDecoder(kernels, llama, int8=True)
        verify_model(decoder, source.reference, layers, _INT8_TOLERANCE)
    return decoder


def _computes_on(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32
