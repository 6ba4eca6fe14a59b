"""Models are found, read exactly, and everything else is refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from serve_app.checkpoints.model_files import locate_model
from serve_app.errors import ConfigError
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from tests.model.stepping import Sequences, random_tokens
from tests.models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("llama", torch.float32).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def refuse(match: str, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        load_model(ModelOptions(**options))
    assert "\n" not in str(caught.value)


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    for key, value in changes.items():
        name = next(name for name in weights if name.endswith(key.replace("__", ".")))
        if value is None:
            del weights[name]
        else:
            weights[name] = value
    save_file(weights, file, metadata={"format": "pt"})


def test_a_local_folder_gives_the_same_logits(folder: Path) -> None:
    model = load_model(ModelOptions(model=str(folder), dtype="float64"))
    assert (model.vocab_size, model.max_model_len, model.eos_token_ids) == (200, 512, (1,))
    assert (model.dtype, model.device.type, model.name) == (torch.float64, "cpu", "tiny")
    model.allocate_kv_cache(4)
    tokens = random_tokens(30, 0)
    got = Sequences(model, [tokens], [[1, 2]]).step({0: 30})[0]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(tokens[None]).logits[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_a_checkpoint_in_the_hubs_gpt2_layout_gives_the_same_logits(tmp_path: Path) -> None:
    """The hub's GPT-2 was saved without its head: no `transformer.` in front of its keys, and the
    causal masks as buffers."""
    module = tiny_model("gpt2", torch.float64)
    module.config.save_pretrained(tmp_path)
    weights = {key.removeprefix("transformer."): value for key, value in module.state_dict().items()}
    del weights["lm_head.weight"]
    context = module.config.n_positions
    for layer in range(module.config.n_layer):
        weights[f"h.{layer}.attn.bias"] = torch.ones(context, context).tril()[None, None]
    assert "wte.weight" in weights
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(ModelOptions(model=str(tmp_path), dtype="float64"))
    model.allocate_kv_cache(4)
    tokens = random_tokens(30, 0)
    got = Sequences(model, [tokens], [[1, 2]]).step({0: 30})[0]
    with torch.no_grad():
        expected = module(tokens[None]).logits[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


def test_progress_is_reported_to_its_end(folder: Path) -> None:
    news: list[tuple[str, float]] = []
    load_model(ModelOptions(model=str(folder)), lambda stage, fraction: news.append((stage, fraction)))
    last = {stage: fraction for stage, fraction in news}
    assert [*last][:2] == ["reading safetensors", "verifying"]
    assert [*last][-1] == "mapping weights"
    assert set(last.values()) == {1.0}


@pytest.mark.wide
def test_the_default_model_is_converted_once_and_exactly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Torch's attention, so that the empty cache costs no compilation of kernels.
    options = ModelOptions(cache_dir=str(tmp_path), attention_backend="cpu")
    load_model(options)
    (cached,) = (tmp_path / "gguf-floats").iterdir()
    written = (cached / "model.safetensors").stat().st_mtime_ns
    news: list[str] = []
    load_model(options, lambda stage, fraction: news.append(stage))
    assert "converting gguf" not in news
    assert (cached / "model.safetensors").stat().st_mtime_ns == written
    assert capfd.readouterr() == ("", "")

    source = locate_model("default").path
    assert isinstance(source, Path)
    from gguf import GGUFReader, dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(source).tensors}
    weights = load_file(cached / "model.safetensors")
    for ours, theirs in (("layers.7.mlp.down_proj", "blk.7.ffn_down"), ("embed_tokens", "token_embd")):
        expected = torch.from_numpy(
            dequantize(tensors[f"{theirs}.weight"].data, tensors[f"{theirs}.weight"].tensor_type)
        )
        assert torch.equal(weights[f"model.{ours}.weight"], expected)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"model": "/no/such/folder"}, "model: '/no/such/folder' is neither"),
        ({"model": "weights/missing.gguf"}, "model: no GGUF file at .*/weights/missing.gguf"),
        ({"model": __file__}, "nor a hub id"),
        ({"dtype": "int4"}, "dtype: unknown name 'int4'"),
        ({"device": "abacus"}, "device: unknown name 'abacus'"),
        ({"device": "meta"}, "device: 'meta' is not supported"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    refuse(match, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_refused() -> None:
    refuse("device: 'cuda' requested, but torch .* sees 0 GPUs", device="cuda")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    refuse("has no config.json", model=str(tmp_path))


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refuse("no \\*.safetensors", model=str(folder))


def test_missing_weights_are_refused(folder: Path) -> None:
    edit_weights(folder, layers__1__mlp__up_proj__weight=None)
    refuse("weights are missing: model.layers.1.mlp.up_proj.weight", model=str(folder))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    edit_weights(folder, layers__1__mlp__up_proj__weight=torch.zeros(7, 64))
    refuse("weights have the wrong shape: .*up_proj", model=str(folder))


def test_weights_of_another_architecture_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    )
    refuse("weights are missing: .*bias", model=str(folder))


def test_torn_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refuse("cannot load", model=str(folder))


def test_a_model_that_is_no_causal_lm_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    refuse("encoder-decoder", model=str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    refuse("cannot load", model=str(folder))


def test_a_field_of_the_wrong_type_is_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}))
    refuse("cannot load .*hidden_size.* expected int, got str", model=str(folder))


def test_a_damaged_gguf_is_refused_and_leaves_no_cache(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    refuse("cannot read .*bad.gguf", model=str(tmp_path / "bad.gguf"), cache_dir=str(tmp_path / "cache"))
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert {path.parent.name for path in left} <= {"kernels"}
