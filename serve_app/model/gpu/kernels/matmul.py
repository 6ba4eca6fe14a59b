"""Products whose rows do not feel each other: weights in the layers' own format or in 8 bits, sums in one fixed order.

The weights are the left factor, so that few rows make narrow tiles and not half-empty ones, and one kind of
tensor-core instruction computes a row whatever the number of rows: each output is summed up along the inputs in steps
of BLOCK_K from the first to the last, never in parts. Matrix libraries choose order and parts by the number of rows.
"""

import triton
import triton.language as tl

# How many tiles of outputs share the rows that they read, while these are in the cache.
GROUP = tl.constexpr(8)


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, bias, scales, out, rows, outputs, inputs,
    BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr,
    SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of outputs times tiles of rows): out [rows, outputs] = x [rows, inputs] times weight^T, plus bias.

    weight: [outputs, inputs]; SCALED: in 8 bits, to be multiplied by scales, float32 [outputs]. EVEN: BLOCK_K divides
    inputs.
    """
    output_tiles, row_tiles = tl.cdiv(outputs, BLOCK_O), tl.cdiv(rows, BLOCK_R)
    program = tl.program_id(0)
    first = program // (GROUP * row_tiles) * GROUP
    group = tl.minimum(output_tiles - first, GROUP)
    inside = program % (GROUP * row_tiles)
    output = (first + inside % group) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = inside // group * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    weights = weight + output.to(tl.int64)[:, None] * inputs + k[None, :]
    factors = x + row.to(tl.int64)[None, :] * inputs + k[:, None]
    sums = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
    for at in range(0, inputs, BLOCK_K):
        left = (output < outputs)[:, None]
        right = (row < rows)[None, :]
        if not EVEN:
            left = left & (at + k < inputs)[None, :]
            right = right & (at + k < inputs)[:, None]
        b = tl.load(factors + at, mask=right, other=0.0)
        a = tl.load(weights + at, mask=left, other=0.0).to(b.dtype)
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
    if SCALED:
        sums = sums * tl.load(scales + output, mask=output < outputs, other=0.0)[:, None]
    if BIASED:
        sums = sums + tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[:, None]
    place = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, sums.to(out.dtype.element_ty), mask=(output < outputs)[:, None] & (row < rows)[None, :])
