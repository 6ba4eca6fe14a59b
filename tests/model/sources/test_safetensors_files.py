"""safetensors that go straight from the mapped files into the kernels' layout, against
transformers' loading."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from serve_app.errors import ConfigError
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from tests.model.stepping import Sequences
from tests.models import needs_compiler, own_cache, tiny_model

pytestmark = needs_compiler

TOKENS = torch.arange(5, 60) * 7 % 200


def save(folder: Path, arch: str, dtype: torch.dtype, **how: Any) -> Any:
    """The module as transformers reads it back in float32."""
    tiny_model(arch, dtype).save_pretrained(folder, **how)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder: Path, news: list[str], **options: Any) -> PagedModel:
    return load_model(
        ModelOptions(model=str(folder), cache_dir=own_cache(folder.parent), **options),
        lambda stage, fraction: news.append(stage),
    )


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def logits(model: PagedModel) -> torch.Tensor:
    model.allocate_kv_cache(8)
    return Sequences(model, [TOKENS], [[1, 2, 3, 4]]).step({0: len(TOKENS)})[0]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gemma4", "smollm3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_are_those_of_the_widened_weights(tmp_path: Path, arch: str, dtype: torch.dtype) -> None:
    folder = tmp_path / "model"
    module = save(folder, arch, dtype)
    with torch.no_grad():
        expected = module(TOKENS[None]).logits[0]
    news: list[str] = []
    exact = logits(load(folder, news, quantization="none"))
    assert list(dict.fromkeys(news)) == ["reading safetensors", "verifying", "loading weights", "mapping weights"]
    assert float((exact - expected).abs().max() / expected.std()) < 1e-3
    assert torch.equal(logits(load(folder, [], quantization="none")), exact)  # from what is cached


def test_a_head_that_differs_from_what_the_configuration_ties_it_to_is_used(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, "llama", torch.float32)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    change_config(folder, tie_word_embeddings=True)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(TOKENS[None]).logits[0]
    found = logits(load(folder, [], quantization="none"))
    assert float((found - expected).abs().max() / expected.std()) < 1e-3


def test_a_changed_configuration_is_not_served_from_what_was_packed_before(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, "llama", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    load(folder, [], quantization="none")
    change_config(folder, tie_word_embeddings=True)
    news: list[str] = []
    load(folder, news, quantization="none")
    assert "loading weights" in news
    assert "mapping weights" in news


def test_many_files_and_the_ends_of_a_text_that_the_generation_config_adds(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, "llama", torch.bfloat16, max_shard_size="40kB")
    assert len([*folder.glob("*.safetensors")]) > 2
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [5, 6]}))
    model = load(folder, [])
    assert model.mapped_bytes > 0
    assert model.eos_token_ids == (5, 6, 1)


def test_what_is_no_such_model_is_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "model"
    save(folder, "gemma2", torch.bfloat16)
    assert load(folder, []).mapped_bytes == 0
    assert "is converted to floats first" in caplog.text


def test_weights_of_no_part_and_files_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save(folder, "llama", torch.bfloat16)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    save_file(load_file(path) | {"model.more": torch.zeros(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="do not belong to any part of the model"):
        load(folder, [])
    path.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match="cannot load"):
        load(folder, [])
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="cannot load"):
        load(folder, [])
