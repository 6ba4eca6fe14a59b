"""What a GGUF file says is honoured or refused by name: its metadata and its tensors, in both ways
of loading."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFValueType as Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS

from serve_app.checkpoints.gguf_header import GgufHeader
from serve_app.errors import ConfigError
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from serve_app.model.sources.gguf_config import GgufConfig, read_config
from serve_app.model.sources.gguf_file import describe
from serve_app.model.sources.gguf_keys import ARCHITECTURES, HARMLESS, HARMLESS_IN, NEUTRAL, REFUSED_ARCHITECTURES
from tests.examples import examples
from tests.gguf_models import VOCAB, converter_keys, module_of, write_model
from tests.model.stepping import Sequences
from tests.models import needs_compiler, own_cache

pytestmark = needs_compiler

TOKENS = torch.arange(5, 65) * 7 % VOCAB
BACKENDS = ("auto", "cpu")
"""`cpu`: through transformers' modules, which takes every architecture."""


def load(path: Path, **options: Any) -> Any:
    return load_model(ModelOptions(model=str(path), cache_dir=own_cache(path.parent), quantization="none", **options))


def logits(path: Path, **options: Any) -> torch.Tensor:
    model = load(path, **options)
    model.allocate_kv_cache(8)
    return Sequences(model, [TOKENS], [[1, 2, 3, 4, 5]]).step({0: len(TOKENS)})[0]


def difference(got: torch.Tensor, module: Any) -> float:
    with torch.no_grad():
        expected = module(TOKENS[None]).logits[0]
    return float((got - expected).abs().max() / expected.std())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_as_current_converters_write_it_gives_the_models_logits(tmp_path: Path, architecture: str) -> None:
    module = module_of(architecture)
    path = write_model(tmp_path / "tiny.gguf", architecture, module)
    assert difference(logits(path), module) < 1e-3


def scaled(architecture: str, **rope: Any) -> Any:
    """The model with these rotary positions."""
    return module_of(architecture, rope_parameters={"rope_theta": 500.0, **rope}, max_position_embeddings=256)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
YARN_KEYS = [
    ("scaling.type", "yarn", Value.STRING),
    ("scaling.factor", 4.0, Value.FLOAT32),
    ("scaling.original_context_length", 64, Value.UINT32),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "starcoder2"])
@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        (
            [("scaling.type", "linear", Value.STRING), ("scaling.factor", 4.0, Value.FLOAT32)],
            {"rope_type": "linear", "factor": 4.0},
        ),
        ([("scaling.factor", 4.0, Value.FLOAT32)], {"rope_type": "linear", "factor": 4.0}),
        ([("scale_linear", 4.0, Value.FLOAT32)], {"rope_type": "linear", "factor": 4.0}),
        (
            [("scaling.type", "none", Value.STRING), ("scaling.factor", 4.0, Value.FLOAT32)],
            {"rope_type": "default"},
        ),
        (YARN_KEYS, {"rope_type": "yarn", **YARN}),
        (
            [*YARN_KEYS, ("scaling.yarn_beta_fast", 9.0, Value.FLOAT32), ("scaling.yarn_beta_slow", 3, Value.UINT32)],
            {"rope_type": "yarn", **YARN, "beta_fast": 9.0, "beta_slow": 3.0},
        ),
        (
            [*YARN_KEYS, ("scaling.yarn_attn_factor", 1.25, Value.FLOAT32)],
            {"rope_type": "yarn", **YARN, "attention_factor": 1.25},
        ),
        (
            [*YARN_KEYS, ("scaling.yarn_ext_factor", 1.0, Value.FLOAT32), ("scaling.attn_factor", 1.5, Value.FLOAT32)],
            {"rope_type": "yarn", **YARN, "attention_factor": 1.5 * (1 + 0.1 * np.log(4.0))},
        ),
        (
            [("scaling.attn_factor", 1.5, Value.FLOAT32), ("scaling.factor", 2.0, Value.FLOAT32)],
            {
                "rope_type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.5,
                "factor": 1.0, "original_max_position_embeddings": 256,
            },
        ),
    ],
    ids=["linear", "factor alone", "old name", "none", "yarn", "betas", "yarn_attn", "attn", "linear and attn"],
)  # fmt: skip
@pytest.mark.wide
def test_rope_scaling_gives_transformers_logits(
    tmp_path: Path, architecture: str, backend: str, keys: Any, rope: dict[str, Any]
) -> None:
    """W2: each factor of the file counts."""
    module = scaled(architecture, **rope)
    whole = [(f"{architecture}.rope.{key}", *value) for key, *value in keys]
    path = write_model(tmp_path / "tiny.gguf", architecture, module, keys=whole)
    got = logits(path, attention_backend=backend)
    assert difference(got, module) < 1e-3
    if rope["rope_type"] != "default":
        assert difference(got, scaled(architecture, rope_type="default")) > 0.05


