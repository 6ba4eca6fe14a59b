"""Folders: each key of config.json is used or refused by name, and published configurations
load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.errors import ConfigError
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.sources.config_keys import GENERATION, HARMLESS, NEUTRAL, read_config
from tests.examples import examples
from tests.model.sources.published_configs import PUBLISHED
from tests.models import ARCHITECTURES, MIXTURES_OF_EXPERTS, own_cache, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", torch.float32).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def add(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def load(folder: Path, **options: Any) -> Any:
    return load_model(ModelOptions(model=str(folder), cache_dir=own_cache(folder.parent), **options))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    assert read_config(str(tmp_path), ()).model_type == PUBLISHED[name]["model_type"]


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXTURES_OF_EXPERTS])
def test_what_transformers_writes_loads(tmp_path: Path, architecture: str) -> None:
    tiny_model(architecture).config.save_pretrained(tmp_path)
    read_config(str(tmp_path), ())


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_a_key_that_the_class_does_not_use_is_refused_unless_the_setting_names_it(folder: Path, backend: str) -> None:
    add(folder, residual_multiplier=0.5, _name_or_path="somewhere", use_mrope=False, unknown_and_empty=None)
    for _ in range(2):
        with pytest.raises(ConfigError, match="config.json: .* `residual_multiplier` .LlamaConfig does not use it"):
            load(folder, attention_backend=backend)
    load(folder, attention_backend=backend, ignore_model_keys=("residual_multiplier",))
    with pytest.raises(ConfigError, match="`residual_multiplier`"):
        load(folder, attention_backend=backend)
    with pytest.raises(ConfigError, match="ignore_model_keys: .* has no unsupported key `rms_norm_eps`"):
        load(folder, attention_backend=backend, ignore_model_keys=("residual_multiplier", "rms_norm_eps"))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"sliding_window": 16}, "sliding_window"),
        ({"use_mrope": True}, "use_mrope"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"is_causal": False}, "is_causal"),
        ({"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 2.0}}, "rope_parameters.beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 2.0}}, "rope_parameters.attn_factor"),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, "rope_parameters.mrope_section"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_parameters.rope_type"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(folder: Path, values: dict[str, Any], key: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, **values}))
    with pytest.raises(ConfigError, match=f"`{key}`") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_key_of_rotary_positions_in_a_model_without_any_is_refused(tmp_path: Path) -> None:
    tiny_model("gpt2", torch.float32).save_pretrained(tmp_path / "tiny")
    add(tmp_path / "tiny", rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(ConfigError, match="`rope_theta` .GPT2Config does not use it.; `rope_scaling`"):
        load(tmp_path / "tiny")


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"contains an adapter \(adapter_config.json\)"):
        load(folder)


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=st.text("abcdefghij_", min_size=3, max_size=20).filter(lambda key: not key.startswith("_")),
    value=st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=5)),
)
def test_no_key_is_dropped_in_silence(folder: Path, key: str, value: Any) -> None:
    whole = (folder / "config.json").read_text()
    add(folder, **{key: value})
    try:
        if key in HARMLESS or value in NEUTRAL.get(key, ()):
            read_config(str(folder), ())
        else:
            with pytest.raises(ConfigError, match=f"`{key}`"):
                read_config(str(folder), ())
    finally:
        (folder / "config.json").write_text(whole)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [3]),
        ("begin_suppress_tokens", [3]),
        ("bad_words_ids", [[3]]),
        ("forced_eos_token_id", 2),
        ("sequence_bias", [[[3], -1.0]]),
        ("no_repeat_ngram_size", 3),
        ("min_length", 5),
        ("guidance_scale", 1.5),
        ("stop_strings", ["x"]),
    ],
)
def test_what_a_generation_config_would_change_is_refused_by_name(folder: Path, key: str, value: Any) -> None:
    path = folder / "generation_config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, key: value}))
    with pytest.raises(ConfigError, match=f"`generation_config.{key}`"):
        read_config(str(folder), ())
    assert read_config(str(folder), (f"generation_config.{key}",))
    path.write_text(json.dumps({**written, **dict.fromkeys(GENERATION), "min_length": 0, "temperature": 0.6}))
    assert read_config(str(folder), ())
