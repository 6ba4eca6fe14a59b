"""Attention on a CPU in plain torch: a plan of dense tiles per step, two batched products per layer
and tile.

A request's result is bitwise the same whatever else is in the step and however its prompt is cut
into chunks:
- A score is one dot product over head_dim. Its summation order does not depend on the number of
  rows and keys, if the number of rows is a multiple of `_ROWS`; fewer rows use other kernels.
- Appending masked keys does not change a row's softmax: they add exact zeros.
- Weights times values are summed in order over fixed segments of `_SEGMENT` keys, counted from
  position 0. The library would split longer segments depending on their length.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, BlockTable, LayerCache
from serve_app.model.elementwise import aligned_parts

_ROWS = 8
_SEGMENT = 128
_KEY_STEP = 16
"""Key ranges end at multiples of this. It divides the block size, so they stay inside the row's
blocks.
"""
_TILE_QUERIES = 64
_GATHER_LIMIT = 384
"""Decode rows of up to this many keys are gathered even if their blocks are consecutive: one
product for many rows costs less than a few for each row. Measured on two cores: equal at 400 keys.
"""
_DECODE_WASTE = 1.25
"""Decode rows share a tile while the longest is at most this many times the shortest, or at most
one segment.
"""


class TorchCpuAttention:
    """Caches are [num_kv_heads, num_blocks, block_size, dim], so a head's consecutive blocks form
    one matrix.
    """

    name: ClassVar[str] = "cpu"
    block_size: ClassVar[int] = 16
    block_dim: ClassVar[int] = 1
    keeps_tables: ClassVar[bool] = False

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Return a zeroed pool for one layer."""
        shape = (layer.num_kv_heads, num_blocks, self.block_size)
        return LayerCache(
            torch.zeros(*shape, layer.head_dim, dtype=dtype, device=device),
            torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device),
        )

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """Do nothing: there is nothing to compile."""

    def build(self, batch: AttentionBatch) -> "TorchCpuMetadata":
        """Return the step's plan. The first layer with each sliding window builds the tiles for
        that window.
        """
        return TorchCpuMetadata(batch, self.block_size)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: "TorchCpuMetadata",
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        metadata.write(cache, key, value)
        tokens, heads = query.shape[1], layer.num_kv_heads
        group = layer.num_heads // heads
        # Scale the queries once, so that every tile multiplies the same numbers.
        query = (query * layer.scale).view(heads, group, tokens, layer.head_dim)
        out = query.new_zeros(tokens, layer.num_heads, layer.value_dim)
        for tile in metadata.tiles(layer.sliding_window):
            tile.attend(layer, query, cache, out.view(tokens, heads, group, layer.value_dim))
        return out


