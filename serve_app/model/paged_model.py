"""A causal LM that runs over packed rows and a paged KV pool.

Decides which stack runs the layers: for Llama-like models the C kernels in float32 on a CPU, the Triton kernels on a
GPU; transformers' own modules for all others. Whichever it is has to reproduce the untouched model's numbers before it
may serve.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from serve_app.core.output import BlockCopy
from serve_app.core.step_cost import ModelCost
from serve_app.errors import ConfigError
from serve_app.model import kv_cache
from serve_app.model.attention import registry
from serve_app.model.attention.base import AttentionBatch
from serve_app.model.cpu.build import KernelsUnavailableError, best_build
from serve_app.model.cpu.decoder import CpuDecoder
from serve_app.model.cpu.llama import NotLlamaError, recognise
from serve_app.model.cpu.ops import Kernels
from serve_app.model.fusion import watch_inputs
from serve_app.model.input_batch import SamplingRows
from serve_app.model.probe import Probe
from serve_app.model.sampler import PendingSample, sample
from serve_app.model.stack import OnCapture, Stack
from serve_app.model.transformers_stack import TransformersStack, split

if TYPE_CHECKING:
    from serve_app.model.gpu.decoder import GpuDecoder

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

_KERNELS, _TRITON = "kernels", "triton"
_QUANTIZATIONS = ("auto", "none", "int8", "fp8")
_FP8_CAPABILITY = (8, 9)

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.5}
"""Largest accepted difference of the probe's logits from the model's own, as a part of their standard deviation.
(transformers computes softmax and norms in float32 whatever the dtype.)"""
_EXACT_TOLERANCE = 1e-3
"""The same for the C kernels in exact mode, which compute the same sums in another order."""
_INT8_TOLERANCE = 0.5
"""The same for their int8 mode: enough to see that something is broken; how good it is, is measured elsewhere."""

_FP8_TOLERANCE = 1.0
"""The same for weights or a KV cache in fp8, whose numbers have 4 significant bits."""


@dataclass(frozen=True, slots=True)
class GpuForm:
    """How the Triton kernels compute. deterministic: a row's bits do not depend on the rows beside it (as they never do
    on a CPU). fp8_cache: keys and values in 8 bits."""

    deterministic: bool = False
    fp8_cache: bool = False


DEFAULT_FORM = GpuForm()


class PagedModel:
    """The engine's view of a model. Built by `load_model` or `from_module`.

    Takes `module` over. Raises ConfigError for a model that cannot be served this way.
    """

    def __init__(
        self,
        module: Any,
        *,
        name: str,
        cache_dir: Path,
        max_model_len: int | None = None,
        attention_backend: str = "auto",
        quantization: str = "none",
        gpu_form: GpuForm = DEFAULT_FORM,
        on_progress: Progress | None = None,
    ) -> None:
        report = on_progress or (lambda stage, fraction: None)
        parameter = next(module.parameters())
        self.name = name
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.max_model_len = _max_model_len(module.config, max_model_len)
        self.eos_token_ids = _eos_token_ids(module)
        self._num_weights = _count_weights(module)
        self._cache: kv_cache.KVCache | None = None
        if quantization not in _QUANTIZATIONS:
            raise ConfigError(f"quantization: unknown name {quantization!r}; known: {', '.join(_QUANTIZATIONS)}")
        if quantization == "fp8" or gpu_form.fp8_cache:
            self._check_fp8(attention_backend)
        with torch.inference_mode():
            probe = Probe.of(module, name)
            self.vocab_size = probe.expected[0].shape[1]
            base, hidden = split(module)
            with watch_inputs(base) as seen:
                calls = registry.discover(base, probe.ids[0])
            _check_layers(name, module.config, calls)
            self._layers = [layer for _, layer in calls]
            report("optimizing", 0.0)
            self._gpu = None
            decoder: Stack | None = self._cpu_decoder(module, base, probe, cache_dir, attention_backend, quantization)
            if decoder is None:
                decoder = self._gpu = self._gpu_decoder(module, base, probe, attention_backend, quantization, gpu_form)
            if decoder is not None:
                self._stack = decoder
                self._samples_on_device = self._can_sample_on_device()
                report("optimizing", 1.0)
                report("probing", 1.0)
                return
            backend = registry.pick_backend(attention_backend, self._layers, self.dtype, self.device)
            self._stack = TransformersStack(
                module, base, hidden, calls, seen, backend, lambda fraction: report("optimizing", fraction)
            )
            report("probing", 0.0)
            difference = probe.difference(self._stack, self._layers)
            report("probing", 1.0)
            if not difference <= TOLERANCE[self.dtype]:
                raise ConfigError(
                    f"model {name}: {type(module).__name__} cannot be served: packed with another sequence its "
                    f"logits differ by {difference:.2g} standard deviations from the sequence run alone"
                )
            self._samples_on_device = self._can_sample_on_device()

    @property
    def block_size(self) -> int:
        """Tokens per KV block; the attention backend's choice."""
        return self._stack.backend.block_size

    @property
    def attention_backend(self) -> str:
        """Name of the backend that was picked."""
        return self._stack.backend.name

    @property
    def quantization(self) -> str:
        """How the products are computed: "none", "int8" or "fp8"."""
        return self._stack.quantization

    @property
    def token_cost(self) -> float:
        """What one more token adds to a step of few, as a part of its time; measured on one core, default model."""
        if self.attention_backend != _KERNELS:
            return 0.05  # reading the weights takes the time
        return 0.1 if self.quantization == "int8" else 0.25

    @property
    def cost(self) -> ModelCost:
        """What steps must read and compute."""
        layers, head = self._num_weights
        stack = self._stack
        itemsize = 1 if self.quantization == "fp8" else self.dtype.itemsize
        return ModelCost(
            weight_bytes=stack.weight_bytes if isinstance(stack, CpuDecoder) else (layers + head) * itemsize,
            kv_bytes=self.kv_bytes_per_block() // self.block_size,
            layer_weights=layers,
            head_weights=head,
            pair_flops=sum(2 * layer.num_heads * (layer.head_dim + layer.value_dim) for layer in self._layers),
        )

    def kv_bytes_per_block(self) -> int:
        """Memory of one KV block over all layers, in bytes."""
        return kv_cache.bytes_per_block(self._layers, self.block_size, self._stack.cache_dtype)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the pool (zeroed; block 0 is the null block), replacing an earlier one.

        Raises ConfigError when the memory cannot be had.
        """
        # Before the new pool is allocated: both would not fit.
        self._cache = None
        self._stack.attach(None)
        if self.device.type == "cuda":
            # What loading and warming up left in torch's hands is free too.
            gc.collect()
            torch.cuda.empty_cache()
        stack = self._stack
        self._cache = kv_cache.KVCache(stack.backend, self._layers, num_blocks, stack.cache_dtype, self.device)
        stack.attach(self._cache.layers)

    @torch.inference_mode()
    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """Capture the CUDA graphs that steps of up to `max_num_seqs` rows use, if any. The pool comes first."""
        self._allocated()
        self._stack.capture(max_num_seqs, on_capture)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole KV blocks in every layer."""
        self._allocated().copy_blocks(copies)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states [T, hidden] of the packed tokens (input_ids, positions: int64 [T]); their keys and values
        are written into the pool on the way."""
        self._allocated()
        return self._stack.forward(input_ids, positions, batch)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of hidden states [R, hidden]; float32, or float64 for a float64 model."""
        logits = self._stack.compute_logits(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.inference_mode()
    def sample(self, hidden: Tensor, rows: SamplingRows, history: Tensor) -> PendingSample:
        """One token for each row of hidden states [R, hidden]; on a GPU, without waiting for it. history: int32
        [slots, positions] on the device, where slots with penalties have their tokens."""
        if not self._samples_on_device:
            return sample(self.compute_logits(hidden), rows.slots, self.eos_token_ids)
        from serve_app.model.gpu import sampling

        if self._gpu is not None and rows.is_plain:
            return sampling.sample_plain(hidden, rows.parameters, self._gpu.choose)
        return sampling.sample(self.compute_logits(hidden), rows, history, self.eos_token_ids)

    def _allocated(self) -> kv_cache.KVCache:
        if self._cache is None:
            raise RuntimeError("allocate_kv_cache comes first")
        return self._cache

    def _cpu_decoder(
        self, head: Any, base: Any, probe: Probe, cache_dir: Path, attention_backend: str, quantization: str
    ) -> CpuDecoder | None:
        """The model on the C kernels. None, with one line in the log, where transformers' modules have to run it.

        Raises ConfigError when the kernels were asked for by name.
        """
        if quantization == "fp8":
            return None
        wanted = attention_backend == _KERNELS or quantization == "int8"
        if not wanted and (attention_backend != "auto" or self.device.type != "cpu" or self.dtype != torch.float32):
            return None
        try:
            if attention_backend not in ("auto", _KERNELS):
                raise KernelsUnavailableError(f"attention_backend is {attention_backend}")
            if self.device.type != "cpu" or self.dtype != torch.float32:
                raise KernelsUnavailableError(f"they are for float32 on a CPU, not {self.dtype} on {self.device}")
            build = best_build()
            if build == "portable" and not wanted:
                raise KernelsUnavailableError("this CPU has no AVX2; torch is faster")
            llama = recognise(head, base, self._layers, self.max_model_len)
            decoder = CpuDecoder(Kernels(build, cache_dir), llama)
            self._check(probe, decoder, _EXACT_TOLERANCE)
            if quantization != "none":
                decoder.quantize()
                self._check(probe, decoder, _INT8_TOLERANCE)
        except (KernelsUnavailableError, NotLlamaError) as error:
            if wanted:
                raise ConfigError(f"model {self.name}: the CPU kernels cannot run it: {error}") from error
            logger.warning("model %s: runs without the CPU kernels: %s", self.name, error)
            return None
        decoder.release()
        return decoder

    def _gpu_decoder(
        self, head: Any, base: Any, probe: Probe, attention_backend: str, quantization: str, form: GpuForm
    ) -> "GpuDecoder | None":
        """The model on the Triton kernels. None, with one line in the log, where transformers' modules have to run it;
        their attention may still be the Triton kernel.

        Raises ConfigError when something was asked for that only these kernels can do.
        """
        fp8 = quantization == "fp8"
        if attention_backend != _TRITON and (attention_backend != "auto" or self.device.type != "cuda"):
            return None
        try:
            from serve_app.model.gpu.attention import TritonAttention
            from serve_app.model.gpu.decoder import GpuDecoder

            backend = TritonAttention(deterministic=form.deterministic)
            if problem := registry.probe(backend, self._layers, self.dtype, self.device):
                raise NotLlamaError(problem)
            llama = recognise(head, base, self._layers, self.max_model_len)
            decoder = GpuDecoder(llama, backend, self.max_model_len, fp8=fp8, fp8_cache=form.fp8_cache)
            self._check(probe, decoder, _FP8_TOLERANCE if fp8 or form.fp8_cache else TOLERANCE[self.dtype])
        except Exception as error:  # a kernel may do whatever it likes on hardware that it was not tried on
            if fp8 or form != DEFAULT_FORM:
                raise ConfigError(f"model {self.name}: the GPU kernels cannot run it: {error}") from error
            logger.warning("model %s: runs without the fused kernels: %s", self.name, error)
            return None
        return decoder

    def _check_fp8(self, attention_backend: str) -> None:
        """Raise ConfigError where there is nothing that computes with numbers of 8 bits."""
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            if capability < _FP8_CAPABILITY:
                name = torch.cuda.get_device_name(self.device)
                raise ConfigError(f"fp8, for weights or the KV cache, needs a newer GPU than {name} {capability}")
        elif attention_backend != _TRITON:
            raise ConfigError(f"fp8, for weights or the KV cache, needs a GPU; the model runs on {self.device}")

    def _can_sample_on_device(self) -> bool:
        """Whether there are kernels for it that choose the right tokens. They compute in float32."""
        if self.dtype == torch.float64 or (self.attention_backend != _TRITON and self.device.type != "cuda"):
            return False
        try:
            from serve_app.model.gpu import sampling

            problem = "" if sampling.agrees(self.vocab_size, self.device) else "they choose other tokens"
        except Exception as error:  # as above
            problem = str(error)
        if problem:
            logger.warning("model %s: runs without the sampling kernels: %s", self.name, problem)
        return not problem

    def _check(self, probe: Probe, decoder: Stack, tolerance: float) -> None:
        difference = probe.difference(decoder, self._layers)
        if not difference <= tolerance:
            raise NotLlamaError(f"its logits would differ by {difference:.2g} standard deviations")


def _check_layers(name: str, config: Any, calls: list[tuple[nn.Module, Any]]) -> None:
    expected = config.get_text_config().num_hidden_layers
    modules = {id(module) for module, _ in calls}
    if len(calls) != expected or len(modules) != expected:
        raise ConfigError(
            f"model {name}: {config.model_type} cannot be served: {len(modules)} of its {expected} layers use "
            "transformers' attention interface, all must"
        )


def _count_weights(module: Any) -> tuple[int, int]:
    """Numbers in the layers, and in the head; of an embedding few rows are read."""
    total = sum(parameter.numel() for parameter in module.parameters())
    embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    return total - embedding.numel() - (0 if head is embedding else head.numel()), head.numel()


def _max_model_len(config: Any, wanted: int | None) -> int:
    limit: int | None = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None:
        if limit is None:
            raise ConfigError("max_model_len: the model does not tell its context length; set it")
        return limit
    if wanted < 1 or (limit is not None and wanted > limit):
        raise ConfigError(f"max_model_len: {wanted} is not between 1 and the model's context length of {limit}")
    return wanted


def _eos_token_ids(module: Any) -> tuple[int, ...]:
    for config in (module.generation_config, module.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
