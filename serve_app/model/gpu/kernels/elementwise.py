"""The element-wise parts of a Llama-like layer in Triton. Each is one kernel; torch needs two to
ten.

Every line is computed independently in float32, and rounded where the models round. Kernels are not
specialized on arguments that change between steps: compiling takes longer than many steps.
"""

import triton
import triton.language as tl


@triton.jit
def _normed(value, weight, column, inside, width, eps, ROUNDED: tl.constexpr):
    """Return value / rms(value) * weight. ROUNDED: also before the weight."""
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    if ROUNDED:
        wide = wide.to(value.dtype).to(tl.float32)
    return (wide * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)).to(value.dtype)


@triton.jit
def add_rms_norm(
    residual, x, x_weight, weight, out, width, eps,
    ADD: tl.constexpr, NORMED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With ADD, add x to residual in place; with NORMED too, x / rms(x) * x_weight. Then out =
    residual / rms(residual) * weight. Grid (rows).

    residual, x, out: [rows, width], contiguous; weight, x_weight: [width].
    """
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(residual + row + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(x + row + column, mask=inside, other=0.0)
        if NORMED:
            added = _normed(added, x_weight, column, inside, width, eps, ROUNDED)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(residual + row + column, value, mask=inside)
    tl.store(out + row + column, _normed(value, weight, column, inside, width, eps, ROUNDED), mask=inside)


@triton.jit
def gate_times_up(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out [rows, width] = activation(gate) * up, from gate_up [rows, 2 * width]. Grid
    (rows, blocks of columns).

    The activation is SiLU, or the tanh form of GELU. A program stays within one row, so that loads
    are as wide as possible.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = gate_up + row * 2 * width + column
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + width, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        wide = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
    else:
        wide = wide * tl.sigmoid(wide)
    result = wide.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * width + column, result.to(gate.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["positions", "slots"])
def rotate_and_store(
    qkv, query, key_cache, value_cache, query_norm, key_norm, cos, sin, positions, slots, num_tokens, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    ROTATED: tl.constexpr, NORMED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize heads, apply rotary positions, and write keys and values to their KV slots. Grid
    (blocks of tokens, HEADS + 2 KV_HEADS).

    qkv: [tokens, (HEADS + 2 KV_HEADS) * HEAD_DIM]; query: [tokens, HEADS, HEAD_DIM]; caches:
    [blocks, KV_HEADS, PAGE, HEAD_DIM]; cos, sin: float32 [positions, ROTATED]; positions, slots:
    int64 [tokens]. Tokens with a negative slot are not stored. HALF: HEAD_DIM / 2 rounded up to a
    power of two. ROUNDED: see `_normed`. Dimension i rotates with i + ROTATED (RoFormer, Su et al.,
    2021, in transformers' order); those from 2 ROTATED on stay.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    real = token < num_tokens
    dim = tl.arange(0, HALF)
    inside = real[:, None] & (dim < HEAD_DIM // 2)[None, :]
    # Each thread has pairs of dimensions: those that rotate together, then any two of the rest.
    first, second = dim, dim + HEAD_DIM // 2
    if ROTATED != HEAD_DIM // 2:
        first, second = tl.where(dim < ROTATED, dim, dim + ROTATED), tl.where(dim < ROTATED, dim + ROTATED, second)
    source = qkv + (token.to(tl.int64)[:, None] * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    low = tl.load(source + first[None, :], mask=inside, other=0.0)
    high = tl.load(source + second[None, :], mask=inside, other=0.0)
    slot = tl.load(slots + token, mask=real, other=-1)
    stored = inside & (slot >= 0)[:, None]
    if head >= HEADS + KV_HEADS:
        place = (slot // PAGE * KV_HEADS + head - HEADS - KV_HEADS) * PAGE + slot % PAGE
        value = value_cache + place[:, None] * HEAD_DIM
        tl.store(value + first[None, :], low.to(value_cache.dtype.element_ty), mask=stored)
        tl.store(value + second[None, :], high.to(value_cache.dtype.element_ty), mask=stored)
    else:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        if NORMED:
            norm = query_norm if head < HEADS else key_norm
            squares = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)
            factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            weight_low = tl.load(norm + first, mask=dim < HEAD_DIM // 2, other=0.0).to(tl.float32)
            weight_high = tl.load(norm + second, mask=dim < HEAD_DIM // 2, other=0.0).to(tl.float32)
            wide_low, wide_high = wide_low * factor, wide_high * factor
            if ROUNDED:
                wide_low, wide_high = wide_low.to(low.dtype).to(tl.float32), wide_high.to(low.dtype).to(tl.float32)
            wide_low, wide_high = wide_low * weight_low[None, :], wide_high * weight_high[None, :]
        if ROTATED > 0:
            turning = inside
            if ROTATED != HEAD_DIM // 2:
                turning = inside & (dim < ROTATED)[None, :]
            angle = tl.load(positions + token, mask=real, other=0)[:, None] * ROTATED + dim[None, :]
            cosine = tl.load(cos + angle, mask=turning, other=1.0)
            sine = tl.load(sin + angle, mask=turning, other=0.0)
            wide_low, wide_high = wide_low * cosine - wide_high * sine, wide_high * cosine + wide_low * sine
        turned_low, turned_high = wide_low.to(low.dtype), wide_high.to(low.dtype)
        if head < HEADS:
            turned = query + (token.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM
            tl.store(turned + first[None, :], turned_low, mask=inside)
            tl.store(turned + second[None, :], turned_high, mask=inside)
        else:
            place = (slot // PAGE * KV_HEADS + head - HEADS) * PAGE + slot % PAGE
            key = key_cache + place[:, None] * HEAD_DIM
            tl.store(key + first[None, :], turned_low.to(key_cache.dtype.element_ty), mask=stored)
            tl.store(key + second[None, :], turned_high.to(key_cache.dtype.element_ty), mask=stored)
