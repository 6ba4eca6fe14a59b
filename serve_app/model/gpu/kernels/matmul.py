"""Products whose rows do not feel each other, in the layers' own format or in 8 bits: sums in one fixed order.

The weights are the left factor, so that few rows make narrow tiles and not half-empty ones, and one kind of
tensor-core instruction computes a row whatever the number of rows. Each output is summed up along the inputs in steps
of BLOCK_K from the first to the last; where there are few outputs, in parts, which keep more of the GPU busy and are
added up in order. How many parts there are is a matter of the weights' shape. Matrix libraries choose order and parts
by the number of rows.
"""

import triton
import triton.language as tl

# How many tiles of outputs share the rows that they read, while these are in the cache.
GROUP = tl.constexpr(8)


@triton.jit
def _finished(
    sums, output, row, is_output, is_row, bias, scales, row_scales, BIASED: tl.constexpr, SCALED: tl.constexpr
):
    """The sums of these outputs and rows with what belongs to them behind the last input."""
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
    """Grid (tiles of outputs times tiles of rows, parts): out [rows, outputs] = x [rows, inputs] times weight^T, plus
    bias.

    weight: [outputs, inputs]; SCALED: both factors in 8 bits, to be multiplied by scales, float32 [outputs], and
    row_scales, float32 [rows]. part: inputs of a part, of which BLOCK_K is a divisor. SPLIT: what is left for
    `add_parts`, out: float32 [parts, rows, outputs]. EVEN: BLOCK_K divides inputs.
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
        # Tensor cores add products of 8 bits in less than float32's bits, so that each step is added by itself.
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
    """Grid (blocks of outputs, rows): out [rows, outputs], the sum of parts, float32 [PARTS, rows, outputs], from the
    first to the last. The others: see `product`."""
    output, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside, place = output < outputs, row.to(tl.int64) * outputs + output
    sums = tl.load(parts + place, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        sums += tl.load(parts + part * rows.to(tl.int64) * outputs + place, mask=inside, other=0.0)
    sums = _finished(sums, output, row, inside, row < rows, bias, scales, row_scales, BIASED, SCALED)
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_rows(x, rounded, row_scales, inputs, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows): x [rows, inputs] in 8 bits, each row times its own scale, float32 [rows].

    LARGEST: the largest number of that format. A row with a NaN or an infinity has a scale of NaN, so that no output
    hides it.
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * inputs
    at = tl.arange(0, BLOCK)
    # As integers, of which NaN and infinity are the largest: maxima of floats leave NaN out.
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
        # The quotient may be rounded to a little more than the largest.
        values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
        tl.store(rounded + start + first + at, values.to(rounded.dtype.element_ty), mask=inside)
