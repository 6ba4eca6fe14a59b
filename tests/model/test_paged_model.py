"""Packed, paged and chunked against the untouched transformers module run alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from serve_app.core.output import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model.loader import from_module
from tests.model.stepping import Sequences, random_tokens
from tests.models import ARCHITECTURES, needs_compiler, tiny_model


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products gain nothing from threads, and lose much when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_chunks_equal_the_module_run_alone(arch: str, backend: str) -> None:
    module = tiny_model(arch, torch.float64)
    model = from_module(module, attention_backend=backend)
    model.allocate_kv_cache(40)
    tokens = [random_tokens(length, seed) for seed, length in enumerate((70, 5, 33))]
    # One sequence in consecutive blocks, one alone in the middle, one backwards with gaps.
    sequences = Sequences(model, tokens, [range(1, 6), [20], [30, 28, 26]])
    got: list[list[Tensor]] = [[], [], []]
    for counts in ({0: 40, 1: 1}, {1: 3, 0: 1, 2: 20}, {2: 1, 0: 1, 1: 1}, {0: 28, 2: 12}):
        for index, logits in sequences.step(counts).items():
            got[index].append(logits)
    # Eager attention takes its softmax in float32, sdpa does not.
    sdpa = module.config._attn_implementation == "sdpa"
    with torch.no_grad():
        for row, parts in zip(tokens, got, strict=True):
            expected = module(input_ids=row[None]).logits[0]
            torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-9 if sdpa else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_copied_block_serves_like_the_original(dtype: torch.dtype) -> None:
    model = from_module(tiny_model("llama", dtype))
    model.allocate_kv_cache(8)
    tokens = random_tokens(20, 0)
    original = Sequences(model, [tokens], [[1, 2]])
    original.step({0: 19})
    model.copy_blocks([BlockCopy(2, 5), BlockCopy(1, 6)])
    fork = Sequences(model, [tokens], [[6, 5]])
    fork.done = [19]
    forked = fork.step({0: 1})[0]
    assert torch.equal(forked, original.step({0: 1})[0])


@pytest.mark.parametrize(
    ("backend", "quantization"),
    [
        ("cpu", "none"),
        pytest.param("kernels", "none", marks=needs_compiler),
        pytest.param("kernels", "int8", marks=needs_compiler),
    ],
)
def test_stale_nan_of_a_former_owner_does_not_reach_the_next(backend: str, quantization: str) -> None:
    model = from_module(tiny_model("llama", torch.float32), attention_backend=backend, quantization=quantization)
    model.allocate_kv_cache(6)
    clean = Sequences(model, [random_tokens(20, 0)], [[1, 2]])
    expected = [clean.step({0: 18})[0], clean.step({0: 2})[0]]
    for cache in model._cache.layers:  # type: ignore[union-attr]
        for pool in cache:
            pool.narrow(model._stack.backend.block_dim, 3, 3).fill_(float("nan"))
    reused = Sequences(model, [random_tokens(20, 0)], [[5, 3]])
    assert torch.equal(reused.step({0: 18})[0], expected[0])
    assert torch.equal(reused.step({0: 2})[0], expected[1])


def test_a_causal_model_of_another_interface_is_refused_by_name() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    module = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=64, n_layer=2, n_head=4)).eval()
    with pytest.raises(ConfigError, match="bloom cannot be served: 0 of its 2 layers"):
        from_module(module, max_model_len=64)


def test_a_bidirectional_model_is_refused_by_its_probe() -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    with pytest.raises(ConfigError, match="BertLMHeadModel"):
        from_module(BertLMHeadModel(config).eval())


def test_damaged_weights_are_refused() -> None:
    module = tiny_model("llama", torch.float32)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        from_module(module)


def test_max_model_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len: 513 .* 512"):
        from_module(tiny_model("llama", torch.float32), max_model_len=513)


def test_unknown_attention_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_backend: unknown name 'flesh'"):
        from_module(tiny_model("llama", torch.float32), attention_backend="flesh")


def test_forward_before_the_pool_exists_is_an_error() -> None:
    model = from_module(tiny_model("llama", torch.float32))
    with pytest.raises(RuntimeError, match="allocate_kv_cache"):
        Sequences(model, [random_tokens(3, 0)], [[1]]).step({0: 3})
