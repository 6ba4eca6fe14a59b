"""The reference for all attention backends: one row at a time, with an explicit mask. Runs on any
device and in any dtype.
"""

from typing import ClassVar

import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, LayerCache


class ReferenceAttention:
    """The definition of attention, not optimized. Caches are [num_blocks, block_size, num_kv_heads,
    dim]; sums are float32 or wider.
    """

    name: ClassVar[str] = "reference"
    block_size: ClassVar[int] = 16
    block_dim: ClassVar[int] = 0
    keeps_tables: ClassVar[bool] = False

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Return a zeroed pool for one layer."""
        shape = (num_blocks, self.block_size, layer.num_kv_heads)
        return LayerCache(
            torch.zeros(*shape, layer.head_dim, dtype=dtype, device=device),
            torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device),
        )

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """Do nothing: there is nothing to compile."""

    def build(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch itself."""
        return batch

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: AttentionBatch,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        slots = metadata.kv_slots
        tokens = slots.shape[0]
        cache.key.flatten(0, 1)[slots] = key[:, :tokens].transpose(0, 1)
        cache.value.flatten(0, 1)[slots] = value[:, :tokens].transpose(0, 1)
        out = query.new_zeros(query.shape[1], layer.num_heads, layer.value_dim)
        for row, kv_len in enumerate(metadata.kv_lens):
            start, end = metadata.query_starts[row], metadata.query_starts[row + 1]
            num_blocks = -(-kv_len // self.block_size)
            table = torch.tensor(list(metadata.block_tables[row])[:num_blocks], device=query.device)
            keys = cache.key[table].flatten(0, 1)[:kv_len]
            values = cache.value[table].flatten(0, 1)[:kv_len]
            out[start:end] = _attend(layer, query[:, start:end], keys, values)
        return out


def _attend(layer: AttentionLayer, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend with the last n of the L positions. query is [heads, n, dim]; keys and values are [L,
    kv_heads, dim].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    group = layer.num_heads // layer.num_kv_heads
    keys = keys.to(wide).repeat_interleave(group, dim=1)
    values = values.to(wide).repeat_interleave(group, dim=1)
    scores = torch.einsum("hqd,khd->hqk", query.to(wide), keys) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    k_pos = torch.arange(keys.shape[0], device=query.device)
    q_pos = k_pos[-query.shape[1] :, None]
    visible = k_pos <= q_pos
    if layer.sliding_window is not None:
        visible &= k_pos > q_pos - layer.sliding_window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
