"""Each Triton kernel alone against torch on the same device. Parity checks rotation and storing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_app.model.attention.reference import ReferenceAttention
from serve_app.model.attention.verification import verify_backend
from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, block_matrix
from serve_app.model.gpu import ops, sampling
from serve_app.model.gpu.attention import TritonAttention
from serve_app.model.gpu.experts import GpuExperts
from serve_app.model.gpu.linear import GpuLinear, round_rows
from serve_app.model.gpu.weights import ModuleWeights
from serve_app.model.records import Activation, Experts, Linear, Stack

Compare = Callable[[torch.device, torch.dtype], dict[str, Any]]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Tolerance, relative to the sum of the expected value and the standard deviation."""


def comparisons(*, full: bool) -> dict[str, Compare]:
    """Return the comparisons by name. full: widths and shapes of real models, else tiny ones."""
    heads = ((32, 8, 128), (16, 8, 128), (32, 8, 64), (8, 4, 256)) if full else ((4, 2, 32),)
    layers = {f"attention {h}/{k}x{d}": AttentionLayer(h, k, d, d, d**-0.5) for h, k, d in heads}
    h, k, d = heads[0]
    if full:
        layers[f"attention {h}/{k}x{d}, window"] = AttentionLayer(h, k, d, d, d**-0.5, sliding_window=100)
        layers[f"attention {h}/{k}x{d}, softcap"] = AttentionLayer(h, k, d, d, d**-0.5, softcap=50.0)
    width, vocab = (4096, 151_936) if full else (64, 3000)
    rows = (1, 16, 64, 300, 2100) if full else (1, 5)
    return {
        **{name: partial(_attention, layer, False) for name, layer in layers.items()},
        "attention, deterministic": partial(_attention, next(iter(layers.values())), True),
        "attention, a long row beside short ones": partial(_long_row, AttentionLayer(h, k, d, d, d**-0.5), full),
        "norm": partial(_norm, width),
        "gate times up": partial(_gate, width),
        "product, invariant": partial(_product, width, rows, False),
        "product, fp8 weights": partial(_product, width, rows, True),
        "experts": partial(_experts, (128, 8, 2048, 768) if full else (6, 2, 64, 32), rows),
        "sampling": partial(_sampling, vocab),
    }


def _attention(layer: AttentionLayer, deterministic: bool, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    problem = verify_backend(TritonAttention(deterministic=deterministic), [layer], dtype, device)
    return {"passed": problem is None, "problem": problem}


def _long_row(layer: AttentionLayer, full: bool, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Compare decode rows whose keys are split over one, two, some and the maximum number
    of tiles."""
    lengths = [1, 130, 2000, 20_000] if full else [1, 130, 300]
    backend, reference = TritonAttention(), ReferenceAttention()
    size = backend.block_size
    blocks = [-(-length // size) for length in lengths]
    order = torch.split(torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)) + 1, blocks)
    batch = AttentionBatch(
        list(range(len(lengths) + 1)),
        lengths,
        block_matrix([table.tolist() for table in order]),
        torch.tensor(
            [int(table[-1]) * size + (length - 1) % size for table, length in zip(order, lengths, strict=True)],
            device=device,
        ),
    )
    caches = [found.allocate(layer, 1 + sum(blocks), dtype, device) for found in (backend, reference)]
    for ours, theirs in zip(*caches, strict=True):
        ours.copy_(_random(*ours.shape, device=device, dtype=dtype))
        theirs.copy_(ours.transpose(1, 2))
    query, key, value = (
        _random(heads, len(lengths), layer.head_dim, device=device, dtype=dtype)
        for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    )
    got = backend.forward(layer, query, key, value, caches[0], backend.build(batch))
    # Row by row: the more keys, the smaller the mean of their values.
    return _agree(got, reference.forward(layer, query, key, value, caches[1], reference.build(batch)), dtype)


def _norm(width: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    residual, x, weight = (_random(*shape, device=device, dtype=dtype) for shape in ((9, width), (9, width), (width,)))
    total = residual + x
    got = ops.add_rms_norm(residual, x, weight, 1e-6)
    return _agree((got, residual), (F.rms_norm(total.float(), (width,), weight.float(), 1e-6), total), dtype)


def _gate(width: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    both = _random(9, 2 * width, device=device, dtype=dtype)
    gate, up = both.float().chunk(2, dim=1)
    found = [ops.gate_times_up(both, gelu=gelu) for gelu in (False, True)]
    return _agree(found, [F.silu(gate) * up, F.gelu(gate, approximate="tanh") * up], dtype)


def _product(width: int, rows: tuple[int, ...], fp8: bool, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    weight = _random(width // 2 + 64, width, device=device, dtype=dtype) / width**0.5
    linear = GpuLinear.of(Linear((weight,), ()), ModuleWeights(weight), fp8=fp8, invariant=not fp8)
    inputs = [_random(count, width, device=device, dtype=dtype) for count in rows]
    factors = [x.double() for x in inputs]
    weight = linear.weight.double()
    if linear.scales is not None:
        weight *= linear.scales[:, None]
        factors = [rounded.double() * scales[:, None] for rounded, scales in map(round_rows, inputs)]
    # Tensor cores add products of 8 bits in less than float32's bits.
    return _agree([linear(x) for x in inputs], [x @ weight.T for x in factors], torch.bfloat16 if fp8 else dtype)


def _experts(
    shape: tuple[int, int, int, int], rows: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """shape: experts, those of a token, hidden width, inner width. Of equal scores the first
    counts, which is why torch sorts them."""
    count, per_token, hidden, inner = shape
    router, gate_up, down = (
        _random(*size, device=device, dtype=dtype) / size[-1] ** 0.5
        for size in ((count, hidden), (count, 2 * inner, hidden), (count, hidden, inner))
    )
    record = Experts(Linear((router,), ()), per_token, True, Stack(gate_up), Stack(down))
    experts = GpuExperts.of(record, Activation.SILU, ModuleWeights(router), fp8=False, invariant=True)
    got, expected = [], []
    for tokens in rows:
        x = _random(tokens, hidden, device=device, dtype=dtype)
        got.append(experts(x, torch.arange(tokens, device=device)))
        scores, ids = experts.router(x).float().sort(stable=True, descending=True)
        factors = torch.zeros(tokens, count, device=device, dtype=torch.float32)
        factors.scatter_(1, ids[:, :per_token], torch.softmax(scores[:, :per_token], -1))
        total = torch.zeros(tokens, hidden, device=device, dtype=torch.float32)
        for index in range(count):
            gate, up = F.linear(x, gate_up[index]).chunk(2, dim=1)
            total += factors[:, index, None] * F.linear(F.silu(gate) * up, down[index]).float()
        expected.append(total)
    return _agree(got, expected, dtype)


def _sampling(vocab: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    return {"passed": sampling.agrees(vocab, device)}


def _random(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def _agree(got: Any, expected: Any, dtype: torch.dtype) -> dict[str, Any]:
    differences = [
        float(((a.double() - b.double()).abs() / (b.double().abs() + b.double().std())).max())
        for a, b in zip(got, expected, strict=True)
    ]
    worst = float(torch.tensor(differences).max())
    return {"passed": worst <= TOLERANCE[dtype], "ratio": worst / TOLERANCE[dtype], "difference": worst}