@dataclass(slots=True)
class _DecodeTile:
    """S rows of one query each, gathered into [kv_heads * S, length, dim]."""

    tokens: Tensor
    """int64 [S]: packed token index of each query."""
    blocks: Tensor
    """int64 [S * length / block_size]; shorter sequences are padded with the null block."""
    mask: Tensor
    """float [S, 1, length]: 0 or -inf, added to the scores."""
    _buffers: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def attend(self, layer: AttentionLayer, query: Tensor, cache: LayerCache, out: Tensor) -> None:
        heads, group, _, dim = query.shape
        size, _, length = self.mask.shape
        rows = -(-group // _ROWS) * _ROWS
        queries = query.new_zeros(heads, size, rows, dim)
        queries[:, :, :group] = query[:, :, self.tokens].transpose(1, 2)
        keys = self._gather(cache.key, 0).view(heads * size, length, dim)
        values = self._gather(cache.value, 1).view(heads * size, length, layer.value_dim)
        scores = torch.bmm(queries.view(heads * size, rows, dim), keys.transpose(1, 2))
        _cap(scores, layer.softcap)
        scores.view(heads, size, rows, length).add_(self.mask)
        result = _weighted_sum(scores, values).view(heads, size, rows, layer.value_dim)
        out[self.tokens] = result[:, :, :group].transpose(0, 1)

    def _gather(self, pool: Tensor, which: int) -> Tensor:
        heads, num_blocks = pool.shape[:2]
        shape = (heads, self.blocks.shape[0], pool.shape[2] * pool.shape[3])
        buffer = self._buffers.get((which, *shape))
        if buffer is None:
            buffer = self._buffers[which, *shape] = pool.new_empty(shape)
        return torch.index_select(pool.view(heads, num_blocks, -1), 1, self.blocks, out=buffer)


@dataclass(slots=True)
class _Sequence:
    """Keys and values of one sequence: a view if its blocks are consecutive, else one gather."""

    first: int
    count: int
    blocks: Tensor | None

    def rows(self, pool: Tensor) -> Tensor:
        """Return the sequence's rows of the pool, [kv_heads, count * block_size, dim]."""
        if self.blocks is None:
            return pool[:, self.first : self.first + self.count].flatten(1, 2)
        return pool.index_select(1, self.blocks).flatten(1, 2)


@dataclass(slots=True)
class _ChunkTiles:
    """Consecutive queries of one sequence, cut into tiles. Tiles keep the score matrices small and
    skip most keys after a query.
    """

    sequence: _Sequence
    tiles: list[tuple[int, int, int, int, int, Tensor]]
    """First token, last token + 1, first key, last key + 1, first masked key, and the mask
    [queries, masked keys].
    """

    def attend(self, layer: AttentionLayer, query: Tensor, cache: LayerCache, out: Tensor) -> None:
        heads, group, _, dim = query.shape
        keys, values = self.sequence.rows(cache.key), self.sequence.rows(cache.value)
        for start, end, low, high, masked, mask in self.tiles:
            count = end - start
            rows = -(-group * count // _ROWS) * _ROWS
            queries = query.new_zeros(heads, rows, dim)
            queries[:, : group * count].view(heads, group, count, dim).copy_(query[:, :, start:end])
            scores = torch.bmm(queries, keys[:, low:high].transpose(1, 2))
            _cap(scores, layer.softcap)
            real = scores[:, : group * count].view(heads, group, count, high - low)
            real[..., masked - low :] += mask
            result = _weighted_sum(scores, values[:, low:high])
            result = result[:, : group * count].view(heads, group, count, layer.value_dim)
            out[start:end] = result.permute(2, 0, 1, 3)


class TorchCpuMetadata:
    """The plan of one step."""

    def __init__(self, batch: AttentionBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._tiles: dict[int | None, list[_DecodeTile | _ChunkTiles]] = {}
        self._stale = self._stale_slots()

    def write(self, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        """Write this step's keys and values into the pool."""
        slots = self._batch.kv_slots
        tokens = slots.shape[0]
        for pool, new in ((cache.key, key), (cache.value, value)):
            flat = pool.view(pool.shape[0], -1, pool.shape[3])
            if self._stale is not None:
                flat.index_fill_(1, self._stale, 0.0)
            flat.index_copy_(1, slots, new[:, :tokens])

    def tiles(self, window: int | None) -> "list[_DecodeTile | _ChunkTiles]":
        """Return the tiles for layers with this sliding window."""
        found = self._tiles.get(window)
        if found is None:
            found = self._tiles[window] = [*self._decode_tiles(window), *self._chunk_tiles(window)]
        return found

    def _stale_slots(self) -> Tensor | None:
        """Return the KV slots after the last key of every block begun in this step.

        Products read whole blocks. The block's previous owner may have left NaN there, which no
        mask removes.
        """
        stale: list[int] = []
        batch, size = self._batch, self._block_size
        for row, kv_len in enumerate(batch.kv_lens):
            count = batch.query_starts[row + 1] - batch.query_starts[row]
            offset = kv_len % size
            if 0 < offset <= count:
                start = batch.block_tables[row][kv_len // size] * size
                stale.extend(range(start + offset, start + size))
        return torch.tensor(stale) if stale else None

    def _gathers(self, row: int, window: int | None) -> bool:
        """Whether the row shares a decode tile. Otherwise it is handled as a chunk."""
        batch = self._batch
        if batch.query_starts[row + 1] - batch.query_starts[row] > 1:
            return False
        kv_len = batch.kv_lens[row]
        first = _first_key(kv_len - 1, window)
        if kv_len - first <= _GATHER_LIMIT:
            return True
        table = batch.block_tables[row][first // self._block_size : -(-kv_len // self._block_size)]
        return not _consecutive(table)

    def _decode_tiles(self, window: int | None) -> "list[_DecodeTile]":
        batch = self._batch
        rows = [row for row in range(len(batch.kv_lens)) if self._gathers(row, window)]
        spans = {row: (_first_key(batch.kv_lens[row] - 1, window), batch.kv_lens[row]) for row in rows}
        rows.sort(key=lambda row: spans[row][1] - spans[row][0])
        tiles: list[_DecodeTile] = []
        begin = 0
        for index in range(1, len(rows) + 1):
            low, high = spans[rows[begin]]
            limit = max((high - low) * _DECODE_WASTE, _SEGMENT)
            if index == len(rows) or spans[rows[index]][1] - spans[rows[index]][0] > limit:
                tiles.append(self._decode_tile(rows[begin:index], spans, window))
                begin = index
        return tiles

    def _decode_tile(self, rows: list[int], spans: dict[int, tuple[int, int]], window: int | None) -> "_DecodeTile":
        batch, size = self._batch, self._block_size
        length = _round_up(max(spans[row][1] - spans[row][0] for row in rows), _KEY_STEP)
        blocks = torch.zeros(len(rows), length // size, dtype=torch.int64)
        mask = torch.full((len(rows), 1, length), float("-inf"))
        for index, row in enumerate(rows):
            low, high = spans[row]
            table = torch.tensor(batch.block_tables[row][low // size : -(-high // size)])
            blocks[index, : table.shape[0]] = table
            visible = low if window is None else max(low, high - window)
            mask[index, 0, visible - low : high - low] = 0.0
        tokens = torch.tensor([batch.query_starts[row] for row in rows])
        return _DecodeTile(tokens, blocks.flatten(), mask)

    def _chunk_tiles(self, window: int | None) -> "list[_ChunkTiles]":
        batch = self._batch
        chunks: list[_ChunkTiles] = []
        for row, kv_len in enumerate(batch.kv_lens):
            start, end = batch.query_starts[row], batch.query_starts[row + 1]
            if self._gathers(row, window):
                continue
            position = kv_len - (end - start)
            base = _first_key(position, window)
            table = batch.block_tables[row][base // self._block_size : -(-kv_len // self._block_size)]
            tiles = []
            for first in range(start, end, _TILE_QUERIES):
                last = min(first + _TILE_QUERIES, end)
                q_low, q_high = position + first - start, position + last - start
                low, high = _first_key(q_low, window), _round_up(q_high, _KEY_STEP)
                masked = q_low // _KEY_STEP * _KEY_STEP if window is None else low
                mask = _mask(q_low, q_high, masked, high, window)
                tiles.append((first, last, low - base, high - base, masked - base, mask))
            chunks.append(_ChunkTiles(_sequence(table), tiles))
        return chunks


def _sequence(table: BlockTable) -> _Sequence:
    return _Sequence(int(table[0]), len(table), None if _consecutive(table) else torch.tensor(table))


def _consecutive(table: BlockTable) -> bool:
    return bool((np.diff(table) == 1).all())


def _first_key(position: int, window: int | None) -> int:
    """Round the position of the first key that the query at `position` sees down to a segment
    border.
    """
    if window is None:
        return 0
    return max(0, position - window + 1) // _SEGMENT * _SEGMENT


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _mask(q_low: int, q_high: int, k_low: int, k_high: int, window: int | None) -> Tensor:
    """Return the mask, float [queries, keys]: 0 where the query sees the key, else -inf."""
    queries, keys = torch.arange(q_low, q_high)[:, None], torch.arange(k_low, k_high)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _cap(scores: Tensor, softcap: float | None) -> None:
    if softcap is not None:
        for part in aligned_parts(scores.view(-1, scores.shape[-1])):
            part.div_(softcap).tanh_().mul_(softcap)


def _weighted_sum(scores: Tensor, values: Tensor) -> Tensor:
    """Compute softmax(scores) @ values by segments. scores [N, rows, L], values [N, L, dim] -> [N,
    rows, dim].
    """
    length = scores.shape[2]
    weights = torch.softmax(scores, dim=-1)
    out = torch.bmm(weights[:, :, :_SEGMENT], values[:, :_SEGMENT])
    for low in range(_SEGMENT, length, _SEGMENT):
        high = min(low + _SEGMENT, length)
        out.baddbmm_(weights[:, :, low:high], values[:, low:high])
    return out
