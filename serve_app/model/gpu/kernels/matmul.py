"""Products with independent rows, in the layers' dtype or in 8 bits: all sums have one fixed order.

The weights are the left factor, so that few rows make narrow tiles instead of half-empty ones, and
the same tensor-core instruction computes a row for any number of rows. Each output is summed along
the inputs from first to last, in steps of BLOCK_K. If there are few outputs, the inputs are split
into parts, which use more of the GPU and are added in order. The number of parts depends only on
the weights' shape. Matrix libraries choose order and parts by the number of rows.
"""

import triton
import triton.language as tl

# Number of output tiles that share the rows they read while those are cached.
GROUP = tl.constexpr(8)


@triton.jit
def _finished(
    sums, output, row, is_output, is_row, bias, scales, row_scales, BIASED: tl.constexpr, SCALED: tl.constexpr
):
    """Apply scales and bias to the finished sums of these outputs and rows."""
    if SCALED:
        sums = sums * tl.load(scales + output, mask=is_output, other=0.0)
        sums = sums * tl.load(row_scales + row, mask=is_row, other=0.0)
    if BIASED:
        sums = sums + tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["row_scales"])
def product(
    x, weight, bias, scales, row_scales, out, rows, outputs, inputs, part,
    BLOCK_O: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, BIASED: tl.constexpr,
    SCALED: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, outputs] = x [rows, inputs] times weight^T, plus bias. Grid (tiles of
    outputs times tiles of rows, parts).

    weight: [outputs, inputs]. SCALED: both factors are in 8 bits; the result is multiplied by
    scales, float32 [outputs], and row_scales, float32 [rows]. part: inputs per part, a multiple of
    BLOCK_K. SPLIT: out is float32 [parts, rows, outputs], and `add_parts` adds the parts. EVEN:
    BLOCK_K divides inputs.
    """
    output_tiles, row_tiles = tl.cdiv(outputs, BLOCK_O), tl.cdiv(rows, BLOCK_R)
    program = tl.program_id(0)
    first = program // (GROUP * row_tiles) * GROUP
    group = tl.minimum(output_tiles - first, GROUP)
    inside = program % (GROUP * row_tiles)
    output = (first + inside % group) * BLOCK_O + tl.arange(0, BLOCK_O)
    row = inside // group * BLOCK_R + tl.arange(0, BLOCK_R)
    is_output, is_row = (output < outputs)[:, None], (row < rows)[None, :]
    k = tl.arange(0, BLOCK_K)
    weights = weight + output.to(tl.int64)[:, None] * inputs + k[None, :]
    factors = x + row.to(tl.int64)[None, :] * inputs + k[:, None]
    start = tl.program_id(1) * part
    sums = tl.zeros([BLOCK_O, BLOCK_R], dtype=tl.float32)
    for at in range(start, tl.minimum(start + part, inputs), BLOCK_K):
        left, right = is_output, is_row
        if not EVEN:
            left = left & (at + k < inputs)[None, :]
            right = right & (at + k < inputs)[:, None]
        b = tl.load(factors + at, mask=right, other=0.0)
        a = tl.load(weights + at, mask=left, other=0.0)
        # Tensor cores accumulate 8-bit products in fewer bits than float32, so each step is added
        # separately.
        sums = tl.dot(a, b, sums, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_K if SCALED else 0)
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    if SPLIT:
        place += tl.program_id(1).to(tl.int64) * rows * outputs
    else:
        sums = _finished(
            sums, output[:, None], row[None, :], is_output, is_row, bias, scales, row_scales, BIASED, SCALED
        )
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=is_output & is_row)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["row_scales"])
def add_parts(
    parts, bias, scales, row_scales, out, rows, outputs,
    PARTS: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, outputs], the sum of parts, float32 [PARTS, rows, outputs], from first to
    last. Grid (blocks of outputs, rows). Other arguments: see `product`.
    """
    output, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside, place = output < outputs, row.to(tl.int64) * outputs + output
    sums = tl.load(parts + place, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        sums += tl.load(parts + part * rows.to(tl.int64) * outputs + place, mask=inside, other=0.0)
    sums = _finished(sums, output, row, inside, row < rows, bias, scales, row_scales, BIASED, SCALED)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_rows(x, rounded, row_scales, inputs, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Round x [rows, inputs] to 8 bits, with a scale per row in row_scales, float32 [rows]. Grid
    (rows).

    LARGEST: largest number of the 8-bit format. A row with NaN or infinity gets a scale of NaN, so
    that it shows in every output.
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * inputs
    at = tl.arange(0, BLOCK)
    # As integers, where NaN and infinity are the largest: float maxima ignore NaN.
    peaks = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, inputs, BLOCK):
        values = tl.load(x + start + first + at, mask=first + at < inputs, other=0.0)
        peaks = tl.maximum(peaks, tl.abs(values.to(tl.float32)).to(tl.int32, bitcast=True))
    bits = tl.max(peaks, 0)
    finite = bits < 0x7F800000
    peak = tl.where(finite, bits, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(peak, 1e-12) / LARGEST
    tl.store(row_scales + row, tl.where(finite, scale, float("nan")))
    for first in range(0, inputs, BLOCK):
        inside = first + at < inputs
        values = tl.load(x + start + first + at, mask=inside, other=0.0).to(tl.float32) / scale
        # Rounding may lift the quotient slightly above the largest number.
        values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        tl.store(rounded + start + first + at, values.to(rounded.dtype.element_ty), mask=inside)
