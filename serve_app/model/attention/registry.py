"""Binds transformers' attention to the paged pool, and picks the backend.

transformers calls one function for every attention layer (`AttentionInterface`). Ours reads everything it needs from
the module that calls it: some models do not pass extra keywords down, so nothing of a step travels through them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from serve_app.errors import ConfigError
from serve_app.model.attention.base import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    LayerCache,
    block_matrix,
)
from serve_app.model.attention.cpu import CpuAttention
from serve_app.model.attention.reference import ReferenceAttention

IMPLEMENTATION = "serve_app_paged"
"""The name under which transformers knows our function. It has no mask function, so no mask is ever built."""

_ATTRIBUTE = "serve_app_binding"


def _triton() -> AttentionBackend:
    """Imported when it is asked for: Triton is not installed everywhere."""
    from serve_app.model.gpu.attention import TritonAttention

    return TritonAttention()


def _varlen() -> AttentionBackend:
    """Likewise: torch's function is younger than the oldest torch that is supported."""
    from serve_app.model.gpu.varlen import VarlenAttention

    return VarlenAttention()


_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "cpu": CpuAttention,
    "reference": ReferenceAttention,
    "triton": _triton,
    "varlen": _varlen,
}
_ORDER = {"cpu": ("cpu",), "cuda": ("triton", "varlen")}
"""What "auto" tries on a device, fastest first."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepContext:
    """What all layers of one model share while a step runs."""

    backend: AttentionBackend
    metadata: Any = None


@dataclass(slots=True)
class _Binding:
    """Hangs on an attention module: how it attends, and where its keys and values are."""

    layer: AttentionLayer
    context: StepContext
    cache: LayerCache | None = None


@dataclass(slots=True)
class _Recorder:
    """Hangs on every module while `discover` runs: notes who calls, and how."""

    calls: list[tuple[nn.Module, AttentionLayer]] = field(default_factory=list)


def _paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """query [1, heads, N, dim], key and value [1, kv_heads, N, dim]; returns [1, N, heads, dim]."""
    binding = getattr(module, _ATTRIBUTE)
    if isinstance(binding, _Recorder):
        binding.calls.append((module, _layer(module, query, key, value, kwargs)))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    context = binding.context
    out = context.backend.forward(binding.layer, query[0], key[0], value[0], binding.cache, context.metadata)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)


def _layer(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> AttentionLayer:
    scale = kwargs.get("scaling")
    return AttentionLayer(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=float(scale) if scale is not None else query.shape[3] ** -0.5,
        sliding_window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
    )


def discover(base: nn.Module, input_ids: Tensor) -> list[tuple[nn.Module, AttentionLayer]]:
    """The attention modules of a base model in the order it calls them, found by running `input_ids` [n] through it."""
    recorder = _Recorder()
    for module in base.modules():
        setattr(module, _ATTRIBUTE, recorder)
    try:
        positions = torch.arange(input_ids.shape[0], device=input_ids.device)
        base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
    finally:
        for module in base.modules():
            delattr(module, _ATTRIBUTE)
    return recorder.calls


def bind(calls: list[tuple[nn.Module, AttentionLayer]], context: StepContext) -> None:
    """Attach each module's binding; `attach_caches` gives it its pool."""
    for module, layer in calls:
        setattr(module, _ATTRIBUTE, _Binding(layer, context))


def attach_caches(calls: list[tuple[nn.Module, AttentionLayer]], caches: Sequence[LayerCache | None]) -> None:
    """Give every bound module its layer's pool, in the same order; None takes it away."""
    for (module, _), cache in zip(calls, caches, strict=True):
        getattr(module, _ATTRIBUTE).cache = cache


def pick_backend(name: str, layers: list[AttentionLayer], dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest that agrees with the reference on this device.

    Raises ConfigError for an unknown name, or when a backend named on purpose fails its probe.
    """
    if name != "auto" and name not in _BACKENDS:
        raise ConfigError(f"attention_backend: unknown name {name!r}; known: auto, {', '.join(sorted(_BACKENDS))}")
    candidates = _ORDER.get(device.type, ()) if name == "auto" else (name,)
    for wanted, otherwise in zip(candidates, (*candidates[1:], "the slow reference"), strict=True):
        try:
            backend = _BACKENDS[wanted]()
            problem = probe(backend, layers, dtype, device)
        except ImportError as error:
            problem = str(error)
        if problem is None:
            return backend
        if name != "auto":
            raise ConfigError(f"attention_backend: {name} does not work for this model on {device}: {problem}")
        logger.warning("attention backend %s does not work here (%s); using %s", wanted, problem, otherwise)
    return ReferenceAttention()


def probe(
    backend: AttentionBackend, layers: list[AttentionLayer], dtype: torch.dtype, device: torch.device
) -> str | None:
    """What is wrong with the backend, compared with the reference on a prefill and a mixed step. None = nothing.

    The pool holds NaN wherever these sequences have no key, so reading too far shows.
    """
    for layer in dict.fromkeys(layers):
        try:
            difference = _probe_layer(backend, layer, dtype, device)
        except Exception as error:  # a probe must survive whatever a backend does on foreign hardware
            return f"{type(error).__name__}: {error}".splitlines()[0]
        if difference > _TOLERANCE[dtype]:
            return f"differs from the reference by {difference:.2g} of its spread"
    return None


_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
"""Largest accepted difference, as a part of the reference's standard deviation."""


_PROBE_TABLES = ((5, 2), (3, 4), (1,), (22, *range(6, 14), *range(21, 14, -1)))
"""Blocks of the probe's sequences. The last is long enough for several tiles of queries and of keys."""


def _probe_layer(backend: AttentionBackend, layer: AttentionLayer, dtype: torch.dtype, device: torch.device) -> float:
    """Largest difference from the reference, in standard deviations of its output; infinite when not finite."""
    generator = torch.Generator(device=device).manual_seed(0)
    candidates = (backend, ReferenceAttention())
    size = backend.block_size
    caches = [_poisoned(candidate, layer, size, dtype, device) for candidate in candidates]
    # Three prompts; then one more token of each together with a fourth, one token long. (row, first position, tokens)
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
                layer, query, key, value, cache, candidate.build(_probe_batch(rows, candidate.block_size, size, device))
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
    """A small pool of NaN; only the null block is zero, as it is in service."""
    num_blocks = (1 + max(map(max, _PROBE_TABLES))) * size // backend.block_size
    cache = backend.allocate(layer, num_blocks, dtype, device)
    for pool in cache:
        pool.fill_(float("nan"))
        pool.select(backend.block_dim, 0).zero_()
    return cache


def _probe_batch(rows: list[tuple[int, int, int]], block_size: int, size: int, device: torch.device) -> AttentionBatch:
    """For a backend with blocks of `block_size`, into several of which a block of `size`, as in the tables, is cut."""
    parts = size // block_size
    tables = {row: [block * parts + i for block in _PROBE_TABLES[row] for i in range(parts)] for row, _, _ in rows}
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
        slot_mapping=torch.tensor(slots, device=device),
    )