@pytest.mark.parametrize(("max_model_len", "kind"), [(None, "long_factor"), (64, "short_factor")])
def test_phi3s_factors_for_long_and_short_contexts_are_used(
    tmp_path: Path, max_model_len: int | None, kind: str
) -> None:
    factors = {"long_factor": [1.0, 2.0, 3.0, 4.0], "short_factor": [1.0, 1.5, 1.5, 2.0]}
    module = module_of(
        "phi3",
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "attention_factor": 1.25,
            **dict.fromkeys(factors, factors[kind]),
        },
    )  # fmt: skip
    path = write_model(
        tmp_path / "tiny.gguf",
        "phi3",
        module,
        keys=[("phi3.rope.scaling.attn_factor", 1.25, Value.FLOAT32)],
        tensors={
            "rope_factors_long.weight": np.array(factors["long_factor"]),
            "rope_factors_short.weight": np.array(factors["short_factor"]),
        },
    )
    assert difference(logits(path, max_model_len=max_model_len), module) < 1e-3


def test_frequency_factors_and_a_linear_factor_count_together(tmp_path: Path) -> None:
    factors = np.linspace(1.0, 8.0, 8)
    module = scaled(
        "llama",
        rope_type="longrope",
        short_factor=[2 * factor for factor in factors.tolist()],
        long_factor=[2 * factor for factor in factors.tolist()],
        attention_factor=1.0,
        factor=1.0,
        original_max_position_embeddings=256,
    )
    key = ("llama.rope.scaling.factor", 2.0, Value.FLOAT32)
    path = write_model(tmp_path / "tiny.gguf", "llama", module, keys=[key], tensors={"rope_freqs.weight": factors})
    assert difference(logits(path), module) < 1e-3


@pytest.mark.parametrize(
    ("architecture", "keys", "changes"),
    [
        ("gemma2", [("attention.scale", 0.125, Value.FLOAT32)], {"query_pre_attn_scalar": 64}),
        ("gemma3", [("attention.sliding_window_pattern", 3, Value.UINT32)], {"layer_types": 3}),
        (
            "gemma3",
            [("attention.sliding_window_pattern", [True, False] * 3 + [True], Value.ARRAY, Value.BOOL)],
            {"layer_types": 2},
        ),
        ("gemma3", [("attention.sliding_window", 0, Value.UINT32)], {"layer_types": 1}),
        ("gemma3", [("final_logit_softcapping", 2.0, Value.FLOAT32)], {"final_logit_softcapping": 2.0}),
        ("phi3", [("attention.sliding_window", 0, Value.UINT32)], {"sliding_window": None}),
        ("qwen3moe", [("expert_weights_norm", False, Value.BOOL)], {"norm_topk_prob": False}),
        ("llama", [("attention.scale", 16**-0.5, Value.FLOAT32)], {}),
        ("llama", [("attention.head_count_kv", [2] * 3, Value.ARRAY, Value.UINT32)], {}),
        ("llama", [("attention.causal", True, Value.BOOL), ("expert_count", 0, Value.UINT32)], {}),
    ],
)  # fmt: skip
def test_other_keys_are_honoured_too(tmp_path: Path, architecture: str, keys: Any, changes: dict[str, Any]) -> None:
    if isinstance(every := changes.get("layer_types"), int):
        changes = {"layer_types": ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(7)]}
    module = module_of(architecture, **changes)
    whole = [(f"{architecture}.{key}", *value) for key, *value in keys]
    path = write_model(tmp_path / "tiny.gguf", architecture, module_of(architecture), keys=whole)
    got = logits(path)
    assert difference(got, module) < 1e-3
    if changes:
        assert difference(got, module_of(architecture)) > 0.01


@pytest.mark.parametrize("scale", [2.0, -1.0, 0.3])
def test_a_scale_of_no_whole_number_is_refused_by_name(tmp_path: Path, scale: float) -> None:
    keys = [("gemma3.attention.scale", scale, Value.FLOAT32)]
    path = write_model(tmp_path / "tiny.gguf", "gemma3", module_of("gemma3"), keys=keys)
    with pytest.raises(ConfigError, match=r"gemma3\.attention\.scale"):
        load(path)


