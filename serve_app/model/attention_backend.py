"""The interface of attention over a paged KV pool: a step's batch, and what a backend offers. Decides no layout.

The pool of one layer is a pair of tensors whose shape belongs to the backend; only `block_dim`, the dimension that
counts blocks, is known outside. A *KV slot* is one token's place in the pool: `block_id * block_size + offset`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BlockTable = npt.NDArray[np.int32]
"""Ids of one row's blocks, in order; what follows them has no meaning."""


@dataclass(frozen=True, slots=True)
class ResidentTables:
    """Block tables that stay on the device: int32 [any, B], of which row r of a step has line lines[r]."""

    tables: Tensor
    lines: npt.NDArray[np.int64]


@dataclass(slots=True)
class AttentionBatch:
    """The ragged batch of one step: R rows (sequences) of T packed query tokens in all.

    query_starts: R + 1 offsets; row r owns packed tokens [query_starts[r], query_starts[r + 1]).
    kv_lens: R lengths; tokens of the row in the pool once this step's are written.
    block_tables: int32 [R, B]; the first ceil(kv_len / block_size) ids of a line are the row's blocks. Empty where
    `resident` has them, for a backend that keeps tables.
    kv_slots: int64 [T] on the model's device; where each packed token's key and value go.
    wanted: bool [T]; whose hidden states are read. What an executor returns as the others' is undefined. None: all are.
    """

    query_starts: list[int]
    kv_lens: list[int]
    block_tables: npt.NDArray[np.int32]
    kv_slots: Tensor
    resident: ResidentTables | None = None
    wanted: npt.NDArray[np.bool_] | None = None


def block_matrix(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Tables of different lengths as one matrix, padded with zeros."""
    matrix = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for line, table in zip(matrix, tables, strict=True):
        line[: len(table)] = table
    return matrix


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How one layer attends. `sliding_window` counts the keys a query sees, its own included."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


SCALE_BYTES = 4
"""Of the scale that one head's key or value in int8 has."""


class LayerCache(NamedTuple):
    """Keys and values of one layer, every block of the pool."""

    key: Tensor
    value: Tensor


class AttentionBackend(Protocol):
    """One way to attend over the pool. Stateless: all state lives in the caches and in the step's metadata."""

    name: ClassVar[str]
    block_size: ClassVar[int]
    block_dim: ClassVar[int]
    keeps_tables: ClassVar[bool]
    """Whether it reads block tables that stay on the device."""

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Zeroed pool of `num_blocks` blocks for one layer."""
        ...

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """Compile whatever steps with queries of this dtype may use, so that no request waits for that."""
        ...

    def build(self, batch: AttentionBatch) -> Any:
        """Everything about the step that all layers share; called once per step."""
        ...

    def forward(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, metadata: Any
    ) -> Tensor:
        """Write this step's keys and values into the pool, then attend causally.

        query [num_heads, N, head_dim], key [num_kv_heads, N, head_dim], value [num_kv_heads, N, value_dim], with
        N >= T: tokens from T on are padding, never written, and their output is undefined but finite.
        Returns [N, num_heads, value_dim].
        """
        ...
