"""The kernels' inner functions against torch, in every build, and the pool of threads."""

import ctypes
import threading
from ctypes import c_int, c_void_p

import pytest
import torch
import torch.nn.functional as F

from tests.model.cpu.conftest import call
from tests.model.cpu.test_linear import quantized


def test_exponential(shim: ctypes.CDLL) -> None:
    x = torch.cat(
        [torch.linspace(-87.2, 88, 4000), torch.tensor([0.0, -0.0, -1e-30, -87.4, -1e30, -float("inf")] * 16)]
    )
    out = torch.empty_like(x)
    call(shim.test_exponential, x, x.shape[0], out)
    torch.testing.assert_close(out[:4000].double(), x[:4000].double().exp(), rtol=2.5e-7, atol=0)
    assert out[4000:4006].tolist() == [1, 1, 1, 0, 0, 0]
    nan = torch.full((16,), float("nan"))
    call(shim.test_exponential, nan, 16, out)
    assert bool(out[:16].isnan().all())


def test_rough_exponential2(shim: ctypes.CDLL) -> None:
    x = torch.cat([torch.linspace(-100, 8, 4000), torch.tensor([0.0, -0.0, -126.1, -1e30, -float("inf"), -1e-30] * 16)])
    out = torch.empty_like(x)
    shim.test_rough_exponential2.argtypes = [c_void_p, c_int, c_void_p]
    if not shim.test_rough_exponential2(x.data_ptr(), x.shape[0], out.data_ptr()):
        pytest.skip("the portable build has none")
    torch.testing.assert_close(out[:4000].double(), x[:4000].double().exp2(), rtol=4e-6, atol=0)
    assert out[4000:4006].tolist() == [1, 1, 0, 0, 0, 1]
    nan = torch.full((16,), float("nan"))
    call(shim.test_rough_exponential2, nan, 16, out)
    assert bool(out[:16].isnan().all())


def test_rms_norm(shim: ctypes.CDLL) -> None:
    x, weight = torch.randn(576) * 5, torch.randn(576)
    out = torch.empty(576)
    call(shim.test_rms_norm, x, weight, 1e-5, 576, out)
    torch.testing.assert_close(out, F.rms_norm(x.double(), (576,), weight.double(), 1e-5).float(), rtol=1e-6, atol=1e-6)


def test_rotate_leaves_the_rest_of_the_head(shim: ctypes.CDLL) -> None:
    head, angles = torch.randn(64), torch.randn(20)
    expected = head.clone()
    expected[:20] = head[:20] * angles.cos() - head[20:40] * angles.sin()
    expected[20:40] = head[20:40] * angles.cos() + head[:20] * angles.sin()
    call(shim.test_rotate, head, angles.cos(), angles.sin(), 20)
    torch.testing.assert_close(head, expected)


@pytest.mark.parametrize(("head_dim", "part"), [(64, 64), (128, 64), (96, 32), (80, 16)])
def test_spread_keeps_products_and_evens_out_numbers(shim: ctypes.CDLL, head_dim: int, part: int) -> None:
    query, key, single = torch.randn(head_dim), torch.randn(head_dim), torch.zeros(head_dim)
    single[head_dim - 3] = 1
    product = query @ key
    for head in (query, key, single):
        if not shim.test_spread(c_void_p(head.data_ptr()), head_dim):
            pytest.skip("the portable build has none")
    torch.testing.assert_close(query @ key, product, rtol=0, atol=1e-4)
    torch.testing.assert_close(single[-part:].abs(), torch.full((part,), part**-0.5))


@pytest.mark.parametrize("activation", [0, 1])
def test_gated(shim: ctypes.CDLL, activation: int) -> None:
    gate, up = torch.cat([torch.randn(2000) * 4, torch.linspace(-200, 200, 48)]), torch.randn(2048)
    out = torch.empty(2048)
    call(shim.test_gated, gate, up, activation, 2048, out)
    wide = gate.double()
    expected = (F.gelu(wide, approximate="tanh") if activation else F.silu(wide)) * up
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


def test_round_activations(shim: ctypes.CDLL) -> None:
    x = torch.randn(320) * torch.logspace(-6, 6, 320)
    x[64:96] = 0
    q, scale, total = torch.empty(320, dtype=torch.int8), torch.empty(10), torch.empty(10)
    call(shim.test_round_activations, x, 320, 1, q, scale, total)
    values, outlier = (q.view(10, 32) * scale[:, None]).view(1, -1), x.abs().argmax()
    assert q[outlier] == 0
    values[0, outlier] = x[outlier]  # which is kept as a float
    torch.testing.assert_close(values, quantized(x[None]), rtol=1e-6, atol=0)
    torch.testing.assert_close(total, scale * q.view(10, 32).sum(1), rtol=1e-6, atol=0)
    assert q.view(10, 32).abs().amax(1).tolist() == [127, 127, 0, *[127] * 7]


