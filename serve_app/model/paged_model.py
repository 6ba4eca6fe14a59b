"""The engine's interface to a model: packed rows in, logits and tokens out, over a paged KV pool.

Owns the pool. The executor runs the layers, and the sampler chooses tokens.
"""

import gc
from collections.abc import Sequence

import torch
from torch import Tensor

from serve_app.core.sampling_params import Pooling
from serve_app.core.step_cost import ModelCost
from serve_app.core.step_plan import BlockCopy
from serve_app.model import kv_cache
from serve_app.model.attention_backend import AttentionBatch
from serve_app.model.executor import Decoded, ModelExecutor, OnCapture
from serve_app.model.facts import ModelFacts
from serve_app.model.input_batch import PackedBatch
from serve_app.model.sampling.rows import SamplingRows
from serve_app.model.sampling.sampler import PendingSample
from serve_app.model.slot_memory import SlotMemory
from serve_app.model.token_samplers import DeviceSampler, TokenSampler, wide_logits


class PagedModel:
    """A model ready to serve. Built by `load_model` or `from_module`."""

    def __init__(
        self, facts: ModelFacts, executor: ModelExecutor, sampler: TokenSampler, pooling: Pooling = "last"
    ) -> None:
        """pooling: the default for embedding requests."""
        self.pooling = pooling
        self.facts, self.executor = facts, executor
        self.name, self.device, self.dtype = facts.name, facts.device, facts.dtype
        self.max_model_len, self.vocab_size = facts.max_model_len, facts.vocab_size
        self.hidden_size, self.eos_token_ids = facts.hidden_size, facts.eos_token_ids
        self._sampler = sampler
        self._cache: kv_cache.KVCache | None = None

    @property
    def block_size(self) -> int:
        """Tokens per KV block, defined by the attention backend."""
        return self.executor.backend.block_size

    @property
    def keeps_tables(self) -> bool:
        """Whether attention reads block tables that stay on the device."""
        return self.executor.backend.keeps_tables

    @property
    def samples_on_device(self) -> bool:
        """Whether sampled tokens stay on the device until the host requests them."""
        return isinstance(self._sampler, DeviceSampler)

    @property
    def sampler(self) -> str:
        """Class name of the sampler."""
        return type(self._sampler).__name__

    @property
    def attention_backend(self) -> str:
        """Name of the selected backend."""
        return self.executor.backend.name

    @property
    def quantization(self) -> str:
        """How the products are computed: "none", "int8" or "fp8"."""
        return self.executor.quantization

    @property
    def build(self) -> str:
        """Identifies the code and hardware that compute; see `ModelExecutor`."""
        return self.executor.build

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in the pool."""
        return self.executor.cache_dtype

    @property
    def cost(self) -> ModelCost:
        """Bytes and operations that steps require."""
        return ModelCost(
            weight_bytes=self.executor.weight_bytes,
            kv_bytes=self.kv_bytes_per_block() // self.block_size,
            layer_weights=self.facts.layer_weights,
            head_weights=self.facts.head_weights,
            pair_flops=sum(2 * layer.num_heads * (layer.head_dim + layer.value_dim) for layer in self.facts.layers),
        )

    @property
    def mapped_bytes(self) -> int:
        """See `ModelExecutor`."""
        return self.executor.mapped_bytes

    def kv_bytes_per_block(self) -> int:
        """Return the size of one KV block over all layers, in bytes."""
        return kv_cache.bytes_per_block(self.facts.layers, self.block_size, self.executor.cache_dtype)

    def allocate_kv_cache(self, num_blocks: int, memory: SlotMemory | None = None) -> None:
        """Allocate the pool (zeroed; block 0 is the null block), replacing an earlier one. memory:
        used by `decode`.

        Raises ConfigError if there is not enough memory.
        """
        # Free the old pool first: both may not fit.
        self._cache = None
        self.executor.attach(None)
        self.release_unused_memory()
        executor = self.executor
        self._cache = kv_cache.KVCache(
            executor.backend, self.facts.layers, num_blocks, executor.cache_dtype, self.device
        )
        executor.attach(self._cache.layers, memory)

    def release_unused_memory(self) -> None:
        """Return the GPU memory that torch has cached since loading and warming up."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """Capture the CUDA graphs for steps of up to `max_num_seqs` rows, if any, and compile the
        sampling kernels for the head's dtype. Requires an allocated pool.
        """
        self._allocated()
        self.executor.capture(max_num_seqs, on_capture)
        if isinstance(self._sampler, DeviceSampler):
            self._sampler.warm_up(torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole KV blocks in every layer."""
        self._allocated().copy_blocks(copies)

    def decode(self, packed: PackedBatch) -> Decoded | None:
        """See `ModelExecutor.decode`. Also returns None if the host samples."""
        return self.executor.decode(packed) if self.samples_on_device else None

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Return the hidden states [T, hidden] of the packed tokens, and write their keys and
        values into the pool. input_ids, positions: int64 [T].
        """
        with self._allocated().in_use:
            return self.executor.forward(input_ids, positions, batch)

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden states [R, hidden]; float32, or float64 for a
        float64 model.
        """
        return wide_logits(self.executor, hidden)

    def sample(self, hidden: Tensor, rows: SamplingRows, history: Tensor | None) -> PendingSample:
        """Sample one token per row of hidden states [R, hidden]. Does not wait for a GPU. history:
        see `TokenSampler`.
        """
        return self._sampler(hidden, rows, history)

    def _allocated(self) -> kv_cache.KVCache:
        if self._cache is None:
            raise RuntimeError("call allocate_kv_cache() first")
        return self._cache
