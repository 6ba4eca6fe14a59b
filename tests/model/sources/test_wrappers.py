"""Models with images or sound around a language model, served as their text model: the same logits
as the whole model's for text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from load_tests.families.outcome import randomise
from serve_app.errors import ConfigError
from serve_app.model.cpu.build import find_compiler
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.paged_model import PagedModel
from serve_app.model.sources.wrappers import auto_class
from tests.model.stepping import Sequences
from tests.models import needs_compiler, own_cache

TOKENS = torch.arange(5, 60) * 7 % 200

_TEXT: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
_PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 200, "global_head_dim": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_VISUAL = {**_TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
_AUDIO = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}

WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**_TEXT, "sliding_window": 24}, "vision_config": _TOWER},
    "gemma4": {"text_config": {**_TEXT, **_PER_LAYER, "sliding_window": 24, "num_hidden_layers": 6}},
    "mistral3": {"text_config": {**_TEXT, "model_type": "ministral3"}, "vision_config": _TOWER},
    "qwen3_vl": {"text_config": {**_TEXT, **_AXES}, "vision_config": _VISUAL},
    "qwen3_vl_moe": {"text_config": {**_TEXT, **_AXES, **_EXPERTS}, "vision_config": _VISUAL},
    "llava": {"text_config": _TEXT, "vision_config": {**_TOWER, "model_type": "clip_vision_model"}},
    "voxtral": {"text_config": {**_TEXT, "model_type": "llama"}, "audio_config": _AUDIO},
}


def wrapper(kind: str, **changes: Any) -> Any:
    """A model in float32 whose parameters are all random. changes: of the configuration."""
    config = CONFIG_MAPPING[kind](**{**WRAPPERS[kind], **changes})
    torch.manual_seed(0)
    module = auto_class(config).from_config(config).eval()
    randomise(module)
    return module


def load(folder: Path, **options: Any) -> PagedModel:
    return load_model(ModelOptions(model=str(folder), cache_dir=own_cache(folder.parent), **options))


def difference(model: PagedModel, module: Any) -> float:
    """The largest difference of a logit, in standard deviations."""
    model.allocate_kv_cache(8)
    found = Sequences(model, [TOKENS], [[1, 2, 3, 4]]).step({0: len(TOKENS)})[0]
    with torch.no_grad():
        expected = module(TOKENS[None]).logits[0]
    return float((found - expected).abs().max() / expected.std())


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add tensors to the folder's file, or remove those that are None."""
    path = folder / "model.safetensors"
    weights = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_gives_its_own_logits_for_text(kind: str, tmp_path: Path) -> None:
    module = wrapper(kind)
    module.save_pretrained(tmp_path / kind)
    model = load(tmp_path / kind, attention_backend="cpu")
    assert difference(model, module) < 1e-4
    assert model.eos_token_ids == (1,)


@needs_compiler
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_vl", "llava"])
def test_a_wrappers_text_goes_straight_from_its_files_into_the_kernels(kind: str, tmp_path: Path) -> None:
    module = wrapper(kind)
    module.save_pretrained(tmp_path / kind)
    for _ in range(2):  # the second start has a blueprint
        model = load(tmp_path / kind, quantization="none")
        assert model.mapped_bytes > 0
        assert difference(model, module) < 1e-3


@needs_compiler
@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
def test_both_names_of_a_text_models_tensors_are_known(prefixes: tuple[str, str], tmp_path: Path) -> None:
    """Files of transformers 4 and 5 have different prefixes."""
    module = wrapper("mistral3")
    module.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    of_layers, of_head = prefixes
    weights = {
        name.replace("language_model.model.", of_layers).replace("language_model.lm_head", f"{of_head}lm_head"): tensor
        for name, tensor in load_file(path).items()
    }
    assert f"{of_layers}norm.weight" in weights
    save_file(weights, path, metadata={"format": "pt"})
    model = load(tmp_path / "model", quantization="none")
    assert model.mapped_bytes > 0
    assert difference(model, module) < 1e-3


@pytest.mark.parametrize("backend", [pytest.param("auto", marks=needs_compiler), "cpu"])
def test_only_tensors_of_the_text_model_are_required(backend: str, tmp_path: Path) -> None:
    """Those of images may even be absent. One that belongs to no part is refused, and so is one of
    text that is missing."""
    module, folder = wrapper("gemma3"), tmp_path / "model"
    module.save_pretrained(folder)
    names = load_file(folder / "model.safetensors").keys()
    edit(folder, **{name: None for name in names if not name.startswith("language_model")})
    assert difference(load(folder, attention_backend=backend), module) < 1e-3
    edit(folder, another=torch.zeros(3))
    with pytest.raises(ConfigError, match="weights do not belong to any part of the model: another"):
        load(folder, attention_backend=backend)
    edit(folder, another=None, **{"language_model.model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ConfigError, match=r"weights are missing: .*layers\.1\.mlp\.up_proj\.weight"):
        load(folder, attention_backend=backend)


def test_queries_that_are_scaled_by_their_position_are_not_run_by_kernels_without_the_scale(tmp_path: Path) -> None:
    """Ministral 3 scales them from the 16,384th position on, which no check at load reaches."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 32}
    text = {**_TEXT, "model_type": "ministral3", "rope_parameters": {**rope, "llama_4_scaling_beta": 2.0}}
    module = wrapper("mistral3", text_config=text)
    module.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model", quantization="none")
    assert difference(model, module) < 1e-3
    assert model.mapped_bytes == 0
    if find_compiler() is not None:
        assert load(tmp_path / "model", max_model_len=32).mapped_bytes > 0


def test_a_wrapper_without_a_text_model_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "blip-2"}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="blip-2"):
        load(tmp_path)
