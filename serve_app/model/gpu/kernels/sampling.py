"""Samples one token per row from logits, without the host. `scan_parts` reads every row once, and
`draw` chooses. Before them, `mask_out` applies grammar masks.

A row is cut into parts of PART tokens. Greedy decoding and plain sampling need the parts' maxima
and sums, then one part. Truncation is a threshold on the weight exp((logit - largest) /
temperature). For top-k it is the k-th largest weight. For top-p it is the largest weight at or
above which tokens reach top_p of the sum. The threshold is found by a search over all float32
numbers from 0 to 1: as integers, their bits have the same order. Each round tries WAYS thresholds
at once and reads only parts whose maximum reaches the lowest of them, which after two rounds are
few.

One program computes each row in a fixed order, independent of other rows.
`serve_app.model.sampling.sampler` defines the parameters.
"""

import triton
import triton.language as tl

from serve_app.model.sampling.columns import Column

COLUMNS = tl.constexpr(len(Column))
TEMPERATURE, TOP_K, TOP_P = (tl.constexpr(int(column)) for column in (Column.TEMPERATURE, Column.TOP_K, Column.TOP_P))
MIN_P, NOISE = tl.constexpr(int(Column.MIN_P)), tl.constexpr(int(Column.NOISE))
# As a signed integer: one more than the bits of 1.0, the largest weight.
ABOVE_ONE = tl.constexpr(0x3F800001)


