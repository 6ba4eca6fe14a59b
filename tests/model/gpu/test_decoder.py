"""The fused decoder and the Triton backend under whole models. That logits are the modules' own is
checked whenever a `PagedModel` is built; here are the choice between the two, and steps of every
kind."""

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.core.step_plan import BlockCopy, SlotStart
from serve_app.errors import ConfigError
from serve_app.model.executors.transformers import TransformersExecutor
from serve_app.model.input_batch import sampling_rows
from serve_app.model.loader import from_module
from serve_app.model.options import KernelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.token_samplers import HostSampler
from tests.engine.harness import Harness
from tests.engine.test_embeddings import POOLINGS, assert_same, expected, prompt, vector
from tests.engine.test_embeddings import request as embedding_request
from tests.model.stepping import Sequences, random_tokens
from tests.models import needs_compiler, tiny_model

pytestmark = pytest.mark.wide

Build = Callable[..., PagedModel]


@pytest.fixture
def build(caplog: pytest.LogCaptureFixture, device: torch.device) -> Build:
    def build(arch: str, dtype: torch.dtype = torch.float32) -> PagedModel:
        with caplog.at_level(logging.WARNING):
            return from_module(tiny_model(arch, dtype).to(device), attention_backend="triton")

    return build


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "mistral", "gemma3", "smollm3"])
@torch.inference_mode()
def test_llama_like_models_run_fused(
    arch: str, build: Build, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    """Prompts in chunks, decode rows beside a prefill, and a lone token."""
    model = build(arch)
    assert type(model.executor).__name__ == "GpuDecoder"
    assert not caplog.records
    tokens = [random_tokens(length, seed) for seed, length in enumerate((60, 35))]
    module = tiny_model(arch, torch.float32)
    expected = [module(row[None]).logits[0] for row in tokens]
    model.allocate_kv_cache(8)
    run = Sequences(model, tokens, [[5, 1, 6, 2], [3, 7, 4]])
    got: list[list[torch.Tensor]] = [[], []]
    for counts in ({0: 50}, {1: 20, 0: 1}, {0: 1, 1: 14}, {0: 7}, {1: 1, 0: 1}):
        for index, logits in run.step(counts).items():
            got[index].append(logits)
    for parts, reference in zip(got, expected, strict=True):
        assert float((torch.cat(parts) - reference.to(device)).abs().max() / reference.std()) < 1e-3


ODD_WIDTHS = {"hidden_size": 40, "head_dim": 12, "intermediate_size": 56}


@needs_compiler
def test_limits_of_the_c_kernels_are_not_the_gpus(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """Widths that are no multiples of 32 and heads that are none of 16."""
    module = tiny_model("llama", torch.float32, **ODD_WIDTHS)
    with pytest.raises(ConfigError, match="heads of 12"):
        from_module(module, attention_backend="kernels")
    with caplog.at_level(logging.WARNING):
        model = from_module(module.to(device), attention_backend="triton", max_model_len=128)
    assert type(model.executor).__name__ == "GpuDecoder"
    assert not caplog.records


@pytest.mark.parametrize("arch", ["gemma2", "phi3"])
def test_others_keep_their_modules(arch: str, build: Build, caplog: pytest.LogCaptureFixture) -> None:
    model = build(arch)
    assert model.attention_backend == "triton"
    assert type(model.executor).__name__ == "TransformersExecutor"
    assert ["runs without the GPU kernels" in record.getMessage() for record in caplog.records] == [True]


def test_kernels_of_kept_modules_are_compiled_before_the_first_request(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For tiles of both kinds, in each of its two shapes of layers."""
    from serve_app.model.gpu import attention

    model, launched = build("gemma2"), []
    monkeypatch.setattr(
        attention,
        "_launch",
        lambda layer, query, cache, metadata, tiles, out, sinks: launched.append((layer, tiles.kept > 0)),
    )
    model.allocate_kv_cache(4)
    model.capture(4, lambda done, of: None)
    assert sorted(split for _, split in launched) == [False, False, True, True]
    assert len(set(launched)) == 4


def test_narrow_numbers(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    assert type(build("llama", torch.float16).executor).__name__ == "GpuDecoder"
    assert not caplog.records


def test_a_wrong_kernel_is_found_out(
    build: Build, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve_app.model.gpu import ops

    gate_times_up = ops.gate_times_up
    monkeypatch.setattr(ops, "gate_times_up", lambda x, *, gelu: gate_times_up(x, gelu=not gelu))
    assert type(build("llama").executor).__name__ == "TransformersExecutor"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("fp8_cache", [False, True])
def test_weights_and_cache_in_8_bits(fp8_cache: bool, device: torch.device) -> None:
    """Their logits are compared with the module's when the model is built."""
    module, quantization = tiny_model("llama", torch.float32).to(device), "none" if fp8_cache else "fp8"
    form = KernelOptions(fp8_cache=fp8_cache)
    model = from_module(module, attention_backend="triton", quantization=quantization, kernel_options=form)
    assert model.quantization == quantization
    # Two layers of two heads of 16 keys and values.
    assert model.kv_bytes_per_block() == model.block_size * 2 * 2 * 2 * 16 * (1 if fp8_cache else 4)
    model.allocate_kv_cache(4)
    model.copy_blocks([BlockCopy(1, 2)])


def test_weights_in_8_bits_take_the_place_of_the_wide_ones(device: torch.device) -> None:
    """Held beside the module's own: a quarter of its float32 layers and head, its embedding, and
    the angles."""
    module = tiny_model("llama", torch.float32).to(device)
    before = tensor_bytes()
    model = from_module(module, attention_backend="triton", quantization="fp8")
    embedding = module.get_input_embeddings().weight
    angles = 2 * model.max_model_len * 16 // 2 * 4
    wide = sum(parameter.nbytes for parameter in module.parameters()) - embedding.nbytes
    held = tensor_bytes() - before
    assert held < 1.1 * (wide / 4 + embedding.nbytes + angles)


def tensor_bytes() -> int:
    """Memory of all tensors that anything holds."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def test_8_bits_need_a_gpu() -> None:
    for fields in ({"quantization": "fp8"}, {"kernel_options": KernelOptions(fp8_cache=True)}):
        with pytest.raises(ConfigError, match="requires a GPU"):
            from_module(tiny_model("llama", torch.float32), **fields)


@pytest.mark.parametrize("backend", ["kernels", "reference"])
@pytest.mark.parametrize(
    "fields", [{"quantization": "fp8"}, {"kernel_options": KernelOptions(fp8_cache=True)}], ids=str
)
def test_8_bits_of_a_backend_that_has_none_are_refused(backend: str, fields: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="kernels cannot run it: (fp8.* requires a GPU|attention_backend is reference)"
    ):
        from_module(tiny_model("llama", torch.float32), attention_backend=backend, **fields)


@torch.inference_mode()
def test_kept_modules_sample_on_the_device(build: Build, device: torch.device) -> None:
    """What a `TransformersExecutor` on a GPU chooses is what the host's sampler chooses of its
    logits."""
    executor = build("gemma2").executor
    assert isinstance(executor, TransformersExecutor)
    starts = [SlotStart(slot, "", 0, (0, 1), 1, SamplingParams(seed=slot, top_k=20), ()) for slot in range(4)]
    rows = sampling_rows(starts)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(device)
    expected = HostSampler(executor, ())(hidden, rows, hidden).resolve()
    assert executor._choose(hidden, torch.from_numpy(rows.parameters).to(device)).tolist() == expected.token_ids


@torch.inference_mode()
def test_deterministic_rows_have_their_own_bits(device: torch.device) -> None:
    """Alone and whole, or in chunks beside another row: the same logits to the last bit."""
    module = tiny_model("qwen3", torch.float32).to(device)
    model = from_module(module, attention_backend="triton", kernel_options=KernelOptions(deterministic=True))
    tokens = [random_tokens(length, seed) for seed, length in enumerate((40, 35))]
    model.allocate_kv_cache(8)
    alone = Sequences(model, tokens[:1], [[5, 1, 6]])
    expected = torch.cat([alone.step({0: count})[0] for count in (39, 1)])
    model.allocate_kv_cache(8)
    run = Sequences(model, tokens, [[5, 1, 6, 2], [3, 7, 4]])
    parts = [run.step(counts)[0] for counts in ({1: 20, 0: 3}, {0: 30, 1: 1}, {1: 14, 0: 6}, {0: 1})]
    assert torch.equal(torch.cat(parts), expected)


def test_embeddings_are_transformers_in_chunks_beside_others(device: torch.device) -> None:
    module = tiny_model("qwen3", torch.float32)
    model = from_module(module.to(device), attention_backend="triton", max_model_len=128)
    assert type(model.executor).__name__ == "GpuDecoder"
    others = [EngineRequest(f"r{i}", prompt(9 + i), SamplingParams(seed=i, max_tokens=8)) for i in range(2)]
    asked = [embedding_request(40, pooling) for pooling in POOLINGS]
    harness = Harness(model, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=24, overlap="on")
    outcomes = harness.run([*others, *asked]).outcomes
    for one in asked:
        wanted = expected(module.cpu(), one.prompt_token_ids, one.params.pooling or "last")
        assert_same(vector(outcomes[one.request_id, 0].embedding), wanted)
