"""Mixtures of experts and attention sinks on the CPU kernels, against transformers' modules."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model import families
from serve_app.model.cpu.decoder import CpuDecoder
from serve_app.model.cpu.ops import Arithmetic, Kernels
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.executors import cpu
from serve_app.model.families import Family, Mixture, recognise
from serve_app.model.loader import from_module
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.records import DecoderRecord, Experts, LayerRecord
from serve_app.model.sources.skeleton import small_copy
from serve_app.model.sources.source_model import SourceModel
from serve_app.model.verification import verify_model
from serve_app.text.tokenizer import load_tokenizer
from tests.engine.harness import Harness
from tests.engine.test_parity import generate_alone
from tests.mixtures import KERNEL_MIXTURES, mixture
from tests.model.stepping import Sequences, random_tokens
from tests.model.test_invariance import check
from tests.models import KERNEL_MODES, in_mode, needs_compiler

pytestmark = needs_compiler


@pytest.fixture(params=[1, 2, 3], ids=lambda threads: f"{threads}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def logits_of(module: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(input_ids=tokens[None]).logits[0]
    return logits


def difference(model: PagedModel, module: Any, tokens: Tensor) -> float:
    """The largest, with the prompt in three parts."""
    model.allocate_kv_cache(50)
    sequences = Sequences(model, [tokens], [range(1, 50)])
    parts = [sequences.step({0: count})[0] for count in (len(tokens) - 101, 100, 1)]
    expected = logits_of(module, tokens)
    return float((torch.cat(parts) - expected).abs().max() / expected.std())


@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
def test_logits_are_those_of_the_modules(arch: str, threads: None) -> None:
    module = mixture(arch)
    # With other tokens the router's scores of two experts may differ by less than float32 rounds.
    assert difference(in_mode("none", module), module, random_tokens(600, 2)) < 1e-4


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_experts_per_tok": 6}),
        ("qwen3_moe", {"num_experts": 40, "num_experts_per_tok": 1, "moe_intermediate_size": 32}),
        ("gpt_oss", {"attention_bias": False, "num_local_experts": 1, "num_experts_per_tok": 1}),
    ],
)
def test_other_shapes(arch: str, changes: dict[str, Any]) -> None:
    """All experts chosen; more experts than a panel has outputs; a single expert; bytes as keys
    beside sinks."""
    module = mixture(arch, **changes)
    tokens = random_tokens(300, 0)
    assert difference(in_mode("none", module), module, tokens) < 1e-4
    in_mode("int8", module)  # compared at load


@pytest.mark.wide
@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
def test_a_row_has_the_same_bits_alone_and_in_batches(arch: str, mode: str, threads: None) -> None:
    """In blocks of tokens and together."""
    model = in_mode(mode, mixture(arch))
    model.allocate_kv_cache(200)
    check(model)


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
def test_wanted_tokens_have_the_bits_they_have_when_all_are(arch: str, mode: str, threads: None) -> None:
    model = in_mode(mode, mixture(arch))
    tokens = [random_tokens(length, seed) for seed, length in enumerate((420, 5, 90))]
    tables = [range(1, 30), range(30, 32), range(32, 40)]
    lengths = dict(enumerate(map(len, tokens)))
    model.allocate_kv_cache(50)
    expected = torch.cat([*Sequences(model, tokens, tables).step(lengths).values()])
    wanted = np.random.default_rng(0).random(len(expected)) < 0.2
    model.allocate_kv_cache(50)
    logits = torch.cat([*Sequences(model, tokens, tables).step(lengths, wanted).values()])
    assert torch.equal(logits[wanted], expected[wanted])


@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
def test_idle_experts_and_an_expert_that_gets_every_row(arch: str) -> None:
    module = mixture(arch)
    with torch.no_grad():
        for layer in module.model.layers:
            router = getattr(layer.mlp, "router" if arch == "gpt_oss" else "gate", None)
            if router is None:
                continue
            if arch == "gpt_oss":  # expert 1 gets every row, the last one none
                router.weight.mul_(0.02)
                router.bias.copy_(torch.tensor([0.0, 3.0, 0.0, -3.0]))
            else:  # the first two experts or the last two
                router.weight.zero_()
                router.weight[:, 1] = 0.01 * torch.arange(len(router.weight))
    assert difference(in_mode("none", module), module, random_tokens(300, 0)) < 1e-4


def test_equal_scores_choose_the_first_experts() -> None:
    module = mixture("qwen3_moe", mlp_only_layers=[], norm_topk_prob=True)
    alone = mixture("qwen3_moe", mlp_only_layers=[], norm_topk_prob=True)
    with torch.no_grad():
        for layer, other in zip(module.model.layers, alone.model.layers, strict=True):
            layer.mlp.gate.weight.zero_()
            other.mlp.gate.weight.zero_()
            for stack in (other.mlp.experts.gate_up_proj, other.mlp.experts.down_proj):
                stack[2:] = torch.nan
    tokens = random_tokens(30, 0)
    model, of_two = (_unchecked(each) for each in (module, alone))
    assert torch.equal(of_two(tokens), model(tokens))


def _unchecked(module: Any) -> Callable[[Tensor], Tensor]:
    """The kernels' logits without the check at load."""
    source = SourceModel.take(copy.deepcopy(mixture("qwen3_moe", mlp_only_layers=[], norm_topk_prob=True)), "", None)
    record = recognise(module, module.model, source.facts.layers, source.facts.max_model_len)
    model = PagedModel(source.facts, CpuDecoder(_kernels(), record, arithmetic=Arithmetic.EXACT), None, "last")  # type: ignore[arg-type]

    def logits(tokens: Tensor) -> Tensor:
        model.allocate_kv_cache(5)
        return Sequences(model, [tokens], [range(1, 4)]).step({0: len(tokens)})[0]

    return logits


