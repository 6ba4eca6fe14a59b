"""Ragged attention over the paged pool in Triton: online softmax over key tiles, and the merge of
split rows.

A program computes a *tile* of one row's queries for one key-value head. A tile has `BLOCK_M` lines:
consecutive queries times the `GROUP` query heads that share the head's keys, so that keys are read
once for all of them. Prefill chunks and decode rows differ only in the number of used lines.

With `SPLIT`, a row's keys are distributed over several tiles, depending on the row's length. Key
tiles are counted from the first that the row's first query sees; key tile i belongs to split i
modulo the number of splits. Each split stores an unnormalized sum, its peak and its total; `merge`
combines them. So the order of summation depends on the row's positions, on tile sizes and on the
number of rows. It does not depend on the contents of other rows. Without a window it also does not
depend on how a prompt was cut into chunks of more than a few tokens.

Online softmax: Milakov and Gimelshein, 2018. Tiles: Dao et al., FlashAttention, 2022. Split keys:
Flash-Decoding, Dao et al., 2023.
"""

import triton
import triton.language as tl


@triton.jit
def _lines(row, first, head, query_starts, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the row's number of queries, and for each line of its tile from query `first`: the
    query's index in the row, the packed token, the query head, and whether the line is used.
    """
    begin = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - begin
    line = tl.arange(0, BLOCK_M)
    index = first + line // GROUP
    used = (index < num_queries) & (line < BLOCK_M // GROUP * GROUP)
    return num_queries, index, (begin + index).to(tl.int64), head * GROUP + line % GROUP, used


@triton.jit
def _key_range(low, split, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """Return the split's first key and the first key that needs a mask, for a tile whose first
    query is at `low`.
    """
    start = split * BLOCK_N
    if WINDOW > 0:
        start += tl.maximum(low - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    # Before `masked`, every line of the tile sees every key. A separate loop for that part would
    # cost a program of a short row a third of its registers.
    masked = start if SPLIT or WINDOW > 0 else tl.maximum((low + 1) // BLOCK_N * BLOCK_N, start)
    return start, masked


@triton.jit
def _num_splits(
    rows, inside, query_starts, kv_lens, split_keys,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Return the number of splits of each row: one per `split_keys` keys, at most MOST. 0 for rows
    with more queries than fit in a tile.
    """
    begin = tl.load(query_starts + rows, mask=inside, other=0)
    num_queries = tl.load(query_starts + rows + 1, mask=inside, other=0) - begin
    keys = tl.load(kv_lens + rows, mask=inside, other=0)
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW)
    splits = tl.minimum(tl.maximum(tl.cdiv(keys, split_keys), 1), MOST)
    return tl.where(inside & (num_queries * GROUP <= BLOCK_M), splits, 0)


