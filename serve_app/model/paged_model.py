"""A causal LM that runs over packed rows and a paged KV pool.

Decides which stack runs the layers: for Llama-like models the C kernels in float32 on a CPU, the Triton kernels on a
GPU; transformers' own modules for all others. Whichever it is has to reproduce the untouched model's numbers before it
may serve.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from serve_app.core.output import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model import kv_cache
from serve_app.model.attention import registry
from serve_app.model.attention.base import AttentionBatch
from serve_app.model.cpu.build import KernelsUnavailableError, best_build
from serve_app.model.cpu.decoder import CpuDecoder
from serve_app.model.cpu.llama import NotLlamaError, recognise
from serve_app.model.cpu.ops import Kernels
from serve_app.model.fusion import watch_inputs
from serve_app.model.input_batch import Slot
from serve_app.model.probe import Probe
from serve_app.model.sampler import PendingSample, sample
from serve_app.model.stack import Stack
from serve_app.model.transformers_stack import TransformersStack, split

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

_KERNELS, _TRITON = "kernels", "triton"
_QUANTIZATIONS = ("auto", "none", "int8")

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.5}
"""Largest accepted difference of the probe's logits from the model's own, as a part of their standard deviation.
(transformers computes softmax and norms in float32 whatever the dtype.)"""
_EXACT_TOLERANCE = 1e-3
"""The same for the C kernels in exact mode, which compute the same sums in another order."""
_INT8_TOLERANCE = 0.5
"""The same for their int8 mode: enough to see that something is broken; how good it is, is measured elsewhere."""


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
        on_progress: Progress | None = None,
    ) -> None:
        report = on_progress or (lambda stage, fraction: None)
        parameter = next(module.parameters())
        self.name = name
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.max_model_len = _max_model_len(module.config, max_model_len)
        self.eos_token_ids = _eos_token_ids(module)
        self._cache: kv_cache.KVCache | None = None
        if quantization not in _QUANTIZATIONS:
            raise ConfigError(f"quantization: unknown name {quantization!r}; known: {', '.join(_QUANTIZATIONS)}")
        with torch.inference_mode():
            probe = Probe.of(module, name)
            self.vocab_size = probe.expected[0].shape[1]
            base, hidden = split(module)
            with watch_inputs(base) as seen:
                calls = registry.discover(base, probe.ids[0])
            _check_layers(name, module.config, calls)
            self._layers = [layer for _, layer in calls]
            report("optimizing", 0.0)
            decoder: Stack | None = self._cpu_decoder(module, base, probe, cache_dir, attention_backend, quantization)
            if decoder is None:
                decoder = self._gpu_decoder(module, base, probe, attention_backend)
            if decoder is not None:
                self._stack = decoder
                self._sample = self._sampler()
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
            if not difference <= _TOLERANCE[self.dtype]:
                raise ConfigError(
                    f"model {name}: {type(module).__name__} cannot be served: packed with another sequence its "
                    f"logits differ by {difference:.2g} standard deviations from the sequence run alone"
                )
            self._sample = self._sampler()

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
        """How the products are computed: "none" or "int8"."""
        return self._stack.quantization

    @property
    def graph_sizes(self) -> Sequence[int]:
        """Numbers of rows for which decode steps are captured when first run, ascending."""
        return self._stack.graph_sizes

    @property
    def token_cost(self) -> float:
        """What one more token adds to a step of few, as a part of its time; measured on one core, default model."""
        if self.attention_backend != _KERNELS:
            return 0.05  # reading the weights takes the time
        return 0.1 if self.quantization == "int8" else 0.25

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
        stack = self._stack
        self._cache = kv_cache.KVCache(stack.backend, self._layers, num_blocks, stack.cache_dtype, self.device)
        stack.attach(self._cache.layers)

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
    def sample(self, hidden: Tensor, slots: Sequence[Slot]) -> PendingSample:
        """One token for each row of hidden states [R, hidden], of which row i continues slots[i]. On a GPU, without
        waiting for it."""
        return self._sample(self.compute_logits(hidden), slots, self.eos_token_ids)

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

    def _gpu_decoder(self, head: Any, base: Any, probe: Probe, attention_backend: str) -> Stack | None:
        """The model on the Triton kernels. None, with one line in the log, where transformers' modules have to run it;
        their attention may still be the Triton kernel."""
        if attention_backend != _TRITON and (attention_backend != "auto" or self.device.type != "cuda"):
            return None
        try:
            from serve_app.model.gpu.decoder import GpuDecoder

            if problem := registry.probe(GpuDecoder.backend, self._layers, self.dtype, self.device):
                raise NotLlamaError(problem)
            decoder = GpuDecoder(recognise(head, base, self._layers, self.max_model_len), self.max_model_len)
            self._check(probe, decoder, _TOLERANCE[self.dtype])
        except Exception as error:  # a kernel may do whatever it likes on hardware that it was not tried on
            logger.warning("model %s: runs without the fused kernels: %s", self.name, error)
            return None
        return decoder

    def _sampler(self) -> Callable[[Tensor, Sequence[Slot], Sequence[int]], PendingSample]:
        """Sampling where the logits are, if there are kernels for it that give the right tokens; else on the host."""
        if self.attention_backend != _TRITON:
            return sample
        from serve_app.model.gpu import sampling

        try:
            if sampling.agrees(self.vocab_size, self.device):
                return sampling.sample
            problem = "they choose other tokens"
        except Exception as error:  # as above
            problem = str(error)
        logger.warning("model %s: runs without the sampling kernels: %s", self.name, problem)
        return sample

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
