"""Ragged attention over the paged pool in Triton: online softmax over key tiles, and the merge of split rows.

A program takes a *tile* of one row's queries for one key-value head: `BLOCK_M` lines, being consecutive queries times
the `GROUP` query heads that share the head's keys, so that these are read once for all of them. Prefill chunks and
decode rows differ only in how many lines of a tile are used.

With `SPLITS` > 1 the keys of a row are shared out: key tile i, counted from the first that the tile's first query sees,
belongs to split i mod SPLITS. Each split leaves an unnormalised sum, its peak and its total; `merge` adds them up in
order. So which keys are summed with which, and in what order, depends on positions, tile sizes and SPLITS alone: not on
the rest of the batch, nor, without a window, on how a prompt was cut into chunks of more than a few tokens.

Online softmax: Milakov and Gimelshein, 2018; tiles of it: Dao et al., FlashAttention, 2022; split keys: Flash-Decoding,
Dao et al., 2023.
"""

import triton
import triton.language as tl


@triton.jit
def _lines(tile_rows, tile_firsts, query_starts, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """This program's tile: its row, that row's number of queries, its first query in the row, and of each line the
    query in the row, the packed token, the query head, and whether it is used."""
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_firsts + tile)
    begin = tl.load(query_starts + row)
    num_queries = tl.load(query_starts + row + 1) - begin
    line = tl.arange(0, BLOCK_M)
    index = first + line // GROUP
    used = (index < num_queries) & (line < BLOCK_M // GROUP * GROUP)
    return row, num_queries, first, index, (begin + index).to(tl.int64), head * GROUP + line % GROUP, used


@triton.jit
def _key_range(low, split, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """Where the split's keys begin and where they begin to need a mask, for a tile whose first query is at `low`."""
    if WINDOW > 0:
        start = (tl.maximum(low - WINDOW + 1, 0) // BLOCK_N + split) * BLOCK_N
        masked = start
    else:
        # Before `whole`, every line of the tile sees every key.
        start = split * BLOCK_N
        whole = (low + 1) // BLOCK_N * BLOCK_N
        masked = start + tl.maximum(tl.cdiv(whole - start, SPLITS * BLOCK_N), 0) * SPLITS * BLOCK_N
    return start, masked


@triton.jit
def _visit(
    sums, total, peak, query, start, position, kv_len, table, key_cache, value_cache, head, scale, softcap,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key tile: BLOCK_N keys from `start`. MASKED where some line may not see some of them."""
    keys = start + tl.arange(0, BLOCK_N)
    # Beyond the row's end there may be no block, and in its last block a former owner's NaN, which no weight of zero
    # removes. The null block is all zeros.
    block = tl.load(table + keys // PAGE, mask=keys < kv_len, other=0) if MASKED else tl.load(table + keys // PAGE)
    place = (block.to(tl.int64) * KV_HEADS + head) * PAGE + keys % PAGE
    dims = tl.arange(0, DIMS)
    key = tl.load(key_cache + place[None, :] * HEAD_DIM + dims[:, None], mask=(dims < HEAD_DIM)[:, None], other=0.0)
    # Pools in 8 bits are widened here.
    scores = tl.dot(query, key.to(query.dtype), input_precision=PRECISION) * scale
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    if MASKED:
        visible = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(peak, tl.max(scores, 1))
    # A line that has seen no key yet has a peak of -inf, from which nothing can be subtracted.
    level = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - level[:, None])
    fade = tl.exp2(peak - level)
    value_dims = tl.arange(0, VALUE_DIMS)
    value = tl.load(
        value_cache + place[:, None] * VALUE_DIM + value_dims[None, :],
        mask=(value_dims < VALUE_DIM)[None, :],
        other=0.0,
    ).to(query.dtype)
    sums = tl.dot(weights.to(value.dtype), value, sums * fade[:, None], input_precision=PRECISION)
    return sums, total * fade + tl.sum(weights, 1), highest


# What changes from step to step must not make a kernel of its own: compiling one takes longer than many steps.
@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["tile_rows", "tile_firsts", "query_starts", "kv_lens", "tables"],
)
def attend(
    query, key_cache, value_cache, out, partial_sums, partial_stats, tile_rows, tile_firsts, query_starts, kv_lens,
    tables, table_stride, query_stride, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS, SPLITS).

    query: [tokens, HEADS, HEAD_DIM], `query_stride` between tokens. Caches: [blocks, KV_HEADS, PAGE, dim].
    out: [tokens, HEADS, VALUE_DIM], written when SPLITS is 1. Else partial_sums: float32 [tiles, KV_HEADS, SPLITS,
    BLOCK_M, VALUE_DIM] and partial_stats: float32 [tiles, KV_HEADS, SPLITS, 2, BLOCK_M] (peak, total).
    tile_rows, tile_firsts: int32, each tile's row and its first query in that row. query_starts: int32 [rows + 1],
    kv_lens: int32 [rows], tables: int32 [rows, table_stride]. scale, softcap: times log2(e), as exp2 is used.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head, split = tl.program_id(1), tl.program_id(2)
    row, num_queries, first, index, token, query_head, used = _lines(
        tile_rows, tile_firsts, query_starts, GROUP, BLOCK_M
    )
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
    start, masked = _key_range(low, split, BLOCK_N, SPLITS, WINDOW)
    table = tables + row.to(tl.int64) * table_stride
    sums = tl.zeros([BLOCK_M, VALUE_DIMS], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for at in range(start, masked, SPLITS * BLOCK_N):
        sums, total, peak = _visit(
            sums, total, peak, queries, at, position, kv_len, table, key_cache, value_cache, head, scale, softcap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, DIMS, VALUE_DIMS, PAGE, BLOCK_N, WINDOW, CAPPED, PRECISION, False,
        )  # fmt: skip
    for at in range(masked, end, SPLITS * BLOCK_N):
        sums, total, peak = _visit(
            sums, total, peak, queries, at, position, kv_len, table, key_cache, value_cache, head, scale, softcap,
            KV_HEADS, HEAD_DIM, VALUE_DIM, DIMS, VALUE_DIMS, PAGE, BLOCK_N, WINDOW, CAPPED, PRECISION, True,
        )  # fmt: skip
    value_dims = tl.arange(0, VALUE_DIMS)
    wanted = used[:, None] & (value_dims < VALUE_DIM)[None, :]
    if SPLITS == 1:
        # A padding row of a captured graph has no keys and so no weight.
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (token[:, None] * HEADS + query_head[:, None]) * VALUE_DIM + value_dims[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=wanted)
    else:
        line = tl.arange(0, BLOCK_M)
        part = (tl.program_id(0).to(tl.int64) * KV_HEADS + head) * SPLITS + split
        place = (part * BLOCK_M + line[:, None]) * VALUE_DIM + value_dims[None, :]
        tl.store(partial_sums + place, sums, mask=wanted)
        tl.store(partial_stats + part * 2 * BLOCK_M + line, peak)
        tl.store(partial_stats + (part * 2 + 1) * BLOCK_M + line, total)


@triton.jit(do_not_specialize_on_alignment=["tile_rows", "tile_firsts", "query_starts"])
def merge(
    partial_sums, partial_stats, out, tile_rows, tile_firsts, query_starts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_DIMS: tl.constexpr,
    BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, KV_HEADS): the splits of a tile, in order, into out [tokens, HEADS, VALUE_DIM]."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    _, _, _, _, token, query_head, used = _lines(tile_rows, tile_firsts, query_starts, GROUP, BLOCK_M)
    line = tl.arange(0, BLOCK_M)
    value_dims = tl.arange(0, VALUE_DIMS)
    wanted = used[:, None] & (value_dims < VALUE_DIM)[None, :]
    part = (tl.program_id(0).to(tl.int64) * KV_HEADS + tl.program_id(1)) * SPLITS
    sums = tl.zeros([BLOCK_M, VALUE_DIMS], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for split in range(SPLITS):
        stats = partial_stats + (part + split) * 2 * BLOCK_M + line
        split_peak, split_total = tl.load(stats), tl.load(stats + BLOCK_M)
        place = ((part + split) * BLOCK_M + line[:, None]) * VALUE_DIM + value_dims[None, :]
        split_sums = tl.load(partial_sums + place, mask=wanted, other=0.0)
        highest = tl.maximum(peak, split_peak)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        fade, weight = tl.exp2(peak - level), tl.exp2(split_peak - level)
        sums = sums * fade[:, None] + split_sums * weight[:, None]
        total = total * fade + split_total * weight
        peak = highest
    result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (token[:, None] * HEADS + query_head[:, None]) * VALUE_DIM + value_dims[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=wanted)
