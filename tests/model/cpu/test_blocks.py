"""Weights packed from the blocks that GGUF files have, against the widened values that gguf's own
reader gives."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serve_app.model.cpu.ops import Arithmetic, Format, Kernels, PackedPart, PackedWeight
from serve_app.model.cpu.stored import Blocks, StoredMatrix
from tests.model.cpu.test_linear import check, seen_by_int8

OWN_FORMAT = {
    Blocks.F32: Format.F32,
    Blocks.F16: Format.F32,
    Blocks.BF16: Format.BF16,
    Blocks.Q4_0: Format.Q4S,
    Blocks.Q4_1: Format.Q4,
    Blocks.Q5_0: Format.Q8,
    Blocks.Q5_1: Format.Q8,
    Blocks.Q8_0: Format.Q8,
    Blocks.Q4_K: Format.Q4K,
    Blocks.Q5_K: Format.F32,
    Blocks.Q6_K: Format.Q6K,
    Blocks.MXFP4: Format.MX4,
}
"""Which format holds the values of each kind of block exactly."""
HALVES = {Blocks.Q4_1: (0, 1), Blocks.Q5_1: (0, 1), Blocks.Q4_K: (0, 1), Blocks.Q5_K: (0, 1), Blocks.Q6_K: (104,)}
"""Which 16-bit numbers of a block are in half precision; of the others that have any, the first."""


def random_blocks(blocks: Blocks, outputs: int, inputs: int, seed: int = 0) -> StoredMatrix:
    """Any bytes, but for scales about as large as those of files."""
    rng = np.random.default_rng(seed)
    if blocks in (Blocks.F32, Blocks.F16, Blocks.BF16):
        dtype = {Blocks.F32: torch.float32, Blocks.F16: torch.float16, Blocks.BF16: torch.bfloat16}[blocks]
        return StoredMatrix.of(torch.from_numpy(rng.normal(size=(outputs, inputs))).to(dtype))
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(blocks)]
    data = rng.integers(0, 256, (outputs * inputs // weights, size), dtype=np.uint8)
    if blocks is Blocks.MXFP4:
        data[:, 0] = rng.integers(117, 121, len(data))
        return StoredMatrix(data.reshape(-1), blocks, outputs, inputs)
    words = data.view(np.uint16) if size % 2 == 0 else data
    for place in HALVES.get(blocks, (0,)):
        scales = rng.uniform(-0.01, 0.01, words.shape[0]).astype(np.float16)
        words[:, place] = scales.view(np.uint16)
    return StoredMatrix(data.reshape(-1), blocks, outputs, inputs)


def widened(matrix: StoredMatrix) -> Tensor:
    rows = matrix.data.reshape(matrix.outputs, -1)
    values = torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType(matrix.blocks)).copy())
    return values if matrix.order is None else values[torch.from_numpy(matrix.order)]


def pack(kernels: Kernels, matrix: StoredMatrix, format: Format, *, exactly: bool = True) -> PackedPart:
    part = kernels.pack([matrix], format, exactly=exactly)
    assert part is not None
    return part


def weight(kernels: Kernels, *parts: PackedPart, bias: Tensor | None = None) -> PackedWeight:
    return PackedWeight(parts, bias, kernels.panel)


@pytest.mark.parametrize("blocks", list(Blocks), ids=lambda blocks: blocks.name)
def test_every_value_is_the_files(kernels: Kernels, blocks: Blocks) -> None:
    """To the last bit, in the format of its own and in floats. A part of floats lets both be
    multiplied as floats."""
    matrix = random_blocks(blocks, kernels.panel, 512)
    for format in {OWN_FORMAT[blocks], Format.F32}:
        floats = pack(kernels, random_blocks(Blocks.F32, 3, 512), Format.F32)
        both = weight(kernels, pack(kernels, matrix, format), floats)
        values = kernels.linear(both, torch.eye(512), Arithmetic.EXACT)[:, : matrix.outputs].T
        assert torch.equal(values, widened(matrix))


@pytest.mark.parametrize("blocks", list(Blocks), ids=lambda blocks: blocks.name)
def test_the_nearest_bytes_are_near(kernels: Kernels, blocks: Blocks) -> None:
    matrix, x = random_blocks(blocks, 50, 512), torch.eye(512)
    expected = widened(matrix)
    values = kernels.linear(weight(kernels, pack(kernels, matrix, Format.Q8, exactly=False)), x, Arithmetic.EXACT).T
    groups = expected.view(50, -1, 32)
    step = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(32, dim=1) / 255
    assert bool(((values - expected).abs() <= 0.7 * step + 1e-3 * expected.abs().amax()).all())


def test_a_row_that_does_not_fit_is_packed_again(kernels: Kernels) -> None:
    """The second block's minimum is too large for half precision, which shows when the first one is
    packed already."""
    data = random_blocks(Blocks.Q8_0, 1, 64).data.reshape(2, 34).copy()
    data[:, :2] = np.array([[0.01], [600.0]], np.float16).view(np.uint8)
    matrix = StoredMatrix(data.reshape(-1), Blocks.Q8_0, 1, 64)
    packed = weight(kernels, pack(kernels, matrix, Format.Q8, exactly=False))
    first = kernels.linear(packed, torch.eye(64), Arithmetic.EXACT)[:32, 0]
    assert bool(((first - widened(matrix)[0, :32]).abs() <= 0.01).all())


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 13, 97])
@pytest.mark.parametrize("outputs", [1, 31, 70])
@pytest.mark.parametrize("blocks", [Blocks.Q4_0, Blocks.Q4_K, Blocks.Q6_K, Blocks.MXFP4])
@pytest.mark.wide
def test_products_of_a_files_own_numbers(
    kernels: Kernels, blocks: Blocks, rows: int, outputs: int, threads: None
) -> None:
    matrix, bias = random_blocks(blocks, outputs, 768), torch.randn(outputs)
    x = torch.randn(rows, 768) * 3
    x[0, :32] = 0
    part = pack(kernels, matrix, OWN_FORMAT[blocks])
    packed = weight(kernels, part, bias=bias)
    seen = seen_by_int8(kernels, weight(kernels, part), widened(matrix), x)
    check(kernels.linear(packed, x, Arithmetic.INT8), *seen, bias)
    check(kernels.linear(packed, x, Arithmetic.EXACT), widened(matrix), x, bias)


@given(
    blocks=st.sampled_from([Blocks.Q4_0, Blocks.Q8_0, Blocks.Q4_K, Blocks.Q6_K, Blocks.MXFP4]),
    arithmetic=st.sampled_from([Arithmetic.EXACT, Arithmetic.INT8]),
    rows=st.integers(1, 230),
    outputs=st.integers(1, 170),
    depth=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_a_row_has_the_bits_that_it_has_alone(
    kernels: Kernels, blocks: Blocks, arithmetic: Arithmetic, rows: int, outputs: int, depth: int, seed: int
) -> None:
    matrix = random_blocks(blocks, outputs, 256 * depth, seed)
    packed = weight(kernels, pack(kernels, matrix, OWN_FORMAT[blocks]))
    x = torch.randn(rows, 256 * depth, generator=torch.Generator().manual_seed(seed))
    row = seed % rows
    together = kernels.linear(packed, x, arithmetic)[row]
    assert torch.equal(kernels.linear(packed, x[row : row + 1], arithmetic)[0], together)


@pytest.mark.parametrize("second", [Blocks.Q8_0, Blocks.Q6_K, Blocks.Q4_0])
def test_parts_of_several_formats_are_one_matrix(kernels: Kernels, second: Blocks, threads: None) -> None:
    """As q, k and v of a file are. A row has the same bits alone and in every batch."""
    matrices = [random_blocks(blocks, 2 * kernels.panel, 512) for blocks in (Blocks.Q4_K, second, Blocks.Q4_1)]
    matrices.append(random_blocks(Blocks.Q4_K, 5, 512, seed=1))
    parts = [pack(kernels, matrix, OWN_FORMAT[matrix.blocks]) for matrix in matrices]
    packed = weight(kernels, *parts, bias=torch.zeros(6 * kernels.panel + 5))
    x = torch.randn(131, 512)
    expected = torch.cat([widened(matrix) for matrix in matrices])
    seen = {
        Arithmetic.EXACT: (expected, x),
        Arithmetic.INT8: seen_by_int8(kernels, weight(kernels, *parts), expected, x),
    }
    for arithmetic, (weights, inputs) in seen.items():
        whole = kernels.linear(packed, x, arithmetic)
        check(whole, weights, inputs, None)
        for first, last in ((0, 1), (7, 8), (3, 5), (0, 11), (90, 103)):
            assert torch.equal(kernels.linear(packed, x[first:last], arithmetic), whole[first:last])


@pytest.mark.parametrize("blocks", [Blocks.Q4_0, Blocks.Q4_K, Blocks.Q6_K, Blocks.MXFP4])
def test_whole_numbers_at_the_ends_of_their_ranges(kernels: Kernels, blocks: Blocks) -> None:
    """No build may round or saturate: sums of the smallest and largest weights and activations of
    one sign, and of both."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(blocks)]
    ends = np.repeat(np.array([[0], [0xFF], [0], [0xFF]], np.uint8), size, axis=1)
    if blocks is Blocks.Q6_K:
        ends[:2, 192:208], ends[2:, 192:208] = 127, 128  # s: 127 and -128
    if blocks is Blocks.MXFP4:  # 6 and -6
        ends[:, 0], ends[:2, 1:], ends[2:, 1:] = 128, 0x77, 0xFF
    for place in () if blocks is Blocks.MXFP4 else HALVES.get(blocks, (0,)):
        ends.view(np.uint16)[:, place] = np.float16(1).view(np.uint16)
    matrix = StoredMatrix(np.repeat(ends, 256 // weights, axis=0).reshape(-1), blocks, 4, 256)
    packed = weight(kernels, pack(kernels, matrix, OWN_FORMAT[blocks]))
    x = torch.full((9, 256), 127.0)
    x[3:6] *= -1
    x[6:, 1::2] *= -1
    got = kernels.linear(packed, x, Arithmetic.INT8)
    weights, inputs = seen_by_int8(kernels, packed, widened(matrix), x)
    assert torch.equal(got.double(), inputs.double() @ weights.double().T)
    whole = x.sign() * 128  # whose sums floats hold, too
    check(kernels.linear(packed, whole, Arithmetic.EXACT), widened(matrix), whole, None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("arithmetic", [Arithmetic.EXACT, Arithmetic.INT8])
@pytest.mark.parametrize("blocks", [Blocks.Q4_0, Blocks.Q8_0, Blocks.Q4_K, Blocks.Q6_K, Blocks.MXFP4])
def test_what_is_not_finite_shows_in_every_output(
    kernels: Kernels, blocks: Blocks, arithmetic: Arithmetic, bad: float
) -> None:
    packed = weight(kernels, pack(kernels, random_blocks(blocks, 70, 512), OWN_FORMAT[blocks]))
    x = torch.randn(14, 512)
    good = kernels.linear(packed, x, arithmetic)
    x[2, 77], x[11, 500] = bad, bad
    got = kernels.linear(packed, x, arithmetic)
    assert not bool(got[[2, 11]].isfinite().any())
    others = [row for row in range(14) if row not in (2, 11)]
    assert torch.equal(got[others], good[others])


def test_the_smallest_and_largest_scales_of_mxfp4(kernels: Kernels) -> None:
    """Groups of zeros may have any scale. Weights of the two smallest scales are no normal numbers:
    floats hold them."""
    matrix = random_blocks(Blocks.MXFP4, 4, 64)
    data = matrix.data.reshape(-1, 17).copy()
    data[:4, 0] = 0, 1, 2, 252
    data[:2, 1:] = 0x80
    held = StoredMatrix(data.reshape(-1), Blocks.MXFP4, 4, 64)
    got = kernels.linear(weight(kernels, pack(kernels, held, Format.MX4)), torch.eye(64), Arithmetic.EXACT).T
    assert torch.equal(got[2:], widened(held)[2:])
    for scale in (0, 1, 255):
        data[5, 0] = scale
        other = StoredMatrix(data.reshape(-1), Blocks.MXFP4, 4, 64)
        assert kernels.pack([other], Format.MX4, exactly=True) is None
        if scale != 255:
            values = kernels.linear(weight(kernels, pack(kernels, other, Format.F32)), torch.eye(64), Arithmetic.EXACT)
            assert torch.equal(values.T, widened(other))


def test_rows_in_another_order(kernels: Kernels) -> None:
    """llama.cpp's files have the rows of q and k interleaved."""
    order = np.random.default_rng(0).permutation(40)
    plain = random_blocks(Blocks.Q4_0, 40, 64)
    matrix = StoredMatrix(plain.data, plain.blocks, 40, 64, order)
    got = kernels.linear(weight(kernels, pack(kernels, matrix, Format.F32)), torch.eye(64), Arithmetic.EXACT).T
    assert torch.equal(got, widened(plain)[torch.from_numpy(order)])


def test_bytes_that_are_no_such_matrix_are_refused(kernels: Kernels) -> None:
    matrix = random_blocks(Blocks.Q4_0, 4, 64)
    with pytest.raises(ValueError, match="not a matrix of 5 x 64"):
        kernels.pack([StoredMatrix(matrix.data, matrix.blocks, 5, 64)], Format.F32, exactly=True)


def test_super_blocks_need_whole_ones(kernels: Kernels) -> None:
    matrix = random_blocks(Blocks.Q4_0, 4, 64)
    assert kernels.pack([matrix], Format.Q4K, exactly=True) is None
