"""The C kernels, in float32 or bfloat16 on a CPU."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from serve_app.model.cpu.build import KernelsUnavailableError, missing_for_faster, usable_builds
from serve_app.model.cpu.decoder import CpuDecoder
from serve_app.model.cpu.ops import Arithmetic, Kernels
from serve_app.model.executor import Demand, ModelExecutor, UnsupportedModelError
from serve_app.model.facts import ModelFacts
from serve_app.model.families import recognise
from serve_app.model.options import ModelOptions, Progress
from serve_app.model.sources.blueprint import Blueprint
from serve_app.model.sources.mapped_checkpoint import MappedCheckpoint, MappedParameters
from serve_app.model.verification import check_finite, verify_model

if TYPE_CHECKING:
    from serve_app.model.sources.source_model import SourceModel  # imports transformers' modules

logger = logging.getLogger(__name__)

NAME = "the CPU kernels"

_TOLERANCE = {Arithmetic.EXACT: 2e-4, Arithmetic.INT8: 0.2, Arithmetic.BFLOAT16: 0.2}
"""Tolerance of `verify_model`. Exact mode computes the same sums in another order. In the other
modes this only detects broken results; their quality is measured elsewhere.
"""


def demand(facts: ModelFacts, options: ModelOptions) -> Demand:
    """Required if requested by name or for int8. Otherwise optional wherever the kernels are
    faster.
    """
    return demand_on(facts.device, facts.dtype, options)


def demand_on(device: torch.device, dtype: torch.dtype, options: ModelOptions) -> Demand:
    """Return the demand before the model's other facts are known."""
    if options.attention_backend == "kernels" or options.quantization == "int8":
        return Demand.REQUIRED
    if options.attention_backend != "auto" or options.uses_fp8 or not _computes_on(device, dtype):
        return Demand.NONE
    return Demand.OPTIONAL


def load(source: "SourceModel", options: ModelOptions, report: Progress) -> ModelExecutor:
    """Build the model on the C kernels. Raises UnsupportedModelError."""
    decoder = verify(source, pick_kernels(source.facts.device, source.facts.dtype, options), options)
    report("optimizing", 1.0)
    report("verifying", 1.0)
    return decoder


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """See `Target`. The narrow copy is computed in float32 whatever the dtype."""

    kernels: Kernels
    dtype: torch.dtype
    options: ModelOptions
    device = torch.device("cpu")
    reference_dtype = torch.float32

    @classmethod
    def of(cls, dtype: torch.dtype, options: ModelOptions) -> "CpuTarget":
        """Compile the kernels. Raises UnsupportedModelError."""
        return cls(pick_kernels(cls.device, dtype, options), dtype, options)

    @property
    def build(self) -> str:
        """See `Target`."""
        return self.kernels.library

    def verify(self, small: "SourceModel") -> None:
        """See `Target`."""
        verify(small, self.kernels, self.options)

    def load(self, blueprint: Blueprint, checkpoint: MappedCheckpoint, report: Progress) -> ModelExecutor:
        """See `Target`."""
        facts = blueprint.facts
        decoder = CpuDecoder(
            self.kernels,
            blueprint.record,
            arithmetic=_arithmetic(facts.dtype, self.options),
            parameters=MappedParameters(checkpoint, blueprint.parameters),
            cache_dir=Path(self.options.cache_dir).expanduser(),
            report=report,
        )
        check_finite(decoder, facts.name, facts.vocab_size, facts.layers)
        return decoder


def pick_kernels(device: torch.device, dtype: torch.dtype, options: ModelOptions) -> Kernels:
    """Return compiled kernels that the options allow. Raises UnsupportedModelError."""
    if options.attention_backend not in ("auto", "kernels"):
        raise UnsupportedModelError(f"attention_backend is {options.attention_backend}")
    if options.uses_fp8:
        raise UnsupportedModelError("fp8 (weights or KV cache) requires a GPU")
    if not _computes_on(device, dtype):
        raise UnsupportedModelError(f"they support float32 and bfloat16 on a CPU, not {dtype} on {device}")
    if dtype == torch.bfloat16 and options.quantization == "int8":
        raise UnsupportedModelError("int8 requires dtype float32, not bfloat16")
    optional = demand_on(device, dtype, options) is Demand.OPTIONAL
    builds = [build for build in usable_builds() if build != "portable" or not optional]
    if not builds:
        raise UnsupportedModelError("this CPU has no AVX2; torch is faster")
    kernels = _fastest(builds, Path(options.cache_dir).expanduser())
    if dtype == torch.bfloat16 and not kernels.multiplies_bfloat16:
        raise UnsupportedModelError(f"bfloat16 requires AVX512-BF16; the best build here is {kernels.build}")
    return kernels


def _fastest(builds: Sequence[str], cache_dir: Path) -> Kernels:
    """Return the first build that the compiler supports: it may be older than the CPU. Raises
    UnsupportedModelError.
    """
    failures: dict[str, str] = {}
    for build in builds:
        try:
            kernels = Kernels(build, cache_dir)
        except KernelsUnavailableError as error:
            failures[build] = str(error)
            continue
        reasons = {name: f"no {', '.join(sets)}" for name, sets in missing_for_faster(build).items() if sets} | failures
        slower = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        logger.info("CPU kernels: build %s%s", build, f" (not {slower})" if slower else "")
        return kernels
    raise UnsupportedModelError(next(iter(failures.values())))


def verify(source: "SourceModel", kernels: Kernels, options: ModelOptions) -> CpuDecoder:
    """Build and verify a decoder of the source's weights in the configured mode. If these are
    float32, exact mode is verified first.

    Raises UnsupportedModelError if the kernels cannot run the model or its logits differ.
    """
    layers = source.facts.layers
    record = recognise(source.head, source.base, layers, source.facts.max_model_len)
    wanted = _arithmetic(source.facts.dtype, options)
    exact = (Arithmetic.EXACT,) if record.embedding.dtype == torch.float32 else ()
    for arithmetic in dict.fromkeys((*exact, wanted)):
        decoder = CpuDecoder(kernels, record, arithmetic=arithmetic)
        typical = record.has_experts and arithmetic is not Arithmetic.EXACT
        verify_model(decoder, source.reference, layers, _TOLERANCE[arithmetic], typical=typical)
    return decoder


def _arithmetic(dtype: torch.dtype, options: ModelOptions) -> Arithmetic:
    if dtype == torch.bfloat16:
        return Arithmetic.BFLOAT16
    return Arithmetic.EXACT if options.quantization == "none" else Arithmetic.INT8


def _computes_on(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
