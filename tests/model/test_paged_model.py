"""Packed, paged and chunked against the untouched transformers module run alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.core.step_plan import BlockCopy
from serve_app.errors import ConfigError
from serve_app.model import verification
from serve_app.model.attention import transformers_hook
from serve_app.model.attention_backend import AttentionLayer
from serve_app.model.loader import from_module
from tests.model.stepping import Sequences, random_tokens
from tests.models import ARCHITECTURES, MIXTURES_OF_EXPERTS, needs_compiler, poison, tiny_model


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


@pytest.mark.parametrize("arch", MIXTURES_OF_EXPERTS)
def test_packed_mixtures_of_experts_equal_the_module_run_alone(arch: str) -> None:
    module = tiny_model(arch, torch.float32)
    model = from_module(module)
    model.allocate_kv_cache(20)
    tokens = [random_tokens(length, seed) for seed, length in enumerate((33, 7))]
    sequences = Sequences(model, tokens, [range(1, 5), [9]])
    got: list[list[Tensor]] = [[], []]
    for counts in ({0: 20, 1: 6}, {1: 1, 0: 13}):
        for index, logits in sequences.step(counts).items():
            got[index].append(logits)
    with torch.no_grad():
        for row, parts in zip(tokens, got, strict=True):
            torch.testing.assert_close(torch.cat(parts), module(input_ids=row[None]).logits[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *MIXTURES_OF_EXPERTS])
def test_every_architecture_is_served_with_the_default_settings(arch: str) -> None:
    model = from_module(tiny_model(arch, torch.float32), quantization="auto")
    assert model.attention_backend in ("kernels", "cpu")


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
        poison(cache, model.executor.backend.block_dim, first_block=3)
    reused = Sequences(model, [random_tokens(20, 0)], [[5, 3]])
    assert torch.equal(reused.step({0: 18})[0], expected[0])
    assert torch.equal(reused.step({0: 2})[0], expected[1])


def test_a_causal_model_of_another_interface_is_refused_by_name() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    module = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=64, n_layer=2, n_head=4)).eval()
    with pytest.raises(ConfigError, match="bloom cannot be served: 0 of its 2 layers"):
        from_module(module, max_model_len=64)


def test_a_model_that_fails_with_packed_attention_is_refused_by_name() -> None:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(ConfigError, match="falcon cannot be served: FalconModel fails"):
        from_module(FalconForCausalLM(config).eval(), max_model_len=64)


def test_a_bidirectional_model_is_refused_by_its_logits() -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    with pytest.raises(ConfigError, match="BertLMHeadModel"):
        from_module(BertLMHeadModel(config).eval())


@pytest.mark.parametrize(
    ("arch", "fields", "match"),
    [
        (
            "gpt_oss",
            {"num_local_experts": 2, "num_experts_per_tok": 1},
            "attention sinks are supported only by the C",
        ),
        ("llama4_text", {"num_local_experts": 2, "layer_types": ["chunked_attention"] * 2}, "kind chunked_attention"),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "num_experts": 4},
            "Qwen2MoeAttention does not pass its sliding window to attention",
        ),
    ],
)
def test_attention_that_no_backend_computes_is_refused(arch: str, fields: dict[str, Any], match: str) -> None:
    """The short sequences of the check at load may not show it."""
    config = AutoConfig.for_model(
        arch, vocab_size=200, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=0, eos_token_id=1, **fields
    )  # fmt: skip
    with pytest.raises(ConfigError, match=match):
        from_module(AutoModelForCausalLM.from_config(config).eval(), max_model_len=64, attention_backend="cpu")


def test_the_check_on_a_gpu_sees_what_only_long_sequences_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(*arguments: Any) -> AttentionLayer:
        return replace(layer(*arguments), sliding_window=None)

    layer = transformers_hook._layer
    monkeypatch.setattr(transformers_hook, "_layer", without_window)
    monkeypatch.setitem(verification._LENGTHS, "cpu", verification._LENGTHS["cuda"])
    with pytest.raises(ConfigError, match="cannot be served"):
        from_module(tiny_model("mistral", torch.float32), attention_backend="cpu")
    assert verification.ReferenceLogits.compute(tiny_model("mistral"), "mistral", 100).ids[-1].shape == (100,)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_loads_with_the_defaults(arch: str) -> None:
    from_module(tiny_model(arch, torch.float32))


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
