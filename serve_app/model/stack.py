"""What runs a model's layers: the protocol between `PagedModel` and the three ways to do it.

`TransformersStack` runs transformers' own modules, any model and any device; `CpuDecoder` and `GpuDecoder` run
Llama-like models with the C and the Triton kernels.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from serve_app.model.attention.base import AttentionBackend, AttentionBatch, LayerCache

OnCapture = Callable[[int, int], None]
"""Told now and then how many graphs there are, of how many."""


class Stack(Protocol):
    """The layers of one model and its head."""

    @property
    def backend(self) -> AttentionBackend:
        """Owns the block size and the layout of the pool."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """Number format of keys and values in the pool."""
        ...

    @property
    def quantization(self) -> str:
        """ "none", "int8" or "fp8"."""
        ...

    def attach(self, caches: Sequence[LayerCache] | None) -> None:
        """Use this pool, one cache per layer; None takes it away."""
        ...

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """Capture all CUDA graphs that steps of up to `max_num_seqs` rows use, so that no request waits for that."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states [T, hidden] of T packed tokens; their keys and values are written into the pool."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of hidden states [R, hidden], in the dtype in which they were computed."""
        ...
