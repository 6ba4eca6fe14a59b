"""The interface of attention over a paged KV pool: the batch of a step, and the backend protocol.

The pool of one layer is a pair of tensors. The backend defines their shape; callers know only
`block_dim`, the dimension that counts blocks. A *KV slot* is the position of one token in the pool:
`block_id * block_size + offset`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BlockTable = npt.NDArray[np.int32]
"""Ids of one row's blocks, in order. Entries after the row's last block are undefined."""


@dataclass(frozen=True, slots=True)
class ResidentTables:
    """Block tables kept on the device: int32 [any, B]. Row r of a step uses line lines[r]."""

    tables: Tensor
    lines: npt.NDArray[np.int64]


@dataclass(slots=True)
class AttentionBatch:
    """The ragged batch of one step: R rows (sequences) with T packed query tokens in total.

    query_starts: R + 1 offsets; row r owns packed tokens [query_starts[r], query_starts[r + 1]).
    kv_lens: R lengths; each row's tokens in the pool after this step's tokens are written.
    block_tables: int32 [R, B]; the first ceil(kv_len / block_size) ids of a line are the row's
    blocks. Empty if `resident` is set, for a backend that keeps tables.
    kv_slots: int64 [T] on the model's device; the KV slot of each packed token.
    wanted: bool [T]; the tokens whose hidden states are needed; an executor may return anything for
    the others. None: all tokens.
    """

    query_starts: list[int]
    kv_lens: list[int]
    block_tables: npt.NDArray[np.int32]
    kv_slots: Tensor
    resident: ResidentTables | None = None
    wanted: npt.NDArray[np.bool_] | None = None


def block_matrix(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Stack tables of different lengths into one matrix, padded with zeros."""
    matrix = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for line, table in zip(matrix, tables, strict=True):
        line[: len(table)] = table
    return matrix


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Shape and parameters of one layer's attention. `sliding_window` counts the keys that a query
    sees, including its own. sinks: the layer adds one more score per head; only the C and the
    Triton kernels can.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False


SCALE_BYTES = 4
"""Size of the scale of one head's int8 key or value."""


class LayerCache(NamedTuple):
    """Keys and values of one layer, for all blocks of the pool."""

    key: Tensor
    value: Tensor


class AttentionBackend(Protocol):
    """One implementation of attention over the pool. Stateless: all state is in the caches and the
    step's metadata.
    """

    name: ClassVar[str]
    block_size: ClassVar[int]
    block_dim: ClassVar[int]
    keeps_tables: ClassVar[bool]
    """Whether the backend reads block tables that stay on the device."""

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Return a zeroed pool of `num_blocks` blocks for one layer."""
        ...

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """Compile all kernels that steps with queries of this dtype may use, so that no request
        waits for it.
        """
        ...

    def build(self, batch: AttentionBatch) -> Any:
        """Compute the metadata that all layers share. Called once per step."""
        ...

    def forward(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, metadata: Any
    ) -> Tensor:
        """Write this step's keys and values into the pool, then attend causally.

        query is [num_heads, N, head_dim], key [num_kv_heads, N, head_dim], value [num_kv_heads, N,
        value_dim], with N >= T. Tokens from T on are padding: they are never written, and their
        output is undefined but finite. Returns [N, num_heads, value_dim].
        """
        ...
