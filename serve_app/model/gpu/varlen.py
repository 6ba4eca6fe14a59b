"""The backend on torch's own kernels, `torch.nn.attention.varlen`: FlashAttention 2, or 3 where it is found.

Decides: what a step looks like to them, and when they are refused. Whether their numbers are right is the probe's to
find out: releases differ in what they can do, and in what they silently compute wrong. Needs no Triton.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention

from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, LayerCache
from serve_app.model.transfer import to_device

_DEVICE = "cuda"


@dataclass(frozen=True, slots=True)
class VarlenMetadata:
    """One step of R rows and T tokens on the device.

    query_starts, key_starts: int32 [R + 1], running sums of queries and of keys; kv_lens: int32 [R]; tables: int32
    [R, blocks]; slots: int64 [T]; max_queries, max_keys: of any row.
    """

    query_starts: Tensor
    key_starts: Tensor
    kv_lens: Tensor
    tables: Tensor
    slots: Tensor
    max_queries: int
    max_keys: int


class VarlenAttention:
    """Caches are [num_blocks, block_size, num_kv_heads, dim]. Blocks are as large as FlashAttention 2 wants them.

    Raises ImportError where torch has no such function, or one that cannot read a paged pool.
    """

    name: ClassVar[str] = "varlen"
    block_size: ClassVar[int] = 256
    block_dim: ClassVar[int] = 0
    keeps_tables: ClassVar[bool] = False

    def __init__(self) -> None:
        self._attend = _varlen_attn()
        self._version = _activate()

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Zeroed pool for one layer. Raises ValueError for what the kernels cannot do."""
        if device.type != _DEVICE:
            raise ValueError(f"it is for GPUs, not for {device}")
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"it multiplies float16 and bfloat16, not {dtype}")
        if layer.softcap is not None or layer.head_dim != layer.value_dim:
            raise ValueError("it caps no scores, and wants keys and values of one width")
        shape = (num_blocks, self.block_size, layer.num_kv_heads, layer.head_dim)
        return LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """Nothing is compiled."""

    def build(self, batch: AttentionBatch) -> VarlenMetadata:
        """The step's metadata in one copy to the device."""
        rows = len(batch.kv_lens)
        key_starts = [0, *np.cumsum(batch.kv_lens).tolist()]
        lengths = np.array([*batch.query_starts, *key_starts, *batch.kv_lens], dtype=np.int32)
        host = np.concatenate([lengths, batch.block_tables.ravel()])
        parts = torch.tensor_split(to_device(host, batch.kv_slots.device), [rows + 1, 2 * rows + 2, 3 * rows + 2])
        return VarlenMetadata(
            query_starts=parts[0],
            key_starts=parts[1],
            kv_lens=parts[2],
            tables=parts[3].view(rows, -1),
            slots=batch.kv_slots,
            max_queries=int(np.diff(batch.query_starts).max()),
            max_keys=max(batch.kv_lens),
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: VarlenMetadata,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        tokens = metadata.slots.shape[0]
        for pool, new in zip(cache, (key, value), strict=True):
            pool.flatten(0, 1)[metadata.slots] = new[:, :tokens].transpose(0, 1)
        out = query.new_zeros(query.shape[1], layer.num_heads, layer.value_dim)
        # FlashAttention 3 takes no key starts beside a table. Version 2 leaves rows unwritten where it splits the keys
        # of pages, so it may not; and "as many as it likes" is None for version 3, which does that right.
        flash_2 = self._version == 2
        out[:tokens] = self._attend(
            query[:, :tokens].transpose(0, 1).contiguous(),
            cache.key,
            cache.value,
            metadata.query_starts,
            metadata.key_starts if flash_2 else None,
            metadata.max_queries,
            metadata.max_keys,
            scale=layer.scale,
            # Keys before a query's own.
            window_size=(-1 if layer.sliding_window is None else layer.sliding_window - 1, 0),
            enable_gqa=layer.num_heads != layer.num_kv_heads,
            seqused_k=metadata.kv_lens,
            block_table=metadata.tables,
            num_splits=1 if flash_2 else None,
        )
        return out


def _varlen_attn() -> Callable[..., Any]:
    """torch's function. Raises ImportError for one that knows no pages."""
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise ImportError(f"varlen_attn of torch {torch.__version__} cannot read a paged pool")
    return varlen_attn


def _activate() -> int:
    """The version of FlashAttention that torch calls from now on: 3 where something has brought it along, else 2."""
    try:
        attention.activate_flash_attention_impl("FA3")
    except Exception:  # whatever a missing or foreign library does; version 2 stays
        return 2
    return 3
