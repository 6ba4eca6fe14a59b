"""The small kernels as functions on tensors. Decides only block sizes and warps."""

import torch
import triton
from torch import Tensor

from serve_app.model.attention_backend import LayerCache
from serve_app.model.gpu.kernels import elementwise as kernels
from serve_app.model.gpu.kernels import steps


def add_rms_norm(
    residual: Tensor, x: Tensor | None, weight: Tensor, eps: float, x_weight: Tensor | None = None
) -> Tensor:
    """Add x to residual [T, width] in place, unless x is None. Return residual / rms(residual) *
    weight, [T, width]. With x_weight, x / rms(x) * x_weight is added instead.

    weight, x_weight: [width], in residual's dtype: then the factor is rounded before it is
    multiplied, as Llama does. Or both in float32: then only the result is rounded, as Gemma does.
    """
    out = torch.empty_like(residual)
    rows, width = residual.shape
    block = triton.next_power_of_2(width)
    kernels.add_rms_norm[(rows,)](
        residual, residual if x is None else x, weight if x_weight is None else x_weight, weight, out, width, eps,
        ADD=x is not None, NORMED=x is not None and x_weight is not None, ROUNDED=weight.dtype == residual.dtype,
        BLOCK=block, num_warps=max(1, min(block // 512, 8)),
    )  # fmt: skip
    return out


def gate_times_up(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """Return activation(gate) * up, [T, width], from gate_up [T, 2 * width]. The activation is
    SiLU, or the tanh form of GELU.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = 1024
    kernels.gate_times_up[rows, triton.cdiv(width, block)](gate_up, out, width, GELU=gelu, BLOCK=block, num_warps=4)
    return out


def rotate_and_store(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slots: Tensor,
    cache: LayerCache,
    query: Tensor,
    *,
    few: bool,
) -> None:
    """Apply rotary positions to queries and keys. Write queries to `query` [T, heads, head_dim],
    and keys and values to their KV slots.

    qkv: [T, (heads + 2 kv_heads) * head_dim]; norms: weights [head_dim] of the query and key norm,
    as in `add_rms_norm`; angles: cosines and sines, float32 [P, rotated pairs], None without
    rotation; positions, slots: int64 [T]; cache: [blocks, kv_heads, block_size, head_dim]. Tokens
    with a negative slot are not stored. few: one token per program, so that few tokens keep all
    processors busy.
    """
    _, kv_heads, page, head_dim = cache.key.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
    block = 1 if few else 8
    query_norm, key_norm = norms if norms is not None else (query, query)
    # Without rotation they are not read.
    cos, sin = angles if angles is not None else (query, query)
    kernels.rotate_and_store[(triton.cdiv(tokens, block), heads + 2 * kv_heads)](
        qkv, query, cache.key, cache.value, query_norm, key_norm, cos, sin, positions, slots, tokens, eps,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, HALF=triton.next_power_of_2(head_dim // 2), PAGE=page,
        ROTATED=0 if angles is None else cos.shape[1], NORMED=norms is not None,
        ROUNDED=query_norm.dtype == qkv.dtype, BLOCK=block, num_warps=1 if block == 1 else 4,
    )  # fmt: skip


def prepare(
    tokens: Tensor, history: Tensor, tables: Tensor, kv_lens: Tensor, table_lines: Tensor, *, page: int
) -> None:
    """Fill in the data of a decode step's R rows that the host does not have; see `kernels.steps`.

    tokens: int64 [4, R]; history: int32 [slots, positions]; tables: int32 [slots, blocks] of `page`
    tokens; kv_lens, table_lines: int32 [R].
    """
    rows = tokens.shape[1]
    steps.prepare[(triton.cdiv(rows, 32),)](
        tokens, history, tables, kv_lens, table_lines, rows, history.stride(0), tables.stride(0),
        PAGE=page, BLOCK=32, num_warps=1,
    )  # fmt: skip


def remember(tokens: Tensor, token_ids: Tensor, history: Tensor) -> None:
    """Append the ids that a decode step's R rows sampled, int64 [R], to the history. tokens: int64
    [4, R].
    """
    rows = tokens.shape[1]
    steps.remember[(triton.cdiv(rows, 32),)](tokens, token_ids, history, rows, history.stride(0), BLOCK=32, num_warps=1)
