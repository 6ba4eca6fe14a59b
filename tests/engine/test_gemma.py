"""The real Gemma 3 270M, a GGUF file of mixed types, on the C kernels."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from load_tests.bench.quality import compare
from serve_app.core.request import EngineRequest
from serve_app.core.sampling_params import SamplingParams
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.quiet import quiet
from serve_app.text.tokenizer import load_tokenizer
from tests.engine.harness import Harness
from tests.engine.test_parity import TEXTS, generate_alone
from tests.gemma import gemma_file
from tests.model.test_quality import TEXT
from tests.models import needs_bfloat16, needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow]

LONG = "The river is long. " * 120
"""Longer than the windows of 512 tokens."""


@pytest.fixture(scope="module")
def module() -> Any:
    """As transformers reads the file."""
    path = gemma_file()
    with quiet():
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(str(gemma_file()))
    return [tokenizer.encode(text) for text in (*TEXTS[:-1], LONG)]


def load(**options: Any) -> PagedModel:
    return load_model(ModelOptions(model=str(gemma_file()), max_model_len=1024, **options))


def test_tokens_are_those_of_transformers(module: Any, prompts: list[list[int]]) -> None:
    """20 prompts in float32, one of which crosses the windows. Without conversion to floats."""
    model = load(quantization="none")
    assert model.attention_backend == "kernels"
    assert model.mapped_bytes >= model.cost.weight_bytes
    params = SamplingParams(temperature=0.0, max_tokens=24)
    requests = [EngineRequest(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
    run = Harness(model, max_num_batched_tokens=128).run(requests)
    assert max(map(len, prompts)) > 600
    for i, prompt in enumerate(prompts):
        assert run.outcomes[str(i), 0].token_ids == generate_alone(module, prompt, 24), f"prompt {i}"


@pytest.mark.parametrize(
    ("options", "most"),
    [({"quantization": "int8"}, 0.01), pytest.param({"dtype": "bfloat16"}, 0.01, marks=needs_bfloat16)],
    ids=["int8", "bfloat16"],
)
@torch.inference_mode()
def test_narrow_modes_stay_near_to_exact_mode(options: dict[str, str], most: float) -> None:
    ids = load_tokenizer(str(gemma_file())).encode(TEXT)
    quality = compare(load(quantization="none"), load(**options), ids, window=512)
    assert quality.kl_mean < most, quality
