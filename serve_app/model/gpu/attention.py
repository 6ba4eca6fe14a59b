"""The Triton backend: cuts the rows of a step into tiles, splits keys over programs, and launches
the kernels.

Rows of few queries (decode) get small tiles, and their keys are split over several programs
according to their number. Otherwise few rows would leave most of the GPU idle, and a step would
wait for its longest row. The device assigns the splits, so a captured step can have rows of any
length. Longer rows (prefill chunks) get large tiles. One kernel handles both kinds, in one launch
per kind. This module requires Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import torch
import triton
from torch import Tensor

from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, LayerCache
from serve_app.model.gpu.kernels import attention as kernels
from serve_app.model.transfer import to_device

_LOG2_E = 1.4426950408889634
_BLOCK_N = 64
"""Keys per tile."""
_SHORT_LINES = 16
"""Lines of a small tile: the minimum for tensor cores."""
_PROGRAMS = 512
"""Maximum number of programs for the splits of one row, over all heads: four per processor of the
largest GPUs.
"""
_PROGRAMS_PER_PROCESSOR = 4
"""Programs that run on a processor at once."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of one launch, with `programs` programs per key-value head.

    rows, firsts: int32 on the device; see `kernels.attend`. kept: for split tiles, the number of
    lines that any tile uses; 0 if tiles are not split.
    """

    rows: Tensor
    firsts: Tensor
    lines: int
    programs: int
    kept: int = 0


@dataclass(slots=True)
class TritonMetadata:
    """One step of R rows and T tokens on the device.

    query_starts: int32 [R + 1]; kv_lens: int32 [R]; tables: int32 [any, blocks]; table_lines: int32
    [R], the line of each row in `tables`; slots: int64 [T]; plan: makes the tiles for layers of one
    shape.
    """

    query_starts: Tensor
    kv_lens: Tensor
    tables: Tensor
    table_lines: Tensor
    slots: Tensor
    plan: Callable[["TritonMetadata", AttentionLayer, torch.dtype], list[Tiles]]
    _tiles: dict[tuple[object, ...], list[Tiles]] = field(default_factory=dict)

    def tiles(self, layer: AttentionLayer, dtype: torch.dtype) -> list[Tiles]:
        """Return the launches for layers of this shape. They are made on first use."""
        key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.value_dim, layer.sliding_window)
        found = self._tiles.get(key)
        if found is None:
            found = self._tiles[key] = self.plan(self, layer, dtype)
        return found


class TritonAttention:
    """Caches are [num_blocks, num_kv_heads, block_size, dim]: a block's keys of one head are
    contiguous.

    deterministic: use one kind of tile for all rows and do not split keys, so that a row's bits do
    not depend on other rows.
    """

    name: ClassVar[str] = "triton"
    block_size: ClassVar[int] = 16
    block_dim: ClassVar[int] = 0
    keeps_tables: ClassVar[bool] = True

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def allocate(self, layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> LayerCache:
        """Return a zeroed pool for one layer. Raises ValueError for a dtype that the kernel cannot
        multiply.
        """
        if dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            raise ValueError(f"no {dtype}")
        shape = (num_blocks, layer.num_kv_heads, self.block_size)
        return LayerCache(
            torch.zeros(*shape, layer.head_dim, dtype=dtype, device=device),
            torch.zeros(*shape, layer.value_dim, dtype=dtype, device=device),
        )

    def build(self, batch: AttentionBatch) -> TritonMetadata:
        """Build the step's metadata and copy it to the device at once."""
        rows, device, resident = len(batch.kv_lens), batch.kv_slots.device, batch.resident
        table_lines = range(rows) if resident is None else resident.lines
        host = np.array([*batch.query_starts, *batch.kv_lens, *table_lines], dtype=np.int32)
        if resident is None:
            host = np.concatenate([host, batch.block_tables.ravel()])
        ends = [rows + 1, 2 * rows + 1, 3 * rows + 1]
        query_starts, kv_lens, on_device, rest = torch.tensor_split(to_device(host, device), ends)
        tables = rest.view(rows, -1) if resident is None else resident.tables
        plan = partial(cut, batch, self.deterministic)
        return TritonMetadata(query_starts, kv_lens, tables, on_device, batch.kv_slots, plan)

    def warm_up(self, layer: AttentionLayer, dtype: torch.dtype, cache: LayerCache) -> None:
        """See `AttentionBackend.warm_up`. Runs the kernels on one row without keys."""
        device = cache.key.device
        zero = torch.zeros(2, dtype=torch.int32, device=device)
        metadata = TritonMetadata(zero, zero[:1], zero[None, :1], zero[:1], zero.long()[:0], lambda *_: [])
        query = torch.zeros(1, layer.num_heads, layer.head_dim, dtype=dtype, device=device)
        out = query.new_empty(1, layer.num_heads, layer.value_dim)
        lines = _fixed_lines(layer, dtype) if self.deterministic else _long_lines(layer, dtype)
        sinks = query.new_zeros(layer.num_heads) if layer.sinks else None
        _launch(layer, query, cache, metadata, Tiles(zero[:1], zero[:1], lines, 1), out, sinks)
        if not self.deterministic:
            _launch(layer, query, cache, metadata, _split_tiles(metadata, layer, 1, 1), out, sinks)

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
        self,
        layer: AttentionLayer,
        query: Tensor,
        cache: LayerCache,
        metadata: TritonMetadata,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend to keys and values that are already in the pool.

        query: [N, num_heads, head_dim], contiguous. out: [N, num_heads, value_dim]; only the T
        tokens are written. sinks: [num_heads] of layers that have them: one more score per query.
        """
        for tiles in metadata.tiles(layer, query.dtype):
            _launch(layer, query, cache, metadata, tiles, out, sinks)


def cut(
    batch: AttentionBatch, deterministic: bool, metadata: TritonMetadata, layer: AttentionLayer, dtype: torch.dtype
) -> list[Tiles]:
    """Return the tiles of a step: one launch for short rows and one for long rows, if there are
    any. Deterministic: one launch for all rows.
    """
    group = layer.num_heads // layer.num_kv_heads
    counts, kv_lens = np.diff(batch.query_starts), np.asarray(batch.kv_lens)
    short = (counts * group <= _short_lines(group)) & (not deterministic)
    tiles = []
    if short.any():
        tiles.append(_split_tiles(metadata, layer, int(counts[short].max()), int(kv_lens[short].max())))
    if not short.all():
        lines = _fixed_lines(layer, dtype) if deterministic else _long_lines(layer, dtype)
        queries = lines // group
        rows = np.repeat(np.arange(len(counts)), np.where(short, 0, -(-counts // queries)))
        firsts = (np.arange(len(rows)) - np.searchsorted(rows, rows)) * queries
        # Tiles with most keys first, so that the last tiles to start are short.
        order = np.argsort(-(kv_lens[rows] - counts[rows] + firsts), kind="stable")
        both = to_device(np.stack([rows[order], firsts[order]]).astype(np.int32), metadata.kv_lens.device)
        tiles.append(Tiles(both[0], both[1], lines, len(rows)))
    return tiles


def decode_tiles(
    max_kv_len: int, deterministic: bool, metadata: TritonMetadata, layer: AttentionLayer, dtype: torch.dtype
) -> list[Tiles]:
    """Return the tiles of single-token rows of any lengths up to `max_kv_len`. Does not read the
    lengths on the host: kernel launches only, so that a CUDA graph can capture it.
    """
    if not deterministic:
        return [_split_tiles(metadata, layer, 1, max_kv_len)]
    each = torch.arange(metadata.kv_lens.shape[0], dtype=torch.int32, device=metadata.kv_lens.device)
    return [Tiles(each, torch.zeros_like(each), _fixed_lines(layer, dtype), len(each))]


def _split_tiles(metadata: TritonMetadata, layer: AttentionLayer, queries: int, max_kv_len: int) -> Tiles:
    """Return the tiles of all short rows. `queries` and `max_kv_len` are upper limits per row."""
    device, num_rows = metadata.kv_lens.device, metadata.kv_lens.shape[0]
    group = layer.num_heads // layer.num_kv_heads
    keys, split_keys = min(max_kv_len, layer.sliding_window or max_kv_len), _split_keys(num_rows, layer)
    most = num_rows * min(_most_splits(layer), -(-keys // split_keys))
    rows = torch.empty(most, dtype=torch.int32, device=device)
    firsts = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    lines = _short_lines(group)
    kernels.share_out[(num_rows + 1,)](
        metadata.query_starts, metadata.kv_lens, rows, firsts, num_rows, split_keys,
        GROUP=group, BLOCK_M=lines, WINDOW=layer.sliding_window or 0, MOST=_most_splits(layer), BLOCK=256, num_warps=4,
    )  # fmt: skip
    programs = min(most, -(-_PROGRAMS_PER_PROCESSOR * _processors(device) // layer.num_kv_heads))
    return Tiles(rows, firsts, lines, programs, queries * group)


def _split_keys(num_rows: int, layer: AttentionLayer) -> int:
    """Return the number of keys per split, before `_most_splits` applies.

    Many rows keep the processors busy without splits, and each split adds start and merge costs.
    (Measured on an H200, 1 to 128 rows of 1,024 and 4,096 keys. For 129 to 256 programs, 512 is 1
    to 3 % faster than 1,024 with rows of 1,024 keys, and 1 to 2 % slower with longer ones.)
    """
    programs = num_rows * layer.num_kv_heads
    return 128 if programs <= 64 else 256 if programs <= 128 else 512 if programs <= 256 else 1024


def _most_splits(layer: AttentionLayer) -> int:
    return max(1, _PROGRAMS // int(triton.next_power_of_2(layer.num_kv_heads)))


def _short_lines(group: int) -> int:
    return max(_SHORT_LINES, int(triton.next_power_of_2(group)))


def _long_lines(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """Return the lines of a large tile: as many as a program's registers have room for sums.
    float32 does not use tensor cores, so it gets fewer.
    """
    lines = 128 if max(layer.head_dim, layer.value_dim) <= 128 else 64
    return _at_least_a_group(layer, 32 if dtype == torch.float32 else lines)


def _fixed_lines(layer: AttentionLayer, dtype: torch.dtype) -> int:
    """Return the lines of a deterministic tile: the fewest that use the same instruction as long
    rows. Another instruction rounds in another order.
    """
    return _at_least_a_group(layer, 32 if dtype == torch.float32 else 64)


def _at_least_a_group(layer: AttentionLayer, lines: int) -> int:
    return max(lines, int(triton.next_power_of_2(layer.num_heads // layer.num_kv_heads)))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _launch(
    layer: AttentionLayer,
    query: Tensor,
    cache: LayerCache,
    metadata: TritonMetadata,
    tiles: Tiles,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    num_rows, kv_heads, kept = metadata.kv_lens.shape[0], layer.num_kv_heads, tiles.kept
    value_dims = max(16, triton.next_power_of_2(layer.value_dim))
    sums = stats = out
    if kept:
        parts = (tiles.rows.shape[0], kv_heads)
        sums = torch.empty(*parts, kept, layer.value_dim, dtype=torch.float32, device=out.device)
        stats = torch.empty(*parts, 2, kept, dtype=torch.float32, device=out.device)
    dims = max(layer.head_dim, layer.value_dim)
    wide = query.dtype == torch.float32 or dims > 128
    # More than the registers of four warps can hold.
    large = tiles.lines > 64 or tiles.lines * dims > 64 * 128
    kernels.attend[(kv_heads, tiles.programs)](
        query, cache.key, cache.value, query if sinks is None else sinks, out, sums, stats, tiles.rows, tiles.firsts,
        metadata.query_starts, metadata.kv_lens, metadata.tables, metadata.table_lines, metadata.tables.stride(0),
        query.stride(0), num_rows, kept, layer.scale * _LOG2_E, (layer.softcap or 0.0) * _LOG2_E,
        HEADS=layer.num_heads, KV_HEADS=kv_heads, HEAD_DIM=layer.head_dim, VALUE_DIM=layer.value_dim,
        DIMS=max(16, triton.next_power_of_2(layer.head_dim)), VALUE_DIMS=value_dims,
        PAGE=TritonAttention.block_size, BLOCK_M=tiles.lines, BLOCK_N=_BLOCK_N // 2 if wide else _BLOCK_N,
        SPLIT=kept > 0, WINDOW=layer.sliding_window or 0, CAPPED=layer.softcap is not None, SINKS=sinks is not None,
        # Tensor cores would round float32 factors to 10 bits.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        # A third stage helps where the registers allow only one program.
        num_warps=8 if large else 4, num_stages=3 if tiles.lines > 64 and not wide else 2,
        # So that `_PROGRAMS_PER_PROCESSOR` programs run at once.
        maxnreg=128 if kept and not wide else None,
    )  # fmt: skip
    if kept:
        kernels.merge[(num_rows, kv_heads, kept)](
            sums, stats, out, tiles.firsts, metadata.query_starts, kept,
            HEADS=layer.num_heads, KV_HEADS=kv_heads, VALUE_DIM=layer.value_dim, VALUE_DIMS=value_dims,
            MOST=_most_splits(layer), CHUNK=16, num_warps=4,
        )  # fmt: skip