def test_round_activations_to_three_bytes(shim: ctypes.CDLL) -> None:
    """Their number keeps as many bits of a group's largest value as a float has, and the same step
    for the others."""
    x = torch.randn(320) * torch.logspace(-6, 6, 320)
    x[64:96] = 0
    q, scale, total = torch.empty(10, 3, 32, dtype=torch.int8), torch.empty(10), torch.empty(10)
    call(shim.test_round_activations, x, 320, 3, q, scale, total)
    number = (q.double() * torch.tensor([65536.0, 256.0, 1.0], dtype=torch.float64)[:, None]).sum(1)
    assert number.abs().amax(1).tolist() == [2**22 - 1, 2**22 - 1, 0, *[2**22 - 1] * 7]
    groups = x.double().view(10, 32)
    error = (number * scale[:, None] - groups).abs().amax(1)
    assert bool((error <= groups.abs().amax(1) * 2**-22).all())
    torch.testing.assert_close(total.double(), scale * number.sum(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("num_bytes", [1, 3])
@pytest.mark.parametrize(("groups", "at"), [(3, 40), (7, 40), (7, 127), (7, 128), (7, 223)])
def test_round_activations_does_not_hide_what_is_no_number(
    shim: ctypes.CDLL, num_bytes: int, bad: float, groups: int, at: int
) -> None:
    """Alone, among four groups, and in those that are rounded twice since no four are left."""
    x = torch.randn(32 * groups)
    x[at] = bad
    q, scale, total = torch.empty(groups, num_bytes, 32, dtype=torch.int8), torch.empty(groups), torch.empty(groups)
    call(shim.test_round_activations, x, 32 * groups, num_bytes, q, scale, total)
    assert total.isnan().tolist() == scale.isnan().tolist() == [group == at // 32 for group in range(groups)]


@pytest.mark.parametrize("groups", range(4, 10))
def test_groups_are_rounded_by_fours_as_alone(shim: ctypes.CDLL, groups: int) -> None:
    """Numbers of all sizes, ties between two steps and a group of zeros among them."""
    x = torch.randn(groups, 32) * torch.logspace(-30, 30, groups)[:, None]
    x[1], x[2, :4], x[3] = 0.0, torch.tensor([127.0, 0.5, 1.5, -2.5]), 1e-41

    def rounded(part: torch.Tensor) -> list[torch.Tensor]:
        """Behind a group that has the row's largest number, which is kept as a float."""
        row = torch.cat([torch.eye(1, 32) * 1e38, part])
        found = [torch.empty(*row.shape, dtype=torch.int8), torch.empty(len(row)), torch.empty(len(row))]
        call(shim.test_round_activations, row, row.numel(), 1, *found)
        return [values[1:] for values in found]

    alone = [rounded(group[None]) for group in x]
    for together, single in zip(rounded(x), zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(single))


def test_half_precision_is_torchs(shim: ctypes.CDLL) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, generator=generator) * torch.logspace(-9, 4.8, 4096)
    x[:4] = torch.tensor([0.0, -0.0, 65504.0, -65504.0])
    bits, scalar_bits = torch.empty(4096, dtype=torch.int16), torch.empty(4096, dtype=torch.int16)
    back, scalars_back = torch.empty(4096), torch.empty(4096)
    call(shim.test_halves, x, 4096, bits, scalar_bits, back, scalars_back)
    expected = x.clamp(-65504, 65504).half()
    for got, values in ((bits, back), (scalar_bits, scalars_back)):
        assert torch.equal(got, expected.view(torch.int16))
        assert torch.equal(values, expected.float())


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_chunk_runs_once(shim: ctypes.CDLL, num_threads: int) -> None:
    shim.pool_new.restype, shim.pool_new.argtypes = c_void_p, [c_int]
    shim.pool_free.restype, shim.pool_free.argtypes = None, [c_void_p]
    shim.test_parallel.argtypes = [c_void_p, c_int, c_int, c_void_p]
    counts = torch.zeros(7, dtype=torch.int32)

    def work() -> None:
        pool = shim.pool_new(num_threads)
        for num_chunks in (7, 1, 2, 0, 7):
            shim.test_parallel(pool, num_chunks, 200, counts.data_ptr())
        shim.pool_free(pool)

    # Two pools at a time: engines of one process do not share theirs.
    others = [threading.Thread(target=work) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert counts.tolist() == [2 * 200 * n for n in (4, 3, 2, 2, 2, 2, 2)]
