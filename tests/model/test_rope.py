"""RoPE whose frequencies transformers derives from the longest sequence of a call."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from serve_app.model.loader import from_module
from tests.model.stepping import Sequences, random_tokens

LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
TABLES = [[5, 1, 6, 2, 9, 10], [3, 7, 4, 8, 11, 12]]


def model(arch: str = "phi3") -> Any:
    """Trained on 32 tokens, stretched to 512."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        arch, vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, original_max_position_embeddings=32, pad_token_id=0,
        rope_parameters={**LONG, "original_max_position_embeddings": 32},
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module


@pytest.mark.parametrize("arch", ["phi3", "llama"])
@torch.inference_mode()
def test_a_long_neighbour_changes_nobodys_positions(arch: str) -> None:
    paged = from_module(model(arch))
    tokens = [random_tokens(20, 0), random_tokens(70, 1)]
    paged.allocate_kv_cache(14)
    alone = Sequences(paged, tokens[:1], TABLES[:1]).step({0: 20})[0]
    paged.allocate_kv_cache(14)
    beside = Sequences(paged, tokens, TABLES).step({0: 20, 1: 70})[0]
    assert torch.equal(alone, beside)


@pytest.mark.parametrize(("max_model_len", "length"), [(32, 20), (512, 70)])
@torch.inference_mode()
def test_the_context_decides_which_frequencies_there_are(max_model_len: int, length: int) -> None:
    """Those of transformers for a sequence that is as long."""
    module, tokens = model(), random_tokens(length, 0)
    expected = module(tokens[None]).logits[0]
    paged = from_module(module, max_model_len=max_model_len)
    paged.allocate_kv_cache(14)
    got = Sequences(paged, [tokens], TABLES[:1]).step({0: length})[0]
    assert float((got - expected).abs().max() / expected.std()) < 1e-3
