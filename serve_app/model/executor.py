"""The executor protocol: an executor runs a model's layers for `PagedModel`.

There are three. `TransformersExecutor` runs transformers' own modules: any model, any device.
`CpuDecoder` and `GpuDecoder` run Llama-like models with the C and the Triton kernels. Each has a
module in `executors`: `demand` decides whether the options call for it, and `load` builds it or
raises the reason why it cannot.
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
"""Called occasionally with the number of captured graphs and their total."""


class Demand(Enum):
    """Whether the options call for an executor.

    NONE: do not use it. OPTIONAL: use it if it can run the model. REQUIRED: no other executor may
    run the model.
    """

    NONE = 0
    OPTIONAL = 1
    REQUIRED = 2


class UnsupportedModelError(Exception):
    """An executor cannot run a model here. The message is the reason, in one line."""


def torch_build(device: torch.device) -> str:
    """Return the `ModelExecutor.build` of executors that compute with torch or Triton."""
    if device.type == "cpu":
        return f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__} {torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """Hidden states [R, hidden] of a launched decode step. The next step overwrites them.

    choose: launches sampling, for rows whose logits are neither changed nor returned. It adds the
    tokens to the history.
    """

    hidden: Tensor
    choose: Callable[[], PendingSample]


class ModelExecutor(Protocol):
    """The layers and the head of one model."""

    @property
    def backend(self) -> AttentionBackend:
        """The attention backend, which defines the block size and the layout of the pool."""
        ...

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in the pool."""
        ...

    @property
    def quantization(self) -> str:
        """How products are computed: "none", "int8" or "fp8"."""
        ...

    @property
    def build(self) -> str:
        """Identifies the code and hardware that compute. Equal builds produce equal numbers."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Size of the weights that a step reads."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights mapped from files. They are in use, although the system counts them as
        available memory.
        """
        ...

    @property
    def choose(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Sample on the device: hidden states [R, hidden] and parameters [R, len(Column)] -> token
        ids int64 [R], negative for rows that failed. None if the host samples.
        """
        ...

    @property
    def likeliest(self) -> Callable[[Tensor], Tensor] | None:
        """Return the index of each row's largest logit: hidden states [R, hidden] -> int64 [R]. The
        first of equal ones; -1 if any logit is not finite. None if it is no faster than searching
        the logits.
        """
        ...

    def attach(self, caches: Sequence[LayerCache] | None, memory: SlotMemory | None = None) -> None:
        """Use this pool, one cache per layer, and `memory` in `decode`. None detaches both."""
        ...

    def capture(self, max_num_seqs: int, on_capture: OnCapture) -> None:
        """Capture all CUDA graphs for steps of up to `max_num_seqs` rows, so that no request waits
        for it.
        """
        ...

    def forward(self, input_ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        """Run the layers: return the hidden states [T, hidden] of T packed tokens, and write their
        keys and values into the pool. Hidden states of tokens not in `batch.wanted` are undefined.
        """
        ...

    def decode(self, packed: PackedBatch) -> Decoded | None:
        """Run `forward` for a whole engine step as one CUDA graph. Return None if the step does not
        qualify: it must have single-token rows only, which all sample.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, vocab_size] of hidden states [R, hidden], in the dtype they were
        computed in.
        """
        ...