def test_the_27b_gemmas_attention_is_scaled_by_the_width_of_all_heads(tmp_path: Path) -> None:
    """No key of theirs says it: llama.cpp knows the size by its number of layers."""
    values = {}
    for layers in (46, 45):
        module = module_of("gemma2", num_hidden_layers=5)
        keys = [("gemma2.block_count", layers, Value.UINT32)]
        path = write_model(tmp_path / f"{layers}.gguf", "gemma2", module, keys=keys)
        values[layers] = read_config(GgufHeader(path), path).values["query_pre_attn_scalar"]
    assert values == {46: 16, 45: 32}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q.bias", "blk.2.attn_output.bias", "blk.1.attn_sinks.weight", "cls.weight", "blk.0.ffn_up.scale"],
)
def test_a_tensor_of_no_part_of_the_model_is_refused_by_name(tmp_path: Path, backend: str, name: str) -> None:
    """W3."""
    path = write_model(tmp_path / "tiny.gguf", "llama", module_of("llama"), tensors={name: np.ones(64)})
    with pytest.raises(ConfigError, match=f"tensors do not belong to any part of the model: {name}") as caught:
        load(path, attention_backend=backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_key_is_refused_unless_the_setting_names_it(tmp_path: Path, backend: str) -> None:
    module = module_of("llama")
    keys = [("llama.attention.temperature_scale", 0.5, Value.FLOAT32), ("llama.logit_scale", 0.5, Value.FLOAT32)]
    path = write_model(tmp_path / "tiny.gguf", "llama", module, keys=keys)
    match = r"`llama.attention.temperature_scale` \(it is unknown\); `llama.logit_scale` \(0.5 is not computed\)"
    for _ in range(2):
        with pytest.raises(ConfigError, match=match):
            load(path, attention_backend=backend)
    with pytest.raises(
        ConfigError, match=r"`llama.logit_scale` \(0.5 is not computed\)\. Name them in .*ignore_model_keys"
    ):
        load(path, attention_backend=backend, ignore_model_keys=("llama.attention.temperature_scale",))
    both = ("llama.logit_scale", "llama.attention.temperature_scale")
    assert difference(logits(path, attention_backend=backend, ignore_model_keys=both), module) < 1e-3
    # also where an index and a blueprint were written
    with pytest.raises(ConfigError, match=match):
        load(path, attention_backend=backend)
    with pytest.raises(ConfigError, match="ignore_model_keys: .*tiny.gguf has no unsupported key `llama.other`"):
        load(path, attention_backend=backend, ignore_model_keys=(*both, "llama.other"))


@pytest.mark.parametrize(
    ("key", "match"),
    [
        (("split.count", 2, Value.UINT16), "one of 2 parts of a split model; merge them"),
        (("general.type", "adapter", Value.STRING), "general.type is 'adapter', and must be 'model'"),
        (("clip.has_vision_encoder", True, Value.BOOL), r"`clip.has_vision_encoder` \(it has an unknown prefix\)"),
        (("llama.expert_count", 8, Value.UINT32), r"`llama.expert_count` \(8 is not computed\)"),
        (("llama.rope.scaling.type", "dynamic", Value.STRING), r"`llama.rope.scaling.type` \('dynamic' is not known"),
        (("llama.rope.scaling.type", "longrope", Value.STRING), "longrope requires the tensor rope_factors_long"),
        (("llama.rope.scaling.factor", float("nan"), Value.FLOAT32), "llama.rope.scaling.factor is nan, and must be"),
        (("llama.rope.scaling.factor", "4", Value.STRING), "llama.rope.scaling.factor is '4', and must be"),
        (("llama.rope.dimension_count", 8, Value.UINT32), "8 of a head's 16 dimensions cannot be rotated"),
        (("llama.rope.scaling.yarn_ext_factor", 0.5, Value.FLOAT32), "0.5: only 1 is computed"),
        (("llama.rope.scaling.yarn_log_multiplier", 0.1, Value.FLOAT32), "yarn_log_multiplier` .0.1.* is not computed"),
        (("llama.attention.value_length", 8, Value.UINT32), "8, but the module uses 16"),
        (("llama.attention.scale", 0.3, Value.FLOAT32), "0.30.*, but the module uses 0.25"),
        (("llama.attention.sliding_window", 12, Value.UINT32), "`llama.attention.sliding_window` .12 is not computed"),
        (("llama.attention.head_count_kv", [1, 2, 2], Value.ARRAY, Value.UINT32), "llama.attention.head_count_kv d"),
        (("llama.attention.head_count", [4, 4, 2], Value.ARRAY, Value.UINT32), "llama.attention.head_count differs"),
        (("llama.attention.head_count", 0, Value.UINT32), "llama.attention.head_count is 0, and must be"),
        (("llama.block_count", 10**8, Value.UINT32), "llama.block_count is 100000000, and the file has"),
        (("llama.attention.key_length", 10**8, Value.UINT32), "its heads have a width of 100000000, which must be"),
        (("llama.context_length", 2**31, Value.UINT32), "llama.context_length is 2147483648, and must be"),
        (("llama.block_count", "many", Value.STRING), "llama.block_count is 'many', and must be"),
        (("llama.attention.layer_norm_rms_epsilon", "small", Value.STRING), "layer_norm_rms_epsilon is 'small', and"),
        (("llama.pooling_type", 1, Value.UINT32), r"`llama.pooling_type` \(1 is not computed\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path, key: Any, match: str) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", module_of("llama"), keys=[key])
    for backend in BACKENDS:
        with pytest.raises(ConfigError, match=match) as caught:
            load(path, attention_backend=backend)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "attention.layer_norm_rms_epsilon"])
def test_a_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    path = write_model(tmp_path / "tiny.gguf", "llama", module_of("llama"), without=[key])
    with pytest.raises(ConfigError, match=f"its metadata has no llama.{key}"):
        load(path)


@pytest.mark.parametrize("architecture", [*REFUSED_ARCHITECTURES, "gemma", "made-up"])
def test_an_architecture_that_is_not_served_is_refused_by_name(tmp_path: Path, architecture: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reason = REFUSED_ARCHITECTURES.get(architecture, "known: gemma2, gemma3, gemma4, gpt-oss, gpt2, llama")
    with pytest.raises(ConfigError, match=f"architecture '{architecture}' are not supported: {reason}"):
        load(tmp_path / "tiny.gguf")


def test_every_architecture_that_transformers_reads_has_a_row_or_a_reason() -> None:
    theirs = {*GGUF_CONFIG_MAPPING, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer"}
    assert theirs <= {*ARCHITECTURES, *REFUSED_ARCHITECTURES}
    assert not {*ARCHITECTURES} & {*REFUSED_ARCHITECTURES}


def test_each_key_is_in_one_list() -> None:
    for name, row in ARCHITECTURES.items():
        harmless = HARMLESS.keys() | HARMLESS_IN.get(name, {}).keys()
        assert not harmless & (NEUTRAL.keys() | row.attributes.keys())
        assert row.optional.keys() <= row.attributes.keys() | {"attention.head_count_kv", "attention.key_length"}


_KNOWN_KEYS = sorted(
    value.removeprefix("{arch}.")
    for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM, gguf.Keys.WKV)
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith("{arch}.")
)
_EQUAL = {
    "attention.key_length", "attention.value_length", "attention.key_length_swa", "attention.value_length_swa",
    "rope.dimension_count", "rope.dimension_count_swa", "attention.scale", "attention.head_count_kv",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.sliding_window_pattern",
}  # fmt: skip
"""Keys whose value must be what is computed anyway."""


def described(path: Path) -> GgufConfig | ConfigError:
    try:
        return read_config(GgufHeader(path), path)
    except ConfigError as error:
        return error


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    key=st.one_of(st.sampled_from(_KNOWN_KEYS), st.text("abcdefghij_.", min_size=1, max_size=20)),
    value=st.one_of(
        st.tuples(st.integers(0, 2**31), st.just(Value.UINT32)),
        st.tuples(st.floats(0.0, 100.0, width=32), st.just(Value.FLOAT32)),
        st.tuples(st.booleans(), st.just(Value.BOOL)),
        st.tuples(st.sampled_from(["linear", "yarn", "none", "x"]), st.just(Value.STRING)),
    ),
)
def test_no_key_is_dropped_in_silence(tmp_path: Path, architecture: str, key: str, value: tuple[Any, Value]) -> None:
    """It is refused by name, or changes the configuration, or is listed as one that changes
    nothing."""
    module = module_of(architecture)
    whole = f"{architecture}.{key}"
    yarn = [] if architecture == "gpt2" else [(f"{architecture}.rope.{name}", *rest) for name, *rest in YARN_KEYS]
    plain = write_model(tmp_path / "plain.gguf", architecture, module, keys=yarn)
    path = write_model(tmp_path / "more.gguf", architecture, module, keys=[*yarn, (whole, *value)])
    before = read_config(GgufHeader(plain), plain)
    after = described(path)
    if isinstance(after, ConfigError):
        assert whole in str(after)
        return
    listed = key in HARMLESS or key in HARMLESS_IN.get(architecture, {}) or value[0] in NEUTRAL.get(key, ())
    same = key in _EQUAL or (whole, *value) in [*yarn, *converter_keys(architecture, module.config)]
    assert whole in after.refused or after.values != before.values or listed or same


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    architecture=st.sampled_from(["llama", "gemma3", "phi3", "gpt2"]),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_damaged_metadata_are_read_or_refused_in_one_line(
    tmp_path: Path, architecture: str, changes: list[tuple[float, int]]
) -> None:
    path = write_model(tmp_path / "tiny.gguf", architecture, module_of(architecture))
    content = bytearray(path.read_bytes())
    end = content.index(b"token_embd")
    for place, byte in changes:
        content[int(place * end)] = byte
    path.write_bytes(content)
    try:
        describe(path, ())
    except ConfigError as error:
        line = str(error)
    else:
        line = "read"
    assert "\n" not in line
