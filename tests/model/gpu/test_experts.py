"""Mixtures of experts by the Triton kernels: the choice, the tiles, products and whole models,
against torch's and transformers'."""

import numpy as np
import pytest
import torch
from torch import Tensor

from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.loader import from_module
from serve_app.model.options import KernelOptions
from serve_app.model.records import Activation, Experts, Linear, Stack
from tests.engine.harness import Harness
from tests.engine.test_parity import generate_alone
from tests.mixtures import KERNEL_MIXTURES, mixture
from tests.model.stepping import Sequences, random_tokens

pytestmark = [
    pytest.mark.wide,
    # numpy's, of rows of padding in the interpreter
    pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered"),
]

HIDDEN, WIDTH, EXPERTS, PER_TOKEN = 96, 40, 7, 3
MATMUL = np.matmul
"""BLAS, which is much faster than what `products_in_order` puts in its place."""


def random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def record(device: torch.device, *, renormalised: bool = True) -> Experts:
    """Its last expert is idle."""
    bias = random(EXPERTS, device=device, seed=3)
    bias[-1] = -100.0
    return Experts(
        router=Linear((random(EXPERTS, HIDDEN, device=device) / HIDDEN**0.5,), (bias,)),
        per_token=PER_TOKEN,
        renormalised=renormalised,
        gate_up=Stack(random(EXPERTS, 2 * WIDTH, HIDDEN, device=device, seed=1) / HIDDEN**0.5),
        down=Stack(random(EXPERTS, HIDDEN, WIDTH, device=device, seed=2) / WIDTH**0.5),
    )


def expected(experts: Experts, x: Tensor) -> Tensor:
    scores = torch.softmax(x @ experts.router.weight.T + experts.router.biases[0], -1)
    factors, ids = scores.topk(experts.per_token, -1)
    if experts.renormalised:
        factors = factors / factors.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        for factor, index in zip(factors[token], ids[token].tolist(), strict=True):
            gate, up = (experts.gate_up.weight[index] @ row).chunk(2)
            out[token] += factor * (experts.down.weight[index] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize(("tokens", "renormalised"), [(1, True), (5, False), (90, True)])
def test_the_mixture_is_the_chosen_experts_sum(tokens: int, renormalised: bool, device: torch.device) -> None:
    """An expert without tokens, one with nearly all, and padding, which has no part in it."""
    from serve_app.model.gpu.experts import GpuExperts
    from serve_app.model.gpu.weights import ModuleWeights

    given = record(device, renormalised=renormalised)
    weights = ModuleWeights(given.router.weights[0])
    experts = GpuExperts.of(given, Activation.SILU, weights, fp8=False, invariant=True)
    x = random(tokens, HIDDEN, device=device, seed=4)
    slots = torch.arange(tokens, device=device)
    slots[tokens // 2 + 1 :: 3] = -1
    got = experts(x, slots)
    torch.testing.assert_close(got[slots >= 0], expected(given, x)[slots >= 0], rtol=1e-5, atol=1e-5)
    assert not got[slots < 0].any()
    # Each token has its own bits, alone or among others.
    for token in range(0, tokens, 17):
        if slots[token] >= 0:
            assert torch.equal(experts(x[token : token + 1], slots[token : token + 1])[0], got[token])


def test_pairs_are_arranged_by_expert(device: torch.device) -> None:
    """Many more than a program looks through at once, some of padding."""
    from serve_app.model.gpu.experts import _Plan

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 20, (900, 3), generator=generator, dtype=torch.int32).to(device)
    ids[ids == 7] = 8
    plan = _Plan.of(ids, 20, 16)
    flat = ids.flatten().cpu()
    by_expert = [(flat == expert).nonzero()[:, 0] for expert in range(20)]
    assert plan.order[: int((flat >= 0).sum())].cpu().tolist() == torch.cat(by_expert).tolist()
    tiles = plan.tiles[:, : int(plan.num_tiles)].T.tolist()
    wanted, end = [], 0
    for expert, pairs in enumerate(by_expert):
        first, end = end, end + len(pairs)
        wanted += [[expert, low, end] for low in range(first, end, 16)]
    assert tiles == wanted
    assert len(tiles) <= plan.tiles.shape[1]


def test_experts_in_8_bits(device: torch.device) -> None:
    from serve_app.model.gpu.experts import GpuExperts
    from serve_app.model.gpu.weights import ModuleWeights

    given = record(device)
    weights = ModuleWeights(given.router.weights[0])
    experts = GpuExperts.of(given, Activation.SILU, weights, fp8=True, invariant=True)
    x = random(9, HIDDEN, device=device, seed=4)
    wanted = expected(given, x)
    difference = (experts(x, torch.arange(9, device=device)) - wanted).std() / wanted.std()
    assert 0 < float(difference) < 0.2  # a wrong scale gives more than 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", KERNEL_MIXTURES)
@torch.inference_mode()
def test_mixtures_run_fused(arch: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks beside another row, then a lone token; 300 tokens where there are sinks
    and windows."""
    monkeypatch.setattr(np, "matmul", MATMUL)
    module = mixture(arch)
    tokens = [random_tokens(length, seed) for seed, length in enumerate((300 if arch == "gpt_oss" else 40, 20))]
    expected = [module(row[None]).logits[0] for row in tokens]
    model = from_module(module.to(device), attention_backend="triton")
    assert type(model.executor).__name__ == "GpuDecoder"
    model.allocate_kv_cache(50)
    run = Sequences(model, tokens, [range(1, 40), range(40, 43)])
    got: list[list[Tensor]] = [[], []]
    for counts in ({0: len(tokens[0]) - 21}, {1: 19, 0: 20}, {0: 1, 1: 1}):
        for index, logits in run.step(counts).items():
            got[index].append(logits)
    for parts, reference in zip(got, expected, strict=True):
        assert float((torch.cat(parts) - reference.to(device)).abs().max() / reference.std()) < 1e-3


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engines_tokens_are_transformers(deterministic: bool, device: torch.device) -> None:
    """Through the decode step that graphs capture, beside padding rows."""
    module = mixture("qwen3_moe")
    prompts = [random_tokens(length, length).tolist() for length in (9, 17, 30)]
    expected = [generate_alone(module, prompt, 6) for prompt in prompts]
    options = KernelOptions(deterministic=deterministic)
    model = from_module(module.to(device), attention_backend="triton", max_model_len=128, kernel_options=options)
    requests = [
        EngineRequest(f"r{index}", prompt, SamplingParams(temperature=0.0, max_tokens=6))
        for index, prompt in enumerate(prompts)
    ]
    outcomes = (
        Harness(model, num_blocks=30, max_num_seqs=4, max_num_batched_tokens=24, overlap="on").run(requests).outcomes
    )
    assert [outcomes[f"r{index}", 0].token_ids for index in range(3)] == expected
