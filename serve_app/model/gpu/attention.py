"""The Triton backend: how a step's rows are cut into tiles, how many ways keys are split, and the launches.

Rows of few queries (decode) get small tiles and have their keys split over several programs, or few rows would leave
most of the GPU idle; longer rows (prefill chunks) get large tiles. One kernel does both, in one launch for each kind.
Without Triton this module cannot be imported.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import triton
from torch import Tensor

from serve_app.model.attention.base import AttentionBatch, AttentionLayer, LayerCache
from serve_app.model.gpu.kernels import attention as kernels
from serve_app.model.transfer import to_device

_LOG2_E = 1.4426950408889634
_BLOCK_N = 64
"""Keys of a tile."""
_SHORT_LINES = 16
"""Lines of a small tile: the least that tensor cores multiply."""
_SPLITS = (1, 4, 16)
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one launch. rows, firsts: int32 [tiles] on the device, each tile's row and first query in that row."""

    rows: Tensor
    firsts: Tensor
    lines: int
    splits: int


@dataclass(slots=True)
class TritonMetadata:
    """One step of R rows and T tokens on the device.

    query_starts: int32 [R + 1]; kv_lens: int32 [R]; tables: int32 [R, blocks]; slots: int64 [T]; plan: makes the tiles
    for layers of one shape.
    """

    query_starts: Tensor
    kv_lens: Tensor
    tables: Tensor
    slots: Tensor
    plan: Callable[[AttentionLayer, torch.dtype], list[Tiles]]
    _tiles: dict[tuple[object, ...], list[Tiles]] = field(default_factory=dict)

    def tiles(self, layer: AttentionLayer, dtype: torch.dtype) -> list[Tiles]:
        """The launches for layers of this shape; made when the first of them asks."""
        key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim)
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = self.plan(layer, dtype)
        return found


