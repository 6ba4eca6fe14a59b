"""The element-wise kernels against transformers' and torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from serve_app.model.attention_backend import LayerCache

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Absolute and relative; bfloat16 has 8 bits, and the kernels round less often than the modules."""
DTYPES = list(TOLERANCE)

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576])
def test_add_rms_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    from serve_app.model.gpu import ops

    norm = LlamaRMSNorm(width, 1e-5).to(device, dtype)
    norm.weight.data = random(width, dtype=dtype, device=device, seed=1)
    residual, x = (random(5, width, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    with torch.inference_mode():
        torch.testing.assert_close(
            ops.add_rms_norm(residual, None, norm.weight, 1e-5),
            norm(residual),
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype],
        )
        expected = residual + x
        got = ops.add_rms_norm(residual, x, norm.weight, 1e-5)
        torch.testing.assert_close(got, norm(expected), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(residual, expected, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms_of_what_is_added(dtype: torch.dtype, device: torch.device) -> None:
    """Gemma's, whose weights are stored minus one and multiplied before the result is rounded."""
    from serve_app.model.gpu import ops

    norms = [Gemma3RMSNorm(576).to(device, dtype) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight.data = random(576, dtype=dtype, device=device, seed=seed + 5)
    factors = [norm.weight.float() + 1 for norm in norms]
    residual, x = (random(5, 576, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    with torch.inference_mode():
        expected = residual + norms[0](x)
        got = ops.add_rms_norm(residual, x, factors[1], 1e-6, factors[0])
        # Sums of squares are in another order, which changes the last bit of few numbers.
        last = 2e-6 if dtype == torch.float32 else 2e-3
        torch.testing.assert_close(residual, expected, rtol=last, atol=2 * last)
        torch.testing.assert_close(got, norms[1](expected), rtol=last, atol=2 * last)
        if dtype == torch.float16:
            assert (residual == expected).float().mean() > 0.99
            assert (got == norms[1](residual)).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_gate_times_up(gelu: bool, dtype: torch.dtype, device: torch.device) -> None:
    from serve_app.model.gpu import ops

    both = 3 * random(7, 2 * 300, dtype=dtype, device=device)
    gate, up = both.split(300, dim=1)
    expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    torch.testing.assert_close(
        ops.gate_times_up(both, gelu=gelu),
        expected,
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "head_dim", "rotated", "normed"),
    [
        (3, 64, 64, True),
        (70, 64, 64, False),
        (5, 80, 80, True),
        (5, 80, 32, True),
        (40, 64, 16, False),
        (5, 64, 0, True),
    ],
)
def test_rotate_and_store(
    tokens: int, head_dim: int, rotated: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Some tokens have no slot. Keys and values of all others are where they belong, and nothing
    else has changed. `rotated` dimensions of each head turn, from the first on."""
    from serve_app.model.gpu import ops

    heads, kv_heads, page, blocks = 4, 2, 16, 6
    qkv = random(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1)).to(device)
    angles = torch.outer(torch.arange(50.0), 100 ** -(torch.arange(0, rotated, 2) / max(rotated, 1))).to(device)
    norms = [LlamaRMSNorm(head_dim, 1e-6).to(device, dtype) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight.data = random(head_dim, dtype=dtype, device=device, seed=seed + 5)
    slots = (torch.randperm(blocks * page, generator=torch.Generator().manual_seed(2))[:tokens]).to(device)
    slots[1] = -1
    cache = LayerCache(
        *(torch.full((blocks, kv_heads, page, head_dim), 7.0, dtype=dtype, device=device) for _ in range(2))
    )
    weights = (norms[0].weight.data, norms[1].weight.data) if normed else None
    got = torch.empty(tokens, heads, head_dim, dtype=dtype, device=device)
    angles_ = (angles.cos(), angles.sin()) if rotated else None
    ops.rotate_and_store(qkv, weights, 1e-6, angles_, positions, slots, cache, got, few=tokens < 32)

    query, key, value = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    with torch.inference_mode():
        if normed:
            query, key = norms[0](query), norms[1](key)
        cos, sin = (torch.cat([part[positions]] * 2, dim=-1)[None] for part in (angles.cos(), angles.sin()))
        turned = apply_rotary_pos_emb(*(x[..., :rotated].transpose(0, 1)[None] for x in (query, key)), cos, sin)
        query, key = (
            torch.cat([part[0].transpose(0, 1), rest[..., rotated:]], dim=-1)
            for part, rest in zip(turned, (query, key), strict=True)
        )
    torch.testing.assert_close(got, query.to(dtype), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    written = torch.zeros(blocks * page, dtype=torch.bool, device=device)
    written[slots[slots >= 0]] = True
    for pool, new, tolerance in zip(cache, (key.to(dtype), value), (TOLERANCE[dtype], 0.0), strict=True):
        by_slot = pool.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(by_slot[slots[slots >= 0]], new[slots >= 0], rtol=tolerance, atol=tolerance)
        assert bool((by_slot[~written] == 7.0).all())
