"""What runs a model's layers: the protocol between `PagedModel` and the three ways to do it.

`TransformersExecutor` runs transformers' own modules, any model and any device; `CpuDecoder` and `GpuDecoder` run
Llama-like models with the C and the Triton kernels. A module of this package for each of the three says when it is
wanted (`demand`), and builds it or says why not (`load`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionBackend, AttentionBatch, LayerCache
from serve_app.model.input_batch import PackedBatch
from serve_app.model.sampling.sampler import PendingSample
from serve_app.model.slot_memory import SlotMemory

OnCapture = Callable[[int, int], None]
"""Called now and then with how many graphs have been captured, and how many there will be."""


class Demand(Enum):
    """Whether the options want an executor for a model: not at all, if it can run the model, or no other."""

    NONE = 0
    OPTIONAL = 1
    REQUIRED = 2


class UnsupportedModelError(Exception):
    """Says in one line why an executor cannot run a model here."""


def torch_build(device: torch.device) -> str:
    """What computes where torch, or Triton, does."""
    if device.type == "cpu":
        return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__} {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """Hidden states [R, hidden] of a launched decode step, which the next one overwrites.

    choose: launches the rest for rows whose logits nothing changes: their tokens, which become part of the history.
    """

    hidden: Tensor
    choose: Callable[[], PendingSample]


class ModelExecutor(Protocol):
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
        """How products are computed: "none", "int8" or "fp8"."""
        ...

    @property
    def build(self) -> str:
        """What computes: equal for builds that give the same numbers."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights that a step reads."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Of all weights, what is mapped from files: needed, though the system calls such memory available."""
        ...

    @property
    def choose(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Samples on the device: token ids int64 [R], negative where there is none, of hidden states [R, hidden] and
        parameters [R, len(Column)]. None where sampling is the host's."""
        ...

    @property
    def likeliest(self) -> Callable[[Tensor], Tensor] | None:
        """The first of the largest logits of hidden states [R, hidden], int64 [R]; -1 where one is not finite. None
        where that is no faster than to look for it among the logits."""
        ...

    def attach(self, caches: Sequence[LayerCache] | None, memory: SlotMemory | None = None) -> None:
        """Use this pool, one cache per layer, and in `decode` this memory; None takes them away."""
        ...

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """Capture all CUDA graphs that steps of up to `max_num_seqs` rows use, so that no request waits for that."""
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states [T, hidden] of T packed tokens; their keys and values are written into the pool. Those that are
        not `batch.wanted` may be anything."""
        ...

    def decode(self, packed: PackedBatch) -> Decoded | None:
        """The same for a step of the engine that is whole in a CUDA graph, if it is: one of single-token rows that all
        sample."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab_size] of hidden states [R, hidden], in the dtype in which they were computed."""
        ...