@triton.jit(
    do_not_specialize=["num_rows", "split_keys"],
    do_not_specialize_on_alignment=["query_starts", "kv_lens", "tile_rows", "row_tiles"],
)
def share_out(
    query_starts, kv_lens, tile_rows, row_tiles, num_rows, split_keys,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tiles of short rows, row by row. Grid (rows + 1). MOST: maximum per row, a power of
    two.

    tile_rows: int32 [tiles], the row of each tile. row_tiles: int32 [rows + 1], the first tile of
    each row, then the total number of tiles.
    """
    row = tl.program_id(0)
    first = 0
    for begin in range(0, row, BLOCK):
        others = begin + tl.arange(0, BLOCK)
        first += tl.sum(
            _num_splits(others, others < row, query_starts, kv_lens, split_keys, GROUP, BLOCK_M, WINDOW, MOST)
        )
    tl.store(row_tiles + row, first)
    own = _num_splits(row, row < num_rows, query_starts, kv_lens, split_keys, GROUP, BLOCK_M, WINDOW, MOST)
    split = tl.arange(0, MOST)
    tl.store(tile_rows + first + split, tl.zeros_like(split) + row, mask=split < own)


@triton.jit
def _blocks(table, start, kv_len, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the blocks of BLOCK_N keys from `start`. Keys beyond the row's end get the null block,
    which is all zeros: the row may have no block there, and its last block may hold a previous
    owner's NaN, which a weight of zero does not remove.
    """
    keys = start + tl.arange(0, BLOCK_N)
    return tl.load(table + keys // PAGE, mask=keys < kv_len, other=0)


@triton.jit
def _visit(
    sums, total, peak, query, start, blocks, position, key_cache, value_cache, head, scale, softcap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add one key tile: BLOCK_N keys from `start`, in `blocks`. MASKED if some line may not see
    some of the keys.
    """
    keys = start + tl.arange(0, BLOCK_N)
    place = (blocks.to(tl.int64) * KV_HEADS + head) * PAGE + keys % PAGE
    dims = tl.arange(0, DIMS)
    key = tl.load(key_cache + place[None, :] * HEAD_DIM + dims[:, None], mask=(dims < HEAD_DIM)[:, None], other=0.0)
    # 8-bit pools are widened here.
    scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION)
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores * scale / softcap) - 1)
    if MASKED:
        visible = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    factor = 1.0 if CAPPED else scale
    highest = tl.maximum(peak, tl.max(scores, 1) * factor)
    # A line that has seen no key yet has a peak of -inf, which cannot be subtracted.
    level = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores * factor - level[:, None])
    fade = tl.exp2(peak - level)
    value_dims = tl.arange(0, VALUE_DIMS)
    value = tl.load(
        value_cache + place[:, None] * VALUE_DIM + value_dims[None, :],
        mask=(value_dims < VALUE_DIM)[None, :],
        other=0.0,
    ).to(query.dtype)
    sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision=PRECISION)
    return sums, total * fade + tl.sum(weights, 1), highest


@triton.jit
def _store(
    out, partial_sums, partial_stats, sums, total, peak, tile, token, head, query_head, used, splits, kept,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Store a tile's output: the result, or the partial sums and stats for `merge`."""
    value_dims = tl.arange(0, VALUE_DIMS)
    wanted = used[:, None] & (value_dims < VALUE_DIM)[None, :]
    # A padding row of a captured graph has no keys, so its total weight is 0.
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (token[:, None] * HEADS + query_head[:, None]) * VALUE_DIM + value_dims[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=wanted & (splits == 1))
    if SPLIT:  # noqa: SIM102 -- one is known when it is compiled, the other is not
        if splits > 1:
            line = tl.arange(0, BLOCK_M)
            part = tl.cast(tile, tl.int64) * KV_HEADS + head
            place = (part * kept + line[:, None]) * VALUE_DIM + value_dims[None, :]
            tl.store(partial_sums + place, sums, mask=wanted)
            tl.store(partial_stats + part * 2 * kept + line, peak, mask=used)
            tl.store(partial_stats + (part * 2 + 1) * kept + line, total, mask=used)


@triton.jit
def _attend_tile(
    tile, query, key_cache, value_cache, sinks, out, partial_sums, partial_stats, tile_rows, tile_firsts,
    query_starts, kv_lens, tables, table_lines, table_stride, query_stride, kept, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of `attend`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, row = tl.program_id(0), tl.load(tile_rows + tile)
    if SPLIT:
        begin = tl.load(tile_firsts + row)
        first, split, splits = 0, tile - begin, tl.load(tile_firsts + row + 1) - begin
    else:
        first, split, splits = tl.load(tile_firsts + tile), 0, 1
    num_queries, index, token, query_head, used = _lines(row, first, head, query_starts, GROUP, BLOCK_M)
    kv_len = tl.load(kv_lens + row)
    position = kv_len - num_queries + index
    dims = tl.arange(0, DIMS)
    queries = tl.load(
        query + token[:, None] * query_stride + query_head[:, None] * HEAD_DIM + dims[None, :],
        mask=used[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    low = kv_len - num_queries + first
    end = tl.minimum(kv_len, low + BLOCK_M // GROUP)
    start, masked = _key_range(low, split, BLOCK_N, WINDOW, SPLIT)
    table = tables + tl.load(table_lines + row).to(tl.int64) * table_stride
    step = splits * BLOCK_N
    # Loaded one tile ahead, so that loads of keys and values do not wait for it.
    blocks = _blocks(table, start, kv_len, PAGE, BLOCK_N)
    sums = tl.zeros([BLOCK_M, VALUE_DIMS], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    if SINKS:
        # One more score, of a value of zero, which only the row's first split adds.
        sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32) * 1.4426950408889634
        peak, total = tl.where(split == 0, sink, peak), tl.where(split == 0, 1.0, total)
    for at in range(start, masked, step):
        following = _blocks(table, at + step, kv_len, PAGE, BLOCK_N)
        sums, total, peak = _visit(
            sums, total, peak, queries, at, blocks, position, key_cache, value_cache, head, scale, softcap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, DIMS, VALUE_DIMS, PAGE, BLOCK_N, WINDOW, CAPPED, PRECISION, False,
        )  # fmt: skip
        blocks = following
    for at in range(masked, end, step):
        following = _blocks(table, at + step, kv_len, PAGE, BLOCK_N)
        sums, total, peak = _visit(
            sums, total, peak, queries, at, blocks, position, key_cache, value_cache, head, scale, softcap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, DIMS, VALUE_DIMS, PAGE, BLOCK_N, WINDOW, CAPPED, PRECISION, True,
        )  # fmt: skip
        blocks = following
    _store(
        out, partial_sums, partial_stats, sums, total, peak, tile, token, head, query_head, used, splits, kept,
        HEADS, KV_HEADS, VALUE_DIM, VALUE_DIMS, BLOCK_M, SPLIT,
    )  # fmt: skip


# Arguments that change between steps must not specialize the kernel: compiling takes longer than
# many steps.
@triton.jit(
    do_not_specialize=["table_stride", "num_rows", "kept"],
    do_not_specialize_on_alignment=["tile_rows", "tile_firsts", "query_starts", "kv_lens", "tables", "table_lines"],
)
def attend(
    query, key_cache, value_cache, sinks, out, partial_sums, partial_stats, tile_rows, tile_firsts, query_starts,
    kv_lens, tables, table_lines, table_stride, query_stride, num_rows, kept, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend. Grid (KV_HEADS, tiles), or with SPLIT (KV_HEADS, any number): the device knows the
    number of tiles, and each program takes a share of them. Heads come first, so that programs with
    a tile run on different processors.

    query: [tokens, HEADS, HEAD_DIM], `query_stride` between tokens.
    Caches: [blocks, KV_HEADS, PAGE, dim].
    sinks: [HEADS], with SINKS; one more score per query.
    out: [tokens, HEADS, VALUE_DIM].
    partial_sums, partial_stats: results of split rows for `merge`, float32 [tiles, KV_HEADS, kept,
    VALUE_DIM] and [tiles, KV_HEADS, 2, kept] (peak, total).
    kept: number of lines that any tile uses.
    tile_rows: int32, each tile's row.
    tile_firsts: int32, each tile's first query in its row; with SPLIT, `row_tiles` of `share_out`.
    query_starts: int32 [rows + 1]; kv_lens: int32 [rows].
    tables: int32 [any, table_stride]; row r uses line table_lines[r].
    scale, softcap: multiplied by log2(e), because exp2 is used.
    """
    if SPLIT:
        for tile in range(tl.program_id(1), tl.load(tile_firsts + num_rows), tl.num_programs(1)):
            _attend_tile(
                tile, query, key_cache, value_cache, sinks, out, partial_sums, partial_stats, tile_rows, tile_firsts,
                query_starts, kv_lens, tables, table_lines, table_stride, query_stride, kept, scale, softcap,
                HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, DIMS, VALUE_DIMS, PAGE, BLOCK_M, BLOCK_N, SPLIT, WINDOW, CAPPED,
                SINKS, PRECISION,
            )  # fmt: skip
    else:
        _attend_tile(
            tl.program_id(1), query, key_cache, value_cache, sinks, out, partial_sums, partial_stats, tile_rows,
            tile_firsts, query_starts, kv_lens, tables, table_lines, table_stride, query_stride, kept, scale, softcap,
            HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM, DIMS, VALUE_DIMS, PAGE, BLOCK_M, BLOCK_N, SPLIT, WINDOW, CAPPED,
            SINKS, PRECISION,
        )  # fmt: skip


@triton.jit(do_not_specialize=["kept"], do_not_specialize_on_alignment=["row_tiles", "query_starts"])
def merge(
    partial_sums, partial_stats, out, row_tiles, query_starts, kept,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge one line of a row's splits, CHUNK at a time, into out [tokens, HEADS, VALUE_DIM]. Grid
    (rows, KV_HEADS, kept).
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, head, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(row_tiles + row)
    splits = tl.load(row_tiles + row + 1) - first
    begin = tl.load(query_starts + row)
    index = line // GROUP
    if (splits > 1) & (index < tl.load(query_starts + row + 1) - begin):
        split = tl.arange(0, MOST)
        stats = partial_stats + ((first + split).to(tl.int64) * KV_HEADS + head) * 2 * kept + line
        # At least the first split has seen a key or a sink, so the peak is finite.
        peaks = tl.load(stats, mask=split < splits, other=float("-inf"))
        peak = tl.max(peaks, 0)
        total = tl.sum(tl.load(stats + kept, mask=split < splits, other=0.0) * tl.exp2(peaks - peak), 0)
        value_dims = tl.arange(0, VALUE_DIMS)
        sums = tl.zeros([VALUE_DIMS], dtype=tl.float32)
        for low in range(0, splits, CHUNK):
            some = low + tl.arange(0, CHUNK)
            there = some < splits
            part = (first + some).to(tl.int64) * KV_HEADS + head
            weights = tl.exp2(tl.load(partial_stats + part * 2 * kept + line, mask=there, other=float("-inf")) - peak)
            place = (part * kept + line)[:, None] * VALUE_DIM + value_dims[None, :]
            wanted = there[:, None] & (value_dims < VALUE_DIM)[None, :]
            sums += tl.sum(tl.load(partial_sums + place, mask=wanted, other=0.0) * weights[:, None], 0)
        place = ((begin + index).to(tl.int64) * HEADS + head * GROUP + line % GROUP) * VALUE_DIM + value_dims
        tl.store(out + place, (sums / total).to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)
