"""Paged attention against the slow reference, in every build, on a pool of NaN."""

import pytest
import torch

from serve_app.model.attention.reference import ReferenceAttention
from serve_app.model.attention.verification import verify_backend
from serve_app.model.attention_backend import AttentionBatch, AttentionLayer, block_matrix
from serve_app.model.cpu.attention import CKernelAttention
from serve_app.model.cpu.ops import Kernels
from serve_app.model.kv_cache import bytes_per_block
from tests.models import poison

CPU = torch.device("cpu")
LAYERS = {
    "gqa": AttentionLayer(9, 3, 64, 64, 0.125),
    "one kv head": AttentionLayer(8, 1, 32, 32, 0.1),
    "no group": AttentionLayer(3, 3, 80, 80, 80**-0.5),
    "narrow": AttentionLayer(5, 5, 16, 16, 0.3),
    "more queries than a task's rows": AttentionLayer(71, 1, 64, 64, 0.125),
    "wide": AttentionLayer(2, 1, 256, 256, 0.06),
    "six tiles": AttentionLayer(4, 2, 96, 96, 0.1),
    "window": AttentionLayer(4, 2, 64, 64, 0.125, sliding_window=7),
    "window of rounds": AttentionLayer(4, 2, 64, 64, 0.125, sliding_window=130),
}
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.int8: 6e-2}


def cache_dtypes(kernels: Kernels) -> dict[str, torch.dtype]:
    return {"float32": torch.float32, "narrow": kernels.narrow_cache, "smallest": kernels.smallest_cache}


