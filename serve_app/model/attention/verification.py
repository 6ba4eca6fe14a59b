"""Compares an attention backend with the reference before use, on this device for these layers."""

from collections.abc import Sequence

import torch

from serve_app.model.attention.reference import ReferenceAttention
from serve_app.model.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    LayerCache,
    block_matrix,
)

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""Largest accepted difference, relative to the reference's standard deviation."""

_TABLES = ((5, 2), (3, 4), (1,), (22, *range(6, 14), *range(21, 14, -1)))
"""Block tables of the test sequences. The last is long enough for several tiles of queries and of
keys.
"""


def verify_backend(
    backend: AttentionBackend, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Compare the backend with the reference on a prefill and a mixed step. Return the problem, or
    None.

    Unused positions of the pool hold NaN, so reading beyond a sequence's end shows in the output.
    """
    for layer in dict.fromkeys(layers):
        try:
            difference = _difference(backend, layer, dtype, device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a backend may raise anything on untested hardware
            return f"{type(error).__name__}: {error}".splitlines()[0]
        if difference > _TOLERANCE[dtype]:
            return f"differs from the reference by {difference:.2g} of its spread"
    return None


def _difference(backend: AttentionBackend, layer: AttentionLayer, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest difference from the reference, in standard deviations of its output;
    infinite if the backend's output is not finite.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    candidates = (backend, ReferenceAttention())
    size = backend.block_size
    caches = [_poisoned(candidate, layer, size, dtype, device) for candidate in candidates]
    # Three prompts; then one more token of each, with a fourth sequence of one token. (row, first
    # position, tokens)
    longest = max(3 * size, 240) - 3
    steps = [
        [(0, 0, size + 2), (3, 0, longest), (1, 0, 2 * size - 1)],
        [(0, size + 2, 1), (1, 2 * size - 1, 1), (2, 0, 1), (3, longest, 1)],
    ]
    worst = 0.0
    for rows in steps:
        tokens = sum(count for _, _, count in rows)
        query, key, value = (
            torch.randn(heads, tokens, dim, generator=generator, device=device).to(dtype)
            for heads, dim in (
                (layer.num_heads, layer.head_dim),
                (layer.num_kv_heads, layer.head_dim),
                (layer.num_kv_heads, layer.value_dim),
            )
        )
        got, expected = (
            candidate.forward(
                layer, query, key, value, cache, candidate.build(_batch(rows, candidate.block_size, size, device))
            ).double()
            for candidate, cache in zip(candidates, caches, strict=True)
        )
        if not bool(torch.isfinite(got).all()):
            return float("inf")
        worst = max(worst, float((got - expected).abs().max() / expected.std()))
    return worst


def _poisoned(
    backend: AttentionBackend, layer: AttentionLayer, size: int, dtype: torch.dtype, device: torch.device
) -> LayerCache:
    """Return a small pool filled with NaN. Only the null block is zero, as in service."""
    num_blocks = (1 + max(map(max, _TABLES))) * size // backend.block_size
    cache = backend.allocate(layer, num_blocks, dtype, device)
    for pool in cache:
        pool.fill_(float("nan"))
        pool.select(backend.block_dim, 0).zero_()
    return cache


def _batch(rows: list[tuple[int, int, int]], block_size: int, size: int, device: torch.device) -> AttentionBatch:
    """Build the batch for blocks of `block_size`. rows: (sequence, first position, tokens).

    `_TABLES` counts in blocks of `size`; each is cut into `size // block_size` blocks.
    """
    parts = size // block_size
    tables = {row: [block * parts + i for block in _TABLES[row] for i in range(parts)] for row, _, _ in rows}
    starts, slots = [0], []
    for row, start, count in rows:
        starts.append(starts[-1] + count)
        slots += [
            tables[row][position // block_size] * block_size + position % block_size
            for position in range(start, start + count)
        ]
    return AttentionBatch(
        query_starts=starts,
        kv_lens=[start + count for _, start, count in rows],
        block_tables=block_matrix([tables[row] for row, _, _ in rows]),
        kv_slots=torch.tensor(slots, device=device),
    )