@triton.jit
def mask_out(logits, masks, vocab, mask_bytes, PART: tl.constexpr):
    """Set the logits of masked-out tokens to -inf, in place. Grid (masks, parts).

    logits: float32 [rows, vocab]. masks: uint8 [masks, mask_bytes]: the row number in three bytes,
    then one bit per token. Lowest byte and lowest bit first.
    """
    mask = masks + tl.program_id(0).to(tl.int64) * mask_bytes
    row = tl.load(mask).to(tl.int64) + tl.load(mask + 1).to(tl.int64) * 256 + tl.load(mask + 2).to(tl.int64) * 65536
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    bits = tl.load(mask + 3 + token // 8, mask=token < vocab, other=255).to(tl.int32)
    left_out = (token < vocab) & (((bits >> (token % 8)) & 1) == 0)
    tl.store(logits + row * vocab + token, float("-inf"), mask=left_out)


@triton.jit
def scan_parts(logits, parameters, maxima, firsts, sums, vocab, parts, PART: tl.constexpr):
    """Compute each part's largest logit, the first token that has it, and the part's sum of
    weights. Grid (rows, parts).

    logits: [rows, vocab]; parameters: float64 [rows, COLUMNS], by `Column`; maxima, sums: float32
    [rows, parts]; firsts: int32 [rows, parts]. Sums are relative to the part's own maximum. A part
    with NaN has a maximum of infinity.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row.to(tl.int64) * vocab + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    largest = tl.max(values, 0)
    temperature = tl.load(parameters + row * COLUMNS + TEMPERATURE).to(tl.float32)
    level = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp((values - level) / tl.where(temperature > 0.0, temperature, 1.0)), 0)
    place = row * parts + part
    tl.store(maxima + place, tl.where(broken, float("inf"), largest))
    tl.store(firsts + place, part * PART + tl.argmax(values, 0, tie_break_left=True))
    tl.store(sums + place, total)


@triton.jit
def _weights(logits, part, largest, temperature, vocab, PART: tl.constexpr):
    """Return the weights of a part's tokens, relative to the row's largest. `logits` points to the
    row.
    """
    token = part * PART + tl.arange(0, PART)
    values = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.exp((values - largest) / temperature)


@triton.jit
def _highest_threshold(
    logits, maxima, parts, largest, temperature, vocab, low, needed, PART: tl.constexpr, WAYS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Return the largest threshold from `low` up, as bits, whose tokens reach `needed`: in number
    if COUNT, else in total weight.

    Returns `low` if no higher threshold does.
    """
    high = tl.full([], ABOVE_ONE, tl.int32)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        tried = low + step * tl.arange(0, WAYS)
        found = tl.zeros([WAYS], dtype=tl.float32)
        for part in range(parts):
            best = tl.exp((tl.load(maxima + part) - largest) / temperature)
            if best.to(tl.int32, bitcast=True) >= low:
                weights = _weights(logits, part, largest, temperature, vocab, PART)
                value = tl.full([PART], 1.0, tl.float32) if COUNT else weights
                reaches = weights.to(tl.int32, bitcast=True)[None, :] >= tried[:, None]
                found += tl.sum(tl.where(reaches, value[None, :], 0.0), 1)
        # The first threshold is known to be low enough, even if rounding makes its sum too small.
        enough = tl.maximum(tl.sum((found >= needed).to(tl.int32), 0), 1)
        high = tl.minimum(high, low + step * enough)
        low = low + step * (enough - 1)
    return low


@triton.jit
def _sums_above(
    logits, maxima, parts, largest, temperature, vocab, threshold, PART: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Return the total weight of each part's tokens at or above the threshold: float64 [PARTS]."""
    index = tl.arange(0, PARTS)
    sums = tl.zeros([PARTS], dtype=tl.float64)
    for part in range(parts):
        best = tl.exp((tl.load(maxima + part) - largest) / temperature)
        if best.to(tl.int32, bitcast=True) >= threshold:
            weights = _weights(logits, part, largest, temperature, vocab, PART)
            kept = tl.where(weights.to(tl.int32, bitcast=True) >= threshold, weights, 0.0)
            sums = tl.where(index == part, tl.sum(kept, 0).to(tl.float64), sums)
    return sums


@triton.jit
def _first_above(weights, index, target):
    """Return the first index where the cumulative float64 weights exceed the target. If rounding
    lifts the target to the total, return the first index that reaches the total.
    """
    cumulated = tl.cumsum(weights, 0)
    last = tl.sum((cumulated < tl.max(cumulated, 0)).to(tl.int32), 0)
    return tl.minimum(tl.sum((cumulated <= target).to(tl.int32), 0), last)


@triton.jit
def draw(
    logits, parameters, maxima, firsts, sums, token_ids, vocab, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Choose token_ids int64 [rows], after `scan_parts`. Grid (rows). -1 if the largest logit is
    NaN or infinity, -2 if it is -inf. PARTS: a power of two, at least `parts`.
    """
    row = tl.program_id(0)
    index = tl.arange(0, PARTS)
    maxima += row * parts
    logits += row.to(tl.int64) * vocab
    best = tl.load(maxima + index, mask=index < parts, other=float("-inf"))
    largest = tl.max(best, 0)
    token = tl.load(firsts + row * parts + tl.argmax(best, 0, tie_break_left=True))
    token = tl.where(largest < float("inf"), token, -1)
    token = tl.where(largest > float("-inf"), token, -2)
    temperature = tl.load(parameters + row * COLUMNS + TEMPERATURE).to(tl.float32)
    if (token >= 0) & (temperature > 0.0):
        top_k = tl.load(parameters + row * COLUMNS + TOP_K).to(tl.float32)
        top_p = tl.load(parameters + row * COLUMNS + TOP_P).to(tl.float32)
        min_p = tl.load(parameters + row * COLUMNS + MIN_P).to(tl.float32)
        threshold = tl.full([], 0, tl.int32)
        kept = tl.load(sums + row * parts + index, mask=index < parts, other=0.0)
        kept = (kept * tl.exp((best - largest) / temperature)).to(tl.float64)
        if top_k > 0.0:
            threshold = _highest_threshold(
                logits, maxima, parts, largest, temperature, vocab, threshold, top_k, PART, WAYS, True
            )
            kept = _sums_above(logits, maxima, parts, largest, temperature, vocab, threshold, PART, PARTS)
        if top_p < 1.0:
            needed = top_p * tl.sum(kept, 0).to(tl.float32)
            threshold = _highest_threshold(
                logits, maxima, parts, largest, temperature, vocab, threshold, needed, PART, WAYS, False
            )
        threshold = tl.maximum(threshold, min_p.to(tl.int32, bitcast=True))
        if (top_p < 1.0) | (min_p > 0.0):
            kept = _sums_above(logits, maxima, parts, largest, temperature, vocab, threshold, PART, PARTS)
        target = tl.load(parameters + row * COLUMNS + NOISE) * tl.sum(kept, 0)
        part = _first_above(kept, index, target)
        weights = _weights(logits, part, largest, temperature, vocab, PART)
        weights = tl.where(weights.to(tl.int32, bitcast=True) >= threshold, weights, 0.0).to(tl.float64)
        before = tl.sum(tl.where(index < part, kept, 0.0), 0)
        token = part * PART + _first_above(weights, tl.arange(0, PART), target - before)
    tl.store(token_ids + row, token.to(tl.int64))
