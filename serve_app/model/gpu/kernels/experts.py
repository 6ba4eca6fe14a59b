"""A mixture of experts: which experts a token takes, the tokens of each expert side by side, and
their products.

A *pair* is a token and one of its experts: number token * per_token + rank. Pairs of one expert are
cut into tiles of rows. The host knows only how many tiles there may be, so that a CUDA graph can
capture these kernels. A token's result does not depend on other tokens: its products are summed
along the inputs from first to last, and its experts are added from the best score to the lowest.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["slots"])
def route(
    scores, slots, ids, factors, experts,
    PER_TOKEN: tl.constexpr, RANKS: tl.constexpr, RENORMALISED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the PER_TOKEN experts with the largest scores [tokens, experts], of equal ones the
    first. Grid (tokens).

    ids: int32 [tokens, PER_TOKEN], -1 for tokens with a negative slot, which are padding. factors:
    float32 [tokens, PER_TOKEN], the softmax of all scores, or, RENORMALISED, of the chosen ones,
    rounded to the scores' dtype. RANKS: PER_TOKEN rounded up to a power of two.
    """
    token = tl.program_id(0)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    given = tl.load(scores + token.to(tl.int64) * experts + expert, mask=expert < experts, other=float("-inf"))
    left = given.to(tl.float32)
    peak = tl.max(left, 0)
    total = tl.sum(tl.exp(left - peak), 0)
    chosen, found = tl.zeros([RANKS], dtype=tl.float32), tl.zeros([RANKS], dtype=tl.int32)
    for at in tl.static_range(PER_TOKEN):
        best = tl.max(left, 0)
        # With NaN there may be none that equals the largest.
        first = tl.minimum(tl.min(tl.where(left == best, expert, BLOCK), 0), experts - 1)
        chosen, found = tl.where(rank == at, tl.exp(best - peak), chosen), tl.where(rank == at, first, found)
        left = tl.where(expert == first, float("-inf"), left)
    if RENORMALISED:
        total = tl.sum(chosen, 0)
    place = token * PER_TOKEN + rank
    real = tl.load(slots + token) >= 0
    tl.store(ids + place, tl.where(real, found, -1), mask=rank < PER_TOKEN)
    tl.store(factors + place, (chosen / total).to(given.dtype).to(tl.float32), mask=rank < PER_TOKEN)


@triton.jit(do_not_specialize=["pairs"])
def count(ids, counts, pairs, BLOCK: tl.constexpr):
    """Count the pairs of each expert in ids, int32 [pairs], into counts, int32. Grid (experts)."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found += (tl.load(ids + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["pairs", "most"])
def arrange(
    ids, counts, order, tiles, num_tiles, pairs, experts, most,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the pairs expert by expert, each expert's in the order of their numbers, and their
    tiles. Grid (experts).

    order: int32 [pairs]. tiles: int32 [3, most], each tile's expert, first and end in `order`.
    num_tiles: int32 [1].
    """
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_E)
    of_each = tl.load(counts + other, mask=other < experts, other=0)
    tiles_of_each = tl.cdiv(of_each, BLOCK_R)
    first, own = tl.sum(tl.where(other < expert, of_each, 0), 0), tl.sum(tl.where(other == expert, of_each, 0), 0)
    tile = tl.sum(tl.where(other < expert, tiles_of_each, 0), 0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles_of_each, 0))
    for low in range(0, own, BLOCK_R):
        at = tiles + tile + low // BLOCK_R
        tl.store(at, expert)
        tl.store(at + most, first + low)
        tl.store(at + 2 * most, first + own)
    for low in range(0, pairs, BLOCK):
        pair = low + tl.arange(0, BLOCK)
        mine = tl.load(ids + pair, mask=pair < pairs, other=-1) == expert
        place = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + first + place, pair, mask=mine)
        first += tl.sum(mine.to(tl.int32), 0)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["row_scales", "tiles"])
def expert_product(
    x, weight, bias, scales, row_scales, out, order, tiles, num_tiles, most, outputs, inputs,
    PER_TOKEN: tl.constexpr, GATHER: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply each expert's rows by its weight [experts, outputs, inputs]. Grid (tiles of outputs,
    most): the device knows the number of tiles.

    GATHER: x has a row per token, and out a row per pair in `order`. Otherwise x is in `order`, and
    out [pairs, outputs] by the pairs' numbers. scales: float32 [experts, outputs]; bias: [experts,
    outputs]; row_scales: float32, one per row of x. Other arguments: see `matmul.product`.
    """
    tile = tl.program_id(1)
    if tile < tl.load(num_tiles):
        expert = tl.load(tiles + tile).to(tl.int64)
        row = tl.load(tiles + most + tile) + tl.arange(0, BLOCK_R)
        used = row < tl.load(tiles + 2 * most + tile)
        pair = tl.load(order + row, mask=used, other=0)
        source, target = (pair // PER_TOKEN, row) if GATHER else (row, pair)
        output = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
        is_output, is_row = (output < outputs)[:, None], used[None, :]
        k = tl.arange(0, BLOCK_K)
        line = expert * outputs + output
        weights = weight + line[:, None] * inputs + k[None, :]
        rows = x + source.to(tl.int64)[None, :] * inputs + k[:, None]
        sums = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
        for at in range(0, inputs, BLOCK_K):
            left, right = is_output, is_row
            if not EVEN:
                left = left & (at + k < inputs)[None, :]
                right = right & (at + k < inputs)[:, None]
            b = tl.load(rows + at, mask=right, other=0.0)
            a = tl.load(weights + at, mask=left, other=0.0)
            sums = tl.dot(a, b, sums, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_K if SCALED else 0)
        if SCALED:
            sums = sums * tl.load(scales + line[:, None], mask=is_output, other=0.0)
            sums = sums * tl.load(row_scales + source[None, :], mask=is_row, other=0.0)
        if BIASED:
            sums = sums + tl.load(bias + line[:, None], mask=is_output, other=0.0).to(tl.float32)
        place = target.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_output & is_row)


@triton.jit
def clamped_gate_times_up(gate_up, out, width, alpha, limit, BLOCK: tl.constexpr):
    """Compute out [rows, width] = (up + 1) * gate * sigmoid(alpha * gate), with gate at most
    `limit` and up from -limit to limit. Grid (rows, blocks of columns).

    gate_up: [rows, 2 * width].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up + row * 2 * width + column
    gate = tl.minimum(tl.load(source, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    result = (up + 1.0) * (gate * tl.sigmoid(alpha * gate))
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def combine(pairs, ids, factors, out, width, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out [tokens, width], the sum of a token's pairs [tokens * PER_TOKEN, width] times
    their factors. Grid (tokens, blocks of columns). Padding tokens get zeros.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + rank
        real = tl.load(ids + pair) >= 0
        part = tl.load(pairs + pair.to(tl.int64) * width + column, mask=inside & real, other=0.0).to(tl.float32)
        sums += part * tl.load(factors + pair)
    tl.store(out + token.to(tl.int64) * width + column, sums.to(out.dtype.element_ty), mask=inside)
