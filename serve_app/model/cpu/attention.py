"""Attention with the C kernels: the layout of their pool, and attention of a single layer."""

from typing import ClassVar

import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, LayerCache
from serve_app.model.cpu.ops import PAGE, Batch, Kernels
from serve_app.model.cpu.pages import lazy_zeros

_MOST_HEAD_DIM = 2048
"""Limit for an 8-bit cache: sums of this many 16-bit products fit 32 bits."""


class CKernelAttention:
    """The C kernels as an `AttentionBackend`.

    Key caches are [num_blocks, num_kv_heads, head_dim, block_size]: a vector holds one dimension of
    many keys. Value caches are [num_blocks, num_kv_heads, block_size, head_dim]. Both are float32
    or narrow: bfloat16 where the processor multiplies it (with pairs arranged as in
    `kernels/attention.h`), else float16. In int8 both are [num_blocks, num_kv_heads, page_bytes],
    numbers and scales (`kernels/byte_attention.h`).

    No softcap. head_dim must be a multiple of 16 up to 2,048, and value_dim equal to it.
    """

    name: ClassVar[str] = "kernels"
    block_size: ClassVar[int] = PAGE
    block_dim: ClassVar[int] = 0
    keeps_tables: ClassVar[bool] = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Return a zeroed pool for one layer. Raises ValueError for unsupported layers, dtypes and
        devices.
        """
        if unsupported := unsupported_by_kernels(layer):
            raise ValueError(unsupported)
        kernels = self._kernels
        if dtype not in (torch.float32, kernels.narrow_cache, kernels.smallest_cache) or device.type != "cpu":
            raise ValueError(f"no {dtype} on {device}")
        shape = (num_blocks, layer.num_kv_heads)
        if dtype == torch.int8:
            page = kernels.page_bytes(layer.head_dim, dtype)
            return LayerCache(lazy_zeros((*shape, page), dtype), lazy_zeros((*shape, page), dtype))
        return LayerCache(
            lazy_zeros((*shape, layer.head_dim, self.block_size), dtype),
            lazy_zeros((*shape, self.block_size, layer.head_dim), dtype),
        )

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """Do nothing: there is nothing to compile."""

    def build(self, batch: AttentionBatch) -> Batch:
        """See `AttentionBackend.build`."""
        spans = zip(batch.query_starts, batch.query_starts[1:], batch.kv_lens, strict=False)
        return Batch(batch, torch.cat([torch.arange(kv_len - end + start, kv_len) for start, end, kv_len in spans]))

    def forward(
        self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache, metadata: Batch
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        tokens, padded = metadata.num_tokens, query.shape[1]
        queries, keys, values = (part[:, :tokens].transpose(0, 1).float() for part in (query, key, value))
        out = self._kernels.attention(layer, queries, keys, values, cache, metadata).to(query.dtype)
        return out if padded == tokens else torch.cat([out, out.new_zeros(padded - tokens, *out.shape[1:])])


def unsupported_by_kernels(layer: AttentionLayer) -> str | None:
    """Return the layer's property that the kernels do not support, or None."""
    if layer.softcap is not None:
        return "attention with a softcap"
    if layer.head_dim % 16 or layer.head_dim > _MOST_HEAD_DIM or layer.value_dim != layer.head_dim:
        return f"heads of {layer.head_dim} and values of {layer.value_dim} numbers"
    return None
