"""A request's logits have the same bits alone, batched, chunked in any way, in consecutive or
scattered blocks."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from serve_app.model.loader import from_module, load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from tests.model.stepping import Sequences, random_tokens
from tests.models import KERNEL_MODES, in_mode, needs_bfloat16, needs_compiler, tiny_model

pytestmark = pytest.mark.wide


@pytest.fixture(
    scope="module",
    params=[
        {"quantization": "none"},
        pytest.param({"quantization": "int8"}, marks=needs_compiler),
        pytest.param({"dtype": "bfloat16"}, marks=[needs_compiler, needs_bfloat16]),
    ],
    ids=["none", "int8", "bfloat16"],
)
def real(request: pytest.FixtureRequest) -> PagedModel:
    model = load_model(ModelOptions(**request.param))
    model.allocate_kv_cache(200)
    return model


@pytest.fixture(params=[1, 2], ids=lambda threads: f"{threads}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def run(
    model: PagedModel, tokens: list[Tensor], tables: list[range | list[int]], steps: list[dict[int, int]]
) -> Tensor:
    """Logits of sequence 0 at all positions."""
    sequences = Sequences(model, tokens, tables)
    return torch.cat([logits[0] for logits in map(sequences.step, steps) if 0 in logits])


def check(model: PagedModel) -> None:
    # 420 tokens: four value segments, several query tiles, both ways to decode.
    tokens = [random_tokens(length, seed) for seed, length in enumerate((420, 40, 290, 7))]
    consecutive: list[range | list[int]] = [range(1, 28), range(28, 31), range(31, 50), range(50, 51)]
    scattered: list[range | list[int]] = [
        [*range(99, 72, -1)],
        range(20, 23),
        [100 + index * 7 % 19 for index in range(19)],
        [50],
    ]
    alone = run(model, tokens, consecutive, [{0: 420}])
    for tables, steps in (
        (scattered, [{0: 417}, {0: 1}, {0: 1}, {0: 1}]),
        (scattered, [{1: 40, 0: 123, 2: 9}, {0: 1, 2: 5}, {0: 2, 3: 7}, {2: 11, 0: 294}]),
        (consecutive, [{0: 417}, {0: 1, 2: 200}, {0: 1, 1: 3, 2: 1}, {0: 1, 2: 1}]),
        (consecutive, [{0: 65, 2: 88}, *[{0: 1, 2: 1}] * 2, {0: 33, 1: 39}, {0: 319, 1: 1, 3: 3}, {3: 4, 0: 1}]),
    ):
        assert torch.equal(run(model, tokens, tables, steps), alone)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_bits_of_the_real_model(real: PagedModel) -> None:
    check(real)


@pytest.mark.parametrize("arch", ["gpt2", "llama", "gemma2", "mistral", "qwen3", "phi"])
@pytest.mark.usefixtures("threads")
def test_bits_of_tiny_models_with_torch(arch: str) -> None:
    model = from_module(tiny_model(arch, torch.float32), attention_backend="cpu")
    model.allocate_kv_cache(200)
    check(model)


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma4", "smollm3"])
@pytest.mark.usefixtures("threads")
def test_bits_of_tiny_models_with_kernels(arch: str, mode: str) -> None:
    model = in_mode(mode, tiny_model(arch, torch.float32))
    model.allocate_kv_cache(200)
    check(model)


@needs_compiler
@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_bits_do_not_depend_on_the_number_of_threads(mode: str) -> None:
    model = in_mode(mode, tiny_model("qwen3", torch.float32))
    model.allocate_kv_cache(60)
    results = []
    for threads in (3, 2, 1):  # the suite runs with one
        torch.set_num_threads(threads)
        results.append(run(model, [random_tokens(300, 0)], [range(1, 20)], [{0: 290}, {0: 10}]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_compiler
@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_bits_do_not_depend_on_how_threads_share_sequences(mode: str) -> None:
    """Steps of many sequences are cut between threads, unless one of them outweighs the others (the
    second step)."""
    model = in_mode(mode, tiny_model("mistral", torch.float32))
    model.allocate_kv_cache(60)
    lengths = [29, *range(6, 18)]
    tokens = [random_tokens(length + 40, seed) for seed, length in enumerate(lengths)]
    tables = [range(1 + 4 * i, 5 + 4 * i) for i in range(len(tokens))]
    steps = [dict(enumerate(lengths)), dict.fromkeys(range(13), 1) | {4: 30}, dict.fromkeys(range(13), 2)]
    results = []
    for threads in (3, 2, 1):  # the suite runs with one
        torch.set_num_threads(threads)
        sequences = Sequences(model, tokens, tables)
        results.append([torch.cat(list(sequences.step(counts).values())) for counts in steps])
    for apart in results[:2]:
        assert all(map(torch.equal, apart, results[2]))


@pytest.mark.parametrize("threads", [5], indirect=True)
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
@pytest.mark.usefixtures("threads")
def test_bits_when_threads_cut_rows(arch: str) -> None:
    """Not of gemma2: its head caps logits in transformers' code, where threads may cut within a
    vector."""
    model = from_module(tiny_model(arch, torch.float32), attention_backend="cpu")
    model.allocate_kv_cache(200)
    check(model)