def _kernels() -> Kernels:
    return cpu.pick_kernels(torch.device("cpu"), torch.float32, ModelOptions())


def changed(record: DecoderRecord, **parts: Any) -> DecoderRecord:
    """With other parts in the last layer."""
    return replace(record, layers=[*record.layers[:-1], replace(record.layers[-1], **parts)])


def _changes(layer: LayerRecord) -> Iterator[tuple[str, dict[str, Any]]]:
    experts = layer.experts
    assert experts is not None
    if layer.sinks is not None:
        yield "sinks", {"sinks": None}

    def other(name: str, **fields: Any) -> tuple[str, dict[str, Experts]]:
        return name, {"experts": replace(experts, **fields)}

    yield other("router's sign", router=replace(experts.router, weights=(-experts.router.weights[0],)))
    yield other("per_token", per_token=experts.per_token - 1)
    yield other("renormalised", renormalised=not experts.renormalised)
    for name in ("gate_up", "down"):
        stack = getattr(experts, name)
        yield other(f"{name}'s order", **{name: replace(stack, weight=stack.weight.flip(0))})
        if stack.bias is not None:
            yield other(f"{name}'s bias", **{name: replace(stack, bias=None)})
        if stack.interleaved:
            yield other("interleaved", **{name: replace(stack, interleaved=False)})
    if experts.router.biases:
        yield other("router's bias", router=replace(experts.router, biases=()))
    if experts.alpha:
        yield other("alpha", alpha=1.0)
        yield other("limit", limit=7.0)


@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
def test_the_check_at_load_sees_every_field(arch: str) -> None:
    """On the narrow copy that stands for a model in files, one layer of which differs."""
    config = mixture(arch).config
    config.swiglu_limit = 7.0  # which no random number of this size reaches
    source = SourceModel.take(small_copy(config), arch, None)
    facts = source.facts
    record = recognise(source.head, source.base, facts.layers, facts.max_model_len)
    kernels = _kernels()

    def verify(record: DecoderRecord) -> None:
        verify_model(CpuDecoder(kernels, record, arithmetic=Arithmetic.EXACT), source.reference, facts.layers, 2e-4)

    verify(record)
    missed = []
    for name, parts in _changes(record.layers[-1]):
        other = changed(record, **parts)
        if name in ("per_token", "renormalised", "alpha", "limit"):  # of all layers
            other = replace(
                record,
                layers=[
                    replace(
                        layer,
                        experts=layer.experts and replace(layer.experts, **{name: getattr(parts["experts"], name)}),
                    )
                    for layer in record.layers
                ],
            )
        try:
            verify(other)
            missed.append(name)
        except UnsupportedModelError:
            continue
    assert missed == []


def test_the_small_copy_has_few_small_experts() -> None:
    config = AutoConfig.for_model(
        "qwen3_moe", num_hidden_layers=1, hidden_size=256, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    assert small_copy(config).model.layers[0].mlp.experts.gate_up_proj.shape == (16, 128, 64)


@pytest.fixture(scope="module")
def copied(default_module: Any) -> Any:
    """The default model with each MLP copied into four experts, two of which are chosen."""
    module = copy.deepcopy(default_module)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=module.config.hidden_size, moe_intermediate_size=module.config.intermediate_size,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in module.model.layers:
            mlp, layer.mlp = layer.mlp, Qwen3MoeSparseMoeBlock(config).eval()
            layer.mlp.gate.weight.normal_(0.0, 0.2)
            gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            layer.mlp.experts.gate_up_proj = nn.Parameter(gate_up.expand(4, -1, -1).clone())
            layer.mlp.experts.down_proj = nn.Parameter(mlp.down_proj.weight.expand(4, -1, -1).clone())
    return module


@pytest.fixture
def llama_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Family(families.LLAMA.norms, mixture=Mixture("gate", renormalised="norm_topk_prob"))
    monkeypatch.setitem(families.FAMILIES, "llama", row)  # type: ignore[arg-type]


def text(model: PagedModel, prompt: list[int]) -> list[int]:
    """Up to the end token."""
    request = EngineRequest("text", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=24))
    return Harness(model).run([request]).outcomes["text", 0].token_ids


@pytest.mark.slow
@pytest.mark.usefixtures("llama_with_experts")
def test_four_copies_of_each_mlp_give_the_dense_models_text(default_module: Any, copied: Any) -> None:
    """Then with experts that differ, transformers' text."""
    prompt = load_tokenizer("default").encode("Once upon a time, in a small village,")
    dense = generate_alone(default_module, prompt, 24)
    model = from_module(copied, max_model_len=128, attention_backend="kernels", quantization="none")
    assert text(model, prompt) == dense
    different = copy.deepcopy(copied)
    with torch.no_grad():
        for layer in different.model.layers:
            layer.mlp.experts.down_proj.mul_(torch.tensor([0.5, 1.0, 1.5, 2.0])[:, None, None])
    model = from_module(different, max_model_len=128, attention_backend="kernels", quantization="none")
    expected = generate_alone(different, prompt, 24)
    assert text(model, prompt) == expected
    assert expected != dense
