"""Sequences that change hands between two layers, as they do on a busy machine."""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.model.attention.base import AttentionBatch
from serve_app.model.cpu.ops import Batch, Kernels
from serve_app.model.executors import cpu
from tests.model.stepping import Sequences, random_tokens
from tests.models import KERNEL_MODES, VOCAB_SIZE, in_mode

LENGTHS = [1, 5, 2, 9, 1, 1, 3, 17, 1, 4, 1, 1, 6]


@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_a_half_that_is_given_away_goes_on_where_it_was(
    kernels: Kernels, shim: ctypes.CDLL, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "bfloat16" and not kernels.multiplies_bfloat16:
        pytest.skip(f"the build {kernels.build} has no products in bfloat16")
    monkeypatch.setattr(cpu, "usable_builds", lambda: [kernels.build])
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=9,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = in_mode(mode, AutoModelForCausalLM.from_config(config).eval())
    model.allocate_kv_cache(3 * len(LENGTHS) + 1)
    stack: Any = model.executor
    forward, steps = stack.forward, []

    def record(ids: Tensor, positions: Tensor, batch: AttentionBatch) -> Tensor:
        steps.append((ids, positions, batch))
        return forward(ids, positions, batch)

    monkeypatch.setattr(stack, "forward", record)
    tokens = [random_tokens(length + 1, seed) for seed, length in enumerate(LENGTHS)]
    sequences = Sequences(model, tokens, [range(1 + 3 * i, 4 + 3 * i) for i in range(len(LENGTHS))])
    sequences.step(dict(enumerate(LENGTHS)))
    sequences.step(dict.fromkeys(range(len(LENGTHS)), 1))
    shim.pool_new.restype = ctypes.c_void_p
    shim.pool_free.argtypes = [ctypes.c_void_p]
    shim.test_giving_halves.argtypes = [ctypes.c_void_p] * 5
    pool = shim.pool_new(4)
    for ids, positions, attention in steps:
        expected, batch = forward(ids, positions, attention), Batch(attention, positions)
        for _ in range(100):  # where sequences change hands is a matter of chance
            hidden = torch.full_like(expected, torch.nan)
            shim.test_giving_halves(
                ctypes.byref(stack._struct), pool, ctypes.byref(batch.struct), ids.data_ptr(), hidden.data_ptr()
            )
            assert torch.equal(hidden, expected)
    shim.pool_free(pool)
