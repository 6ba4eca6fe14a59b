"""The paged KV pool of the whole model: its allocation, its size in bytes, and copies of blocks.

The scheduler decides which request owns a block. The attention backend decides the layout inside a
block.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from serve_app.core.step_plan import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model.attention_backend import SCALE_BYTES, AttentionBackend, AttentionLayer
from serve_app.model.cpu.pages import Prefault
from serve_app.model.transfer import to_device


class KVCache:
    """One `LayerCache` per attention layer. Block 0 is the null block, which is never written."""

    def __init__(
        self,
        backend: AttentionBackend,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 2:
            raise ConfigError(f"the KV pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        try:
            self.layers = [backend.allocate(layer, num_blocks, dtype, device) for layer in layers]
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(f"cannot allocate a KV pool of {num_blocks} blocks on {device}: {error}") from error
        pools = [pool for layer in self.layers for pool in layer]
        self.in_use: AbstractContextManager[None] = Prefault(pools) if device.type == "cpu" else nullcontext()
        """Context manager to hold during each step."""
        self._block_dim = backend.block_dim

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer. All sources are read before any target is written."""
        if not copies:
            return
        device = self.layers[0].key.device
        sources, targets = to_device(np.array([(copy.source, copy.target) for copy in copies]).T.copy(), device)
        dim = self._block_dim
        for layer in self.layers:
            for pool in layer:
                # Not every operation supports 8-bit floats.
                blocks = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
                blocks.index_copy_(dim, targets, blocks.index_select(dim, sources))


def bytes_per_block(layers: Sequence[AttentionLayer], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block over all layers, in bytes."""
    values = sum(layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in layers)
    scales = sum(layer.num_kv_heads for layer in layers) * 2 * SCALE_BYTES if dtype == torch.int8 else 0
    return (values * dtype.itemsize + scales) * block_size