class TritonAttention:
    """Caches are [num_blocks, num_kv_heads, block_size, dim]: a block's keys of one head lie together.

    deterministic: one kind of tile for all rows, whose keys are not split, so that a row's bits do not depend on the
    other rows.
    """

    name: ClassVar[str] = "triton"
    block_size: ClassVar[int] = 16
    block_dim: ClassVar[int] = 0

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Zeroed pool for one layer. Raises ValueError for a number format that the kernel cannot multiply."""
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(f"no {dtype}")
        shape = (num_blocks, layer.num_kv_heads, self.block_size)
        return LayerCache(
            torch.zeros(*shape, layer.head_dim, dtype=dtype, device=device),
            torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device),
        )

    def build(self, batch: AttentionBatch) -> TritonMetadata:
        """The step's metadata in one copy to the device."""
        num_rows, device = len(batch.kv_lens), batch.kv_slots.device
        lengths = np.array([*batch.query_starts, *batch.kv_lens], dtype=np.int32)
        host = np.concatenate([lengths, batch.block_tables.ravel()])
        query_starts, kv_lens, tables = torch.tensor_split(to_device(host, device), [num_rows + 1, 2 * num_rows + 1])
        plan = partial(cut, batch, device, self.deterministic)
        return TritonMetadata(query_starts, kv_lens, tables.view(num_rows, -1), batch.kv_slots, plan)

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """See `AttentionBackend.warm_up`. Runs the kernels on one row without keys."""
        device = cache.key.device
        zero = torch.zeros(2, dtype=torch.int32, device=device)
        metadata = TritonMetadata(zero, zero[:1], zero[None, :1], zero.long()[:0], lambda layer, dtype: [])
        query = torch.zeros(1, layer.num_heads, layer.head_dim, dtype=dtype, device=device)
        out = query.new_empty(1, layer.num_heads, layer.value_dim)
        shapes = {(_short_lines(layer.num_heads // layer.num_kv_heads), splits) for splits in _SPLITS}
        shapes |= {(_long_lines(layer, dtype), 1)}
        for lines, splits in {(_fixed_lines(layer, dtype), 1)} if self.deterministic else shapes:
            _launch(layer, query, cache, metadata, Tiles(zero[:1], zero[:1], lines, splits), out)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        metadata: TritonMetadata,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        slots = metadata.slots
        tokens = slots.shape[0]
        block, offset = slots // self.block_size, slots % self.block_size
        for pool, new in zip(cache, (key, value), strict=True):
            pool[block, :, offset] = new[:, :tokens].transpose(0, 1)
        out = query.new_zeros(query.shape[1], layer.num_heads, layer.value_dim)
        self.attend(layer, query.transpose(0, 1).contiguous(), cache, metadata, out)
        return out

    def attend(
        self, layer: AttentionLayer, query: Tensor, cache: LayerCache, metadata: TritonMetadata, out: Tensor
    ) -> None:
        """Attention of keys and values that are in the pool already.

        query [N, num_heads, head_dim] contiguous; out [N, num_heads, value_dim], of which T tokens are written.
        """
        for tiles in metadata.tiles(layer, query.dtype):
            _launch(layer, query, cache, metadata, tiles, out)


def cut(
    batch: AttentionBatch, device: torch.device, deterministic: bool, layer: AttentionLayer, dtype: torch.dtype
) -> list[Tiles]:
    """The tiles of a step: one launch for short rows, one for long ones, as far as there are any. Deterministic: the
    same tiles for all."""
    group = layer.num_heads // layer.num_kv_heads
    starts = np.asarray(batch.query_starts)
    counts, kv_lens = np.diff(starts), np.asarray(batch.kv_lens)
    short_lines = _short_lines(group)
    short = (counts * group <= short_lines) & (not deterministic)
    launches = []
    if short.any():
        rows = short.nonzero()[0]
        splits = num_splits(len(rows) * layer.num_kv_heads, int(kv_lens[rows].max()), _processors(device))
        launches.append((rows, np.zeros_like(rows), short_lines, splits))
    if not short.all():
        lines = _fixed_lines(layer, dtype) if deterministic else _long_lines(layer, dtype)
        queries = lines // group
        rows = np.repeat(np.arange(len(counts)), np.where(short, 0, -(-counts // queries)))
        firsts = (np.arange(len(rows)) - np.searchsorted(rows, rows)) * queries
        # The tiles with most keys first: those that start last should be the short ones.
        order = np.argsort(-(kv_lens[rows] - counts[rows] + firsts), kind="stable")
        launches.append((rows[order], firsts[order], lines, 1))
    tiles = []
    for rows, firsts, lines, splits in launches:
        both = to_device(np.stack([rows, firsts]).astype(np.int32), device)
        tiles.append(Tiles(both[0], both[1], lines, splits))
    return tiles


def decode_tiles(
    max_kv_len: int, device: torch.device, deterministic: bool, rows: int, layer: AttentionLayer, dtype: torch.dtype
) -> list[Tiles]:
    """The tiles of `rows` single-token rows, whatever their lengths up to `max_kv_len`."""
    lines, splits = _short_lines(layer.num_heads // layer.num_kv_heads), 1
    if deterministic:
        lines = _fixed_lines(layer, dtype)
    else:
        splits = num_splits(rows * layer.num_kv_heads, max_kv_len, _processors(device))
    each = torch.arange(rows, dtype=torch.int32, device=device)
    return [Tiles(each, torch.zeros_like(each), lines, splits)]


def num_splits(programs: int, max_kv_len: int, processors: int) -> int:
    """Into how many parts the keys of short rows are split, so that every processor has work; each is a kernel."""
    key_tiles = -(-max_kv_len // _BLOCK_N)
    enough = (splits for splits in _SPLITS if programs * splits >= _PROGRAMS_PER_PROCESSOR * processors)
    wanted = next(enough, _SPLITS[-1])
    return next((splits for splits in _SPLITS if splits >= min(wanted, key_tiles)), wanted)


def _short_lines(group: int) -> int:
    return max(_SHORT_LINES, int(triton.next_power_of_2(group)))


def _long_lines(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """As many as a program's registers hold sums for; float32 has no tensor cores to feed."""
    lines = 128 if max(layer.head_dim, layer.value_dim) <= 128 else 64
    return _at_least_a_group(layer, 32 if dtype == torch.float32 else lines)


def _fixed_lines(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """The fewest for the instruction that long rows are multiplied with: another one rounds in another order."""
    return _at_least_a_group(layer, 32 if dtype == torch.float32 else 64)


def _at_least_a_group(layer: AttentionLayer, lines: int) -> int:
    return max(lines, int(triton.next_power_of_2(layer.num_heads // layer.num_kv_heads)))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _launch(
    layer: AttentionLayer, query: Tensor, cache: LayerCache, metadata: TritonMetadata, tiles: Tiles, out: Tensor
) -> None:
    count, kv_heads, splits = tiles.rows.shape[0], layer.num_kv_heads, tiles.splits
    value_dims = triton.next_power_of_2(layer.value_dim)
    sums = stats = out
    if splits > 1:
        parts = (count, kv_heads, splits)
        sums = torch.empty(*parts, tiles.lines, layer.value_dim, dtype=torch.float32, device=out.device)
        stats = torch.empty(*parts, 2, tiles.lines, dtype=torch.float32, device=out.device)
    wide = query.dtype == torch.float32 or max(layer.head_dim, layer.value_dim) > 128
    kernels.attend[(count, kv_heads, splits)](
        query, cache.key, cache.value, out, sums, stats, tiles.rows, tiles.firsts, metadata.query_starts,
        metadata.kv_lens, metadata.tables, metadata.tables.stride(0), query.stride(0),
        layer.scale * _LOG2_E, (layer.softcap or 0.0) * _LOG2_E,
        HEADS=layer.num_heads, KV_HEADS=kv_heads, HEAD_DIM=layer.head_dim, VALUE_DIM=layer.value_dim,
        DIMS=max(16, triton.next_power_of_2(layer.head_dim)), VALUE_DIMS=max(16, value_dims),
        PAGE=TritonAttention.block_size, BLOCK_M=tiles.lines, BLOCK_N=_BLOCK_N // 2 if wide else _BLOCK_N,
        SPLITS=splits, WINDOW=layer.sliding_window or 0, CAPPED=layer.softcap is not None,
        # Tensor cores would round float32 factors to 10 bits.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=8 if tiles.lines > 64 else 4, num_stages=2 if wide else 3,
    )  # fmt: skip
    if splits > 1:
        kernels.merge[(count, kv_heads)](
            sums, stats, out, tiles.rows, tiles.firsts, metadata.query_starts,
            HEADS=layer.num_heads, KV_HEADS=kv_heads, VALUE_DIM=layer.value_dim, VALUE_DIMS=max(16, value_dims),
            BLOCK_M=tiles.lines, SPLITS=splits, num_warps=4,
        )  # fmt: skip