def run(
    kernels: Kernels, layer: AttentionLayer, dtype: torch.dtype, steps: list[list[tuple[int, int]]], seed: int = 0
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Steps of (sequence, tokens) over scattered blocks of a poisoned pool; what the kernels and
    the reference give."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks, done = 200, {}
    order = torch.randperm(num_blocks - 1, generator=generator) + 1
    backends = (CKernelAttention(kernels), ReferenceAttention())
    dtypes = (dtype, torch.float32)
    caches = [backend.allocate(layer, num_blocks, d, CPU) for backend, d in zip(backends, dtypes, strict=True)]
    for cache in caches:
        poison(cache)
    sequences = sorted({sequence for step in steps for sequence, _ in step})
    tables = {sequence: order[index :: len(sequences)].tolist() for index, sequence in enumerate(sequences)}
    results = []
    for step in steps:
        starts, lens, slots = [0], [], []
        for sequence, count in step:
            first = done.get(sequence, 0)
            done[sequence] = first + count
            starts.append(starts[-1] + count)
            lens.append(first + count)
            slots += [tables[sequence][p // 16] * 16 + p % 16 for p in range(first, first + count)]
        batch = AttentionBatch(
            starts, lens, block_matrix([tables[sequence] for sequence, _ in step]), torch.tensor(slots)
        )
        shapes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        tensors = [torch.randn(heads, starts[-1], layer.head_dim, generator=generator) for heads in shapes]
        got, expected = (
            backend.forward(layer, *tensors, cache, backend.build(batch))
            for backend, cache in zip(backends, caches, strict=True)
        )
        counts = [count for _, count in step]
        results.append(list(zip(got.split(counts), expected.split(counts), strict=True)))
    return results


STEPS = [[(0, 70), (1, 5)], [(1, 1), (0, 1), (2, 150)], [(0, 200), (2, 1), (1, 10)], [(0, 1), (1, 1), (2, 1)]]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("size", ["float32", "narrow", "smallest"])
@pytest.mark.wide
def test_agrees_with_the_reference(kernels: Kernels, layer: AttentionLayer, size: str, threads: None) -> None:
    dtype = cache_dtypes(kernels)[size]
    for step in run(kernels, layer, dtype, STEPS):
        for got, expected in step:
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("size", ["float32", "narrow", "smallest"])
def test_size_is_what_is_allocated(kernels: Kernels, size: str) -> None:
    backend, dtype, layers = CKernelAttention(kernels), cache_dtypes(kernels)[size], list(LAYERS.values())
    pools = [pool for layer in layers for pool in backend.allocate(layer, 5, dtype, CPU)]
    assert sum(pool.nbytes for pool in pools) == 5 * bytes_per_block(layers, backend.block_size, dtype)


def test_the_probe_of_backends_accepts_it(kernels: Kernels) -> None:
    assert verify_backend(CKernelAttention(kernels), list(LAYERS.values()), torch.float32, CPU) is None


def test_large_scores_and_equal_scores(kernels: Kernels) -> None:
    """Scores of thousands (which float32 tells apart to 1e-4) leave one key with all the weight;
    equal ones share."""
    for scale, tolerance in ((100.0, 1e-3), (0.0, 1e-5)):
        for step in run(kernels, AttentionLayer(4, 2, 32, 32, scale), torch.float32, STEPS):
            for got, expected in step:
                torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", ["float32", "narrow", "smallest"])
def test_the_largest_sums_do_not_overflow(kernels: Kernels, size: str) -> None:
    """All numbers of wide heads at the ends of their ranges, and all keys of a round with the same
    weight."""
    layer, backend, tokens = LAYERS["wide"], CKernelAttention(kernels), 300
    cache = backend.allocate(layer, 20, cache_dtypes(kernels)[size], CPU)
    batch = AttentionBatch([0, tokens], [tokens], block_matrix([range(1, 20)]), torch.arange(16, 16 + tokens))
    query, key = (torch.ones(heads, tokens, 256) for heads in (2, 1))
    value = torch.where(torch.arange(256) % 2 == 0, 3.0, -3.0).expand(1, tokens, 256)
    got = backend.forward(layer, query, key, value.contiguous(), cache, backend.build(batch))
    torch.testing.assert_close(got, value.transpose(0, 1).expand(tokens, 2, 256), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", ["float32", "narrow", "smallest"])
@pytest.mark.parametrize("of", ["query", "key", "value"])
def test_what_is_no_number_is_not_hidden(kernels: Kernels, size: str, of: str) -> None:
    """From those that see it; other kv heads do not."""
    layer, backend, tokens, where = LAYERS["gqa"], CKernelAttention(kernels), 70, 66
    cache = backend.allocate(layer, 6, cache_dtypes(kernels)[size], CPU)
    heads = {"query": 9, "key": 3, "value": 3}
    tensors = {name: torch.randn(count, tokens, 64) for name, count in heads.items()}
    tensors[of][0, where, 5] = torch.nan
    batch = AttentionBatch([0, tokens], [tokens], block_matrix([range(1, 6)]), torch.arange(16, 16 + tokens))
    finite = backend.forward(layer, *tensors.values(), cache, backend.build(batch)).isfinite().all(-1)
    seen = slice(where, where + 1) if of == "query" else slice(where, tokens)
    assert not finite[seen, 0].any()
    assert finite[:, 3:].all()


def test_keys_too_large_for_half_precision_stay_finite(kernels: Kernels) -> None:
    layer, backend = AttentionLayer(2, 1, 16, 16, 1e-6), CKernelAttention(kernels)
    cache = backend.allocate(layer, 2, kernels.narrow_cache, CPU)
    batch = AttentionBatch([0, 3], [3], block_matrix([[1]]), torch.tensor([16, 17, 18]))
    huge = torch.full((1, 3, 16), 1e6)
    out = backend.forward(layer, torch.ones(2, 3, 16), -huge, huge, cache, backend.build(batch))
    largest = torch.tensor(min(1e6, torch.finfo(kernels.narrow_cache).max)).to(kernels.narrow_cache).float()
    torch.testing.assert_close(out, largest.expand(3, 2, 16))


def test_what_it_cannot_do_is_refused(kernels: Kernels) -> None:
    backend = CKernelAttention(kernels)
    for layer in (AttentionLayer(4, 2, 64, 64, 0.1, softcap=5.0), AttentionLayer(4, 2, 40, 40, 0.1)):
        with pytest.raises(ValueError, match=r"softcap|heads of 40"):
            backend.allocate(layer, 4, torch.float32, CPU)
    with pytest.raises(ValueError, match="float64"):
        backend.allocate(LAYERS["gqa"], 4, torch.float64, CPU)


@pytest.mark.parametrize("layer", [LAYERS["gqa"], LAYERS["window"], LAYERS["six tiles"]])
@pytest.mark.parametrize("size", ["float32", "narrow", "smallest"])
def test_sinks_are_one_more_key_without_a_value(kernels: Kernels, layer: AttentionLayer, size: str) -> None:
    """Far below the other scores, among them, and far above. A row has the same bits in chunks."""
    backend, tokens, dtype = CKernelAttention(kernels), 150, cache_dtypes(kernels)[size]
    generator = torch.Generator().manual_seed(0)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    query, key, value = (torch.randn(tokens, count, layer.head_dim, generator=generator) for count in heads)
    sinks = torch.linspace(-3.0, 3.0, layer.num_heads)
    sinks[0], sinks[-1] = -200.0, 200.0
    position = torch.arange(tokens)
    hidden = position > position[:, None]
    if layer.sliding_window:
        hidden |= position <= position[:, None] - layer.sliding_window
    group = layer.num_heads // layer.num_kv_heads
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * layer.scale
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.cat([scores, sinks[:, None, None].expand(-1, tokens, 1)], -1).softmax(-1)[..., :-1]
    expected = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))
    results = []
    for ends in ((tokens,), (1, 66, 149, tokens)):
        cache, parts = backend.allocate(layer, 12, dtype, CPU), []
        for first, end in zip((0, *ends), ends, strict=False):
            batch = AttentionBatch([0, end - first], [end], block_matrix([range(1, 12)]), torch.arange(first, end) + 16)
            new = (part[first:end] for part in (query, key, value))
            parts.append(kernels.attention(layer, *new, (cache.key, cache.value), backend.build(batch), sinks))
        results.append(torch.cat(parts))
    torch.testing.assert_close(results[0], expected, rtol=0, atol=TOLERANCES[dtype])
    assert torch.equal(results[0], results[1])
