"""The Triton kernels, on a GPU. Triton is not installed everywhere, so it is imported only in
`load`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from serve_app.errors import ConfigError, one_line
from serve_app.model.attention.verification import verify_backend
from serve_app.model.device_memory import refuse_beyond_memory
from serve_app.model.executor import Demand, ModelExecutor, UnsupportedModelError, torch_build
from serve_app.model.facts import ModelFacts
from serve_app.model.families import recognise
from serve_app.model.options import KernelOptions, ModelOptions, Progress
from serve_app.model.sources.blueprint import Blueprint
from serve_app.model.sources.mapped_checkpoint import MappedCheckpoint, MappedParameters
from serve_app.model.verification import TOLERANCE, check_finite, verify_model

if TYPE_CHECKING:
    from serve_app.model.gpu.decoder import GpuDecoder
    from serve_app.model.sources.source_model import SourceModel  # imports transformers' modules

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
    return demand_on(facts.device, options)


def demand_on(device: torch.device, options: ModelOptions) -> Demand:
    """Return the demand before the model's other facts are known."""
    if options.uses_fp8:
        return Demand.REQUIRED
    if options.attention_backend != "triton" and (options.attention_backend != "auto" or device.type != "cuda"):
        return Demand.NONE
    return Demand.OPTIONAL if options.kernel_options == KernelOptions() else Demand.REQUIRED


def load(source: "SourceModel", options: ModelOptions, report: Progress) -> ModelExecutor:
    """Build the model on the Triton kernels. Raises UnsupportedModelError."""
    decoder = verify(source, options)
    report("optimizing", 1.0)
    report("verifying", 1.0)
    return decoder


def verify(source: "SourceModel", options: ModelOptions) -> "GpuDecoder":
    """Build and verify a decoder of the source's weights. Before fp8, the model's own dtype is
    verified too. Raises UnsupportedModelError.
    """
    _check_options(source.facts.device, options)
    with _failures_of_kernels():
        return _verify(source, options)


@contextmanager
def _failures_of_kernels() -> Iterator[None]:
    """Raise UnsupportedModelError for what a kernel may raise on untested hardware. A lack of
    memory is no such failure.
    """
    try:
        yield
    except (UnsupportedModelError, ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModelError(one_line(error)) from error


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """See `Target`. The narrow copy is verified on the device, in the model's dtype."""

    device: torch.device
    dtype: torch.dtype
    options: ModelOptions

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype, options: ModelOptions) -> "GpuTarget":
        """Raise UnsupportedModelError if the device cannot do what the options require."""
        _check_options(device, options)
        return cls(device, dtype, options)

    @property
    def reference_dtype(self) -> torch.dtype:
        """See `Target`."""
        return self.dtype

    @property
    def build(self) -> str:
        """See `Target`."""
        try:
            triton = version("triton")
        except PackageNotFoundError as error:
            raise UnsupportedModelError(str(error)) from error
        return f"{torch_build(self.device)} triton {triton} {self.options.kernel_options}"

    def verify(self, small: "SourceModel") -> None:
        """See `Target`."""
        verify(small, self.options)

    def load(self, blueprint: Blueprint, checkpoint: MappedCheckpoint, report: Progress) -> ModelExecutor:
        """See `Target`."""
        from serve_app.model.gpu.attention import TritonAttention
        from serve_app.model.gpu.decoder import GpuDecoder
        from serve_app.model.gpu.weights import MappedWeights, bytes_needed

        facts, record, kernels = blueprint.facts, blueprint.record, self.options.kernel_options
        fp8 = self.options.quantization == "fp8"
        parameters = MappedParameters(checkpoint, blueprint.parameters)
        needed = bytes_needed(record, facts.dtype, fp8=fp8)
        with refuse_beyond_memory(facts.name, needed, self.device), _failures_of_kernels():
            decoder = GpuDecoder(
                record,
                TritonAttention(deterministic=kernels.deterministic),
                facts.max_model_len,
                weights=MappedWeights(parameters, self.device, facts.dtype),
                fp8=fp8,
                fp8_cache=kernels.fp8_cache,
                report=lambda fraction: report("loading weights", fraction),
            )
            check_finite(decoder, facts.name, facts.vocab_size, facts.layers)
        return decoder


def _verify(source: "SourceModel", options: ModelOptions) -> "GpuDecoder":
    from serve_app.model.gpu.attention import TritonAttention
    from serve_app.model.gpu.decoder import GpuDecoder

    facts, kernels = source.facts, options.kernel_options
    backend = TritonAttention(deterministic=kernels.deterministic)
    # The reference has no sinks; the whole model's check covers them.
    plain = [replace(layer, sinks=False) for layer in facts.layers]
    if problem := verify_backend(backend, plain, facts.dtype, facts.device):
        raise UnsupportedModelError(problem)
    record = recognise(source.head, source.base, facts.layers, facts.max_model_len)
    fp8 = options.quantization == "fp8"
    tolerance = TOLERANCE[facts.dtype]
    typical = record.has_experts and facts.dtype != torch.float32
    if options.uses_fp8:  # without fp8 first: its noise would hide most errors
        wide = GpuDecoder(record, backend, facts.max_model_len)
        verify_model(wide, source.reference, facts.layers, tolerance, typical=typical)
        del wide
        typical = record.has_experts
        tolerance = _FP8_TOLERANCE
    decoder = GpuDecoder(record, backend, facts.max_model_len, fp8=fp8, fp8_cache=kernels.fp8_cache)
    verify_model(decoder, source.reference, facts.layers, tolerance, typical=typical)
    return decoder


def _check_options(device: torch.device, options: ModelOptions) -> None:
    """Raise UnsupportedModelError if the device does not support fp8, or if another backend is
    configured.
    """
    if options.attention_backend not in ("auto", "triton"):
        raise UnsupportedModelError(f"attention_backend is {options.attention_backend}")
    if not options.uses_fp8:
        return
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            raise UnsupportedModelError(f"fp8 (weights or KV cache) requires a newer GPU than {name} {capability}")
    elif options.attention_backend != "triton":
        raise UnsupportedModelError(f"fp8 (weights or KV cache) requires a GPU; the model runs on {device}")
