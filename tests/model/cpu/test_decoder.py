"""Steps that threads share out: in blocks of tokens, or each loop."""

import bisect
import ctypes
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.model.cpu.ops import Kernels
from serve_app.model.executors import cpu
from serve_app.model.paged_model import PagedModel
from tests.model.cpu.conftest import call
from tests.model.stepping import Sequences, random_tokens
from tests.models import KERNEL_MODES, VOCAB_SIZE, in_mode, tiny_model


def llama(layers: int, **shape: int) -> Any:
    """Untrained."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2} | shape
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=layers, max_position_embeddings=512, **sizes
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def in_mode_of(kernels: Kernels, mode: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> PagedModel:
    if mode == "bfloat16" and not kernels.multiplies_bfloat16:
        pytest.skip(f"the build {kernels.build} has no products in bfloat16")
    monkeypatch.setattr(cpu, "usable_builds", lambda: [kernels.build])
    return in_mode(mode, module)


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.wide
def test_a_row_has_the_same_bits_in_blocks_of_tokens(
    kernels: Kernels, mode: str, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin and end within blocks, beside single tokens, against the same in steps too
    small for blocks. Also where the MLP is no whole number of panels, so that its activation is a
    step of its own."""
    lengths = [3, 100, 1, 170, 1, 29]
    for shape in ({"head_dim": 32}, {"intermediate_size": 160, "head_dim": 16}):
        model = in_mode_of(kernels, mode, llama(3, **shape), monkeypatch)
        tokens = [random_tokens(length + 1, seed) for seed, length in enumerate(lengths)]
        tables = [range(1 + 12 * i, 13 + 12 * i) for i in range(len(lengths))]
        model.allocate_kv_cache(12 * len(lengths) + 1)
        whole = Sequences(model, tokens, tables)
        logits = whole.step(dict(enumerate(lengths)))
        after = whole.step(dict.fromkeys(range(len(lengths)), 1))
        model.allocate_kv_cache(12 * len(lengths) + 1)
        alone = Sequences(model, tokens, tables)
        for index, length in enumerate(lengths):
            parts = [alone.step({index: min(3, length - first)})[index] for first in range(0, length, 3)]
            assert torch.equal(torch.cat(parts), logits[index])
            assert torch.equal(alone.step({index: 1})[index], after[index])


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("lengths", [[3, 100, 1, 170, 1, 29], [5, 7, 1, 1, 9, 4], [3]], ids=["many", "some", "few"])
def test_wanted_tokens_have_the_bits_they_have_when_all_are(
    kernels: Kernels, mode: str, lengths: list[int], threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what comes after them too: keys and values are written for the others as well."""
    model = in_mode_of(kernels, mode, llama(3, head_dim=32), monkeypatch)
    tokens = [random_tokens(length + 1, seed) for seed, length in enumerate(lengths)]
    tables = [range(1 + 12 * i, 13 + 12 * i) for i in range(len(lengths))]
    prompts, following = dict(enumerate(lengths)), dict.fromkeys(range(len(lengths)), 1)
    random = np.random.default_rng(7)
    last, some, none = np.zeros((3, sum(lengths)), dtype=np.bool_)
    last[np.cumsum(lengths) - 1] = True
    some[random.random(len(some)) < 0.3] = True
    model.allocate_kv_cache(12 * len(lengths) + 1)
    whole = Sequences(model, tokens, tables)
    expected, after = torch.cat([*whole.step(prompts).values()]), whole.step(following)
    for wanted in (last, some, none):
        model.allocate_kv_cache(12 * len(lengths) + 1)
        sequences = Sequences(model, tokens, tables)
        logits = torch.cat([*sequences.step(prompts, wanted).values()])
        assert torch.equal(logits[wanted], expected[wanted])
        assert all(torch.equal(row, after[i]) for i, row in sequences.step(following).items())


@pytest.mark.wide
def test_a_block_needs_those_with_earlier_tokens_of_its_first_sequence(shim: ctypes.CDLL) -> None:
    rng = random.Random(0)
    for _ in range(60):
        size, threads = rng.choice((32, 64)), rng.choice((1, 2, 3, 8, 40, 300))
        lengths = [rng.choice((1, 1, 2, 16, 36, 64, rng.randint(1, 3000))) for _ in range(rng.randint(1, 60))]
        starts = [0, *itertools.accumulate(lengths)]
        count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(3, 256, dtype=torch.int32)
        starts_of = torch.tensor(starts, dtype=torch.int32)
        call(shim.test_cut, size, threads, starts[-1], len(lengths), starts_of, count, *out)
        first, end, needs = out[:, : int(count)].tolist()
        if not first:
            continue
        assert first == [0, *end[:-1]]
        assert end[-1] == starts[-1]
        assert all(a < b for a, b in zip(first, end, strict=True))
        for token, needed in zip(first, needs, strict=True):
            begins_in = bisect.bisect_right(starts, token) - 1
            assert first[needed] <= starts[begins_in] < end[needed]


def test_the_block_furthest_behind_that_has_its_keys_is_next(shim: ctypes.CDLL) -> None:
    rng = random.Random(0)
    layers, chosen = 3, set()
    for _ in range(600):
        count = rng.randint(1, 7)
        needs = [0]
        for i in range(1, count):
            needs.append(rng.choice((needs[-1], i - 1, i)))
        progress = [rng.randint(0, 2 * layers + 2) for _ in range(count)]
        free = [
            (own, i)
            for i, own in enumerate(progress)
            if own % 2 == 0 and own <= 2 * layers and all(other >= own for other in progress[needs[i] : i])
        ]
        taken = torch.zeros(1, dtype=torch.int32)
        tensors = torch.tensor([needs, progress], dtype=torch.int32)
        call(shim.test_take_block, layers, count, *tensors, taken)
        assert int(taken) == (min(free)[1] if free else -1)
        chosen.add(int(taken))
    assert chosen == {-1, *range(7)}


def test_keys_are_rounded_to_bytes_where_no_bias_makes_some_of_them_large(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arch, dtype in (("llama", kernels.smallest_cache), ("qwen2", kernels.narrow_cache)):
        module = tiny_model(arch, torch.float32)
        assert in_mode_of(kernels, "int8", module, monkeypatch).cache_dtype == dtype
