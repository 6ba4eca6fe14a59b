"""Packed weights and their products against torch, in every build."""

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serve_app.model.cpu.ops import GROUP, Arithmetic, Format, Kernels, PackedWeight
from serve_app.model.cpu.stored import Blocks, StoredMatrix

BYTES = [Format.Q8, Format.Q4, Format.Q4S]
"""The formats of bytes without super-blocks."""
FORMATS = [Format.F32, Format.BF16, *BYTES]
ODD_SHAPES = [(1, 32), (31, 64), (33, 96), (200, 576), (65, 160)]
"""[outputs, inputs]: less and more than a panel of every build, depths that are no multiple of what
is unpacked."""


def random_weight(format: Format, outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """A weight that the format holds exactly, made the way files of it are read."""
    generator = torch.Generator().manual_seed(seed)
    if format in (Format.F32, Format.BF16):
        weight = torch.randn(outputs, inputs, generator=generator)
        return weight.bfloat16().float() if format == Format.BF16 else weight
    groups = (outputs, inputs // GROUP)
    scale = (torch.rand(*groups, 1, generator=generator) * 0.01 + 1e-4).half().float()
    if format == Format.Q4:
        q = torch.randint(0, 16, (*groups, GROUP), generator=generator)
        q[..., 3], q[..., 17] = 0, 15
        low = (torch.randn(*groups, 1, generator=generator) * 0.05).half().float()
        return (scale * q + low).view(outputs, inputs)
    low, end = (-8, 8) if format == Format.Q4S else (-127, 128)
    q = torch.randint(low, end, (*groups, GROUP), generator=generator)
    q[..., 5] = low
    return (scale * q).view(outputs, inputs)


def quantized(x: Tensor) -> Tensor:
    """x [rows, inputs] as int8 mode sees it: the largest number of a row as it is, the others in
    groups of 32 in steps of their largest size / 127."""
    outlier = x.abs().argmax(1, keepdim=True)
    groups = x.scatter(1, outlier, 0.0).view(x.shape[0], -1, GROUP)
    size = groups.abs().amax(-1, keepdim=True)
    # a tensor: torch divides a plain number by multiplying with the reciprocal
    largest = torch.tensor(127.0)
    q = (groups * torch.where(size > 0, largest / size, 0.0)).round()
    return (q * (size / 127.0)).view(x.shape).scatter(1, outlier, x.gather(1, outlier))


def seen_by_int8(kernels: Kernels, weight: PackedWeight, values: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A weight without a bias, which has these values, and x as int8 mode multiplies them in this
    build. In tiles both are rounded to bfloat16, weights by at most 0.7 of its units."""
    if not kernels.has_tiles:
        return values, quantized(x)
    rounded = kernels.linear(weight, torch.eye(weight.inputs), Arithmetic.INT8).T
    unit = torch.exp2(values.abs().clamp_min(1e-30).log2().floor() - 7)
    assert bool(((rounded - values).abs() <= 0.7 * unit + 2.0**-21 * values.abs().amax()).all())
    assert torch.equal(rounded.bfloat16().float(), rounded)
    return rounded, x.bfloat16().float()


def packed(kernels: Kernels, weight: Tensor, bias: Tensor | None, format: Format) -> PackedWeight:
    result = pack(kernels, weight, bias, format, exactly=True)
    assert result is not None
    return result


def pack(
    kernels: Kernels, weight: Tensor, bias: Tensor | None, format: Format, *, exactly: bool
) -> PackedWeight | None:
    stored = StoredMatrix.of(weight)
    if format == Format.Q4S:  # which only files have
        blocks = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0)
        stored = StoredMatrix(blocks.reshape(-1), Blocks.Q4_0, *weight.shape)
    part = kernels.pack([stored], format, exactly=exactly)
    return None if part is None else PackedWeight([part], bias, kernels.panel)


def need_bfloat16(kernels: Kernels) -> None:
    if not kernels.multiplies_bfloat16:
        pytest.skip(f"the build {kernels.build} has no products in bfloat16")


def check(got: Tensor, weight: Tensor, x: Tensor, bias: Tensor | None) -> None:
    """Rounding errors are measured against the sizes of everything that was added, the bias among
    it."""
    x, weight = x.double(), weight.double()
    bias = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.double()
    expected = torch.nn.functional.linear(x, weight, bias)
    size = torch.nn.functional.linear(x.abs(), weight.abs(), bias.abs()).amax().clamp_min(1e-30)
    assert float((got.double() - expected).abs().max() / size) < 1e-6


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 13, 97, 200])
@pytest.mark.parametrize("format", FORMATS)
def test_float_products(kernels: Kernels, format: Format, rows: int, threads: None) -> None:
    outputs, inputs = ODD_SHAPES[rows % len(ODD_SHAPES)]
    weight = random_weight(format, outputs, inputs)
    x, bias = torch.randn(rows, inputs), torch.randn(outputs) if rows % 2 else None
    got = kernels.linear(packed(kernels, weight, bias, format), x, Arithmetic.EXACT)
    assert got.shape == (rows, outputs)
    check(got, weight, x, bias)


@pytest.mark.parametrize("inputs", ["outliers", "one sign"])
@pytest.mark.parametrize("format", FORMATS)
def test_exact_products_are_as_near_to_the_truth_as_floats(kernels: Kernels, format: Format, inputs: str) -> None:
    """Also where one activation of a group is a thousand times the others; or where one weight of a
    group is much larger than the others, and all activations have one sign but that weight's, which
    is zero."""
    weight = random_weight(format, 64, 1536)
    x = torch.randn(16, 1536)
    if inputs == "outliers":
        x[:, ::96] *= 1000
    else:
        x = x.abs() + 3
        x[:, 5::GROUP] = 0
        if format in (Format.Q8, Format.Q4S):
            most, large = (3, 127) if format == Format.Q8 else (1, 8)
            q = torch.randint(-most, most + 1, (64, 1536 // GROUP, GROUP))
            q[..., 5] = -large
            weight = (0.0078125 * q).view(64, 1536)
    expected = x.double() @ weight.double().T
    got = kernels.linear(packed(kernels, weight, None, format), x, Arithmetic.EXACT)
    floats = torch.nn.functional.linear(x, weight)
    # One product after the other: what float arithmetic costs without the many partial sums of a
    # library.
    chain = torch.zeros(16, 64)
    for k in range(1536):
        chain = torch.addcmul(chain, x[:, k : k + 1], weight[:, k])
    error, by_floats, by_chain = ((y.double() - expected).square().mean().sqrt() for y in (got, floats, chain))
    assert error <= max(by_floats, by_chain) * 1.05


@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 97])
@pytest.mark.parametrize("format", BYTES)
def test_int8_products(kernels: Kernels, format: Format, rows: int, shape: tuple[int, int]) -> None:
    weight, bias = random_weight(format, *shape), torch.randn(shape[0])
    x = torch.randn(rows, shape[1]) * 3
    x[0, :GROUP] = 0
    seen = seen_by_int8(kernels, packed(kernels, weight, None, format), weight, x)
    check(kernels.linear(packed(kernels, weight, bias, format), x, Arithmetic.INT8), *seen, bias)


def test_extreme_bytes_do_not_saturate(kernels: Kernels) -> None:
    """All weights at the ends of their range and all activations at 127: sums that 16 bits cannot
    hold."""
    weight = torch.full((64, 64), 127.0)
    weight[1::2] = -127.0
    x = torch.ones(3, 64)
    got = kernels.linear(packed(kernels, weight, None, Format.Q8), x, Arithmetic.INT8)
    torch.testing.assert_close(got, x @ weight.T, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("arithmetic", "format"),
    [
        *((Arithmetic.EXACT, format) for format in FORMATS),
        *((Arithmetic.INT8, format) for format in BYTES),
        (Arithmetic.BFLOAT16, Format.BF16),
    ],
)
def test_a_row_has_the_same_bits_in_every_batch(
    kernels: Kernels, arithmetic: Arithmetic, format: Format, threads: None
) -> None:
    if arithmetic is Arithmetic.BFLOAT16:
        need_bfloat16(kernels)
    weight = packed(kernels, random_weight(format, 70, 224), None, format)
    x = torch.randn(203, 224)
    whole = kernels.linear(weight, x, arithmetic)
    for first, last in ((0, 1), (7, 8), (3, 5), (0, 11), (90, 103), (101, 203)):
        assert torch.equal(kernels.linear(weight, x[first:last], arithmetic), whole[first:last])


@given(rows=st.integers(1, 230), outputs=st.integers(1, 170), groups=st.integers(1, 60), seed=st.integers(0, 2**31))
def test_bfloat16_products(kernels: Kernels, rows: int, outputs: int, groups: int, seed: int) -> None:
    """Both sides rounded once, sums as near to the truth as floats. Each row's bits are those that
    it has alone."""
    need_bfloat16(kernels)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, GROUP * groups, generator=generator)
    x, bias = torch.randn(rows, GROUP * groups, generator=generator), torch.randn(outputs, generator=generator)
    packed_weight = pack(kernels, weight, bias, Format.BF16, exactly=False)
    assert packed_weight is not None
    got = kernels.linear(packed_weight, x, Arithmetic.BFLOAT16)
    check(got, weight.bfloat16(), x.bfloat16(), bias)
    row = seed % rows
    assert torch.equal(kernels.linear(packed_weight, x[row : row + 1], Arithmetic.BFLOAT16)[0], got[row])


@given(
    format=st.sampled_from(BYTES),
    rows=st.integers(1, 230),
    outputs=st.integers(1, 170),
    groups=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_exact_products_of_bytes(
    kernels: Kernels, format: Format, rows: int, outputs: int, groups: int, seed: int
) -> None:
    """Sums as near to the truth as floats; each row's bits are those that it has alone."""
    generator = torch.Generator().manual_seed(seed)
    weight = random_weight(format, outputs, GROUP * groups, seed)
    x, bias = torch.randn(rows, GROUP * groups, generator=generator), torch.randn(outputs, generator=generator)
    packed_weight = packed(kernels, weight, bias, format)
    got = kernels.linear(packed_weight, x, Arithmetic.EXACT)
    check(got, weight, x, bias)
    row = seed % rows
    assert torch.equal(kernels.linear(packed_weight, x[row : row + 1], Arithmetic.EXACT)[0], got[row])


def test_bfloat16_does_not_hide_what_is_no_number(kernels: Kernels) -> None:
    need_bfloat16(kernels)
    weight = packed(kernels, torch.eye(64), None, Format.BF16)
    x = torch.zeros(3, 64)
    x[0, 5], x[1, 6] = float("nan"), float("inf")
    finite = kernels.linear(weight, x, Arithmetic.BFLOAT16).isfinite().all(1)
    assert finite.tolist() == [False, False, True]


def test_bfloat16_is_refused_where_there_is_none(kernels: Kernels) -> None:
    weight, x = torch.randn(8, 64), torch.randn(2, 64)
    with pytest.raises(ValueError, match="no product in bfloat16"):
        kernels.linear(packed(kernels, weight, None, Format.F32), x, Arithmetic.BFLOAT16)
    if not kernels.multiplies_bfloat16:
        with pytest.raises(ValueError, match="no product in bfloat16"):
            kernels.linear(packed(kernels, weight.bfloat16().float(), None, Format.BF16), x, Arithmetic.BFLOAT16)


@pytest.mark.parametrize("format", [Format.BF16, Format.Q8, Format.Q4])
def test_one_value_that_does_not_fit_is_noticed(kernels: Kernels, format: Format) -> None:
    weight = random_weight(format, 40, 64)
    assert pack(kernels, weight, None, format, exactly=True) is not None
    weight[39, 40] = torch.nextafter(weight[39, 40], torch.tensor(9.0))
    assert pack(kernels, weight, None, format, exactly=True) is None


def test_inputs_that_are_no_whole_groups_are_refused(kernels: Kernels) -> None:
    assert pack(kernels, torch.randn(8, 48), None, Format.Q8, exactly=False) is None


def test_any_weight_in_8_bits(kernels: Kernels) -> None:
    """Nearest values: no weight moves by more than half a step of its group, and a little as its
    ends are rounded."""
    weight = torch.randn(50, 96)
    weight[4, :GROUP] = 0.25
    packed_weight = pack(kernels, weight, None, Format.Q8, exactly=False)
    assert packed_weight is not None
    got = kernels.linear(packed_weight, torch.eye(96), Arithmetic.EXACT).T
    groups = weight.view(50, -1, GROUP)
    step = (groups.amax(-1) - groups.amin(-1)).repeat_interleave(GROUP, dim=1) / 255
    assert bool(((got - weight).abs() <= 0.7 * step + 1e-3 * weight.abs()).all())


def test_a_weight_of_other_inputs_is_refused(kernels: Kernels) -> None:
    weight = packed(kernels, torch.randn(8, 64), None, Format.F32)
    with pytest.raises(ValueError, match="32 inputs for a weight of 64"):
        kernels.linear(weight, torch.randn(2, 32), Arithmetic.EXACT)


@given(
    format=st.sampled_from(BYTES),
    rows=st.integers(1, 14),
    outputs=st.integers(1, 40),
    groups=st.integers(1, 9),
    seed=st.integers(0, 2**20),
)
def test_byte_products_are_exact_integers(
    kernels: Kernels, format: Format, rows: int, outputs: int, groups: int, seed: int
) -> None:
    """Weights that are whole numbers and activations that are whole steps, both often at the ends
    of their ranges: no build may round or saturate."""
    generator = torch.Generator().manual_seed(seed)
    low, high = {Format.Q8: (-128, 127), Format.Q4: (0, 15), Format.Q4S: (-8, 7)}[format]
    weight = torch.randint(low, high + 1, (outputs, groups, GROUP), generator=generator)
    x = torch.randint(-127, 128, (rows, groups, GROUP), generator=generator)
    extreme = torch.rand(groups, generator=generator) < 0.5
    weight[:, extreme] = torch.where(weight[:, extreme] > (low + high) // 2, high, low)
    x[:, extreme] = torch.where(x[:, extreme] > 0, 127, -127)
    weight[..., 3], weight[..., 17] = low, high  # so that the steps are 1
    x[..., 5], x[..., 6] = 127, -127  # two, as the largest number of a row is multiplied as a float
    # 8 bits from -128 on are no file's, but the nearest ones to these numbers are these numbers.
    packed_weight = pack(kernels, weight.view(outputs, -1).float(), None, format, exactly=format != Format.Q8)
    assert packed_weight is not None
    got = kernels.linear(packed_weight, x.view(rows, -1).float(), Arithmetic.INT8)
    expected = x.view(rows, -1).double() @ weight.view(outputs, -1).double().T
    assert torch.equal(got.double(), expected)


@given(
    rows=st.sampled_from([1, 2, 7, 97]),
    shape=st.sampled_from(ODD_SHAPES),
    format=st.sampled_from(FORMATS),
    sign=st.sampled_from([1.0, 0.0, -1.0]),
    seed=st.integers(0, 2**16),
)
def test_likeliest_outputs_are_the_first_of_the_largest(
    kernels: Kernels, rows: int, shape: tuple[int, int], format: Format, sign: float, seed: int
) -> None:
    """Also where several are equal (each weight is there twice), both zeros among them, and where
    all are below what fills the last panel."""
    outputs, inputs = shape
    once = random_weight(format, outputs, inputs, seed)
    bias = None if sign > 0 else torch.zeros(2 * outputs) if sign == 0 else torch.full((2 * outputs,), -1e3)
    weight = packed(kernels, torch.cat([once, once]), bias, format)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * abs(sign)
    logits = kernels.linear(weight, x, Arithmetic.EXACT)
    assert kernels.likeliest(weight, x, Arithmetic.EXACT).tolist() == logits.numpy().argmax(1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("arithmetic", [Arithmetic.EXACT, Arithmetic.INT8])
@pytest.mark.parametrize("format", [Format.F32, *BYTES])
def test_likeliest_outputs_are_none_where_one_is_not_finite(
    kernels: Kernels, format: Format, arithmetic: Arithmetic, bad: float
) -> None:
    weight = packed(kernels, random_weight(format, 200, 576), None, format)
    x = torch.randn(21, 576)
    x[4, 100] = bad
    got = kernels.likeliest(weight, x, arithmetic)
    assert got[4] == -1
    others = [row for row in range(21) if row != 4]
    assert got[others].equal(kernels.linear(weight, x, arithmetic)[others].argmax(1))
