"""`serve-app check`: what a model would do here, without its weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from serve_app.cli import app
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from tests.models import needs_compiler, tiny_model


def check(*words: str, status: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["check", *words, "--json"])
    assert result.exit_code == status, result.output
    (line,) = result.output.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@needs_compiler
def test_the_default_model_is_fast_and_fits() -> None:
    found = check("default")
    assert found["path"] == "fast (the CPU kernels)"
    assert found["family"] == "llama (LlamaForCausalLM)"
    assert found["format"] == "GGUF: F32, Q4_1, Q8_0"
    assert found["context"].startswith("8,192 tokens; ")
    assert found["kv_cache"].startswith("12,240 bytes per token; ")
    model = load_model(ModelOptions(quantization="auto"))
    assert model.kv_bytes_per_block() // model.block_size == 12_240
    gib = float(found["weights"].split()[1])
    assert gib == pytest.approx(model.executor.weight_bytes / 2**30, rel=0.2)


def test_the_table_has_the_same_lines(tmp_path: Path) -> None:
    tiny_model("gpt2", torch.float32).save_pretrained(tmp_path / "tiny")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "tiny")])
    assert result.exit_code == 0
    found = check(str(tmp_path / "tiny"))
    for name, value in found.items():
        line = next(line for line in result.output.splitlines() if line.split()[0] == name.split("_")[0])
        # the memory that is free changes from one moment to the next
        assert value.partition(";")[0] in line


@pytest.mark.parametrize(
    ("arch", "path"), [("gpt_neox", "modules (GPTNeoXModel without embed_tokens)"), ("mixtral", "")]
)
def test_the_reason_for_the_modules_is_named(arch: str, path: str, tmp_path: Path) -> None:
    tiny_model(arch, torch.float32).save_pretrained(tmp_path / "tiny")
    found = check(str(tmp_path / "tiny"), "--max-model-len", "128")
    assert found["path"].startswith(path)
    assert found["format"] == "safetensors: F32"
    assert found["context"].startswith("128 tokens; ")


def test_what_cannot_be_served_has_status_2_and_one_line(tmp_path: Path) -> None:
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=100, hidden_size=64, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path / "tiny")
    found = check(str(tmp_path / "tiny"), "--max-model-len", "64", status=2)
    assert found["path"] == "refused"
    assert "bloom cannot be served: 0 of its 2 layers" in found["reason"]
    result = CliRunner().invoke(app, ["check", str(tmp_path / "nothing.gguf")])
    assert (result.exit_code, len(result.output.splitlines())) == (2, 1)
    assert "no GGUF file at" in result.output


def test_a_context_that_does_not_fit_is_shortened_or_refused(tmp_path: Path) -> None:
    wide = {"num_hidden_layers": 8, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    module = tiny_model("llama", torch.float32, max_position_embeddings=3_000_000, **wide)
    module.save_pretrained(tmp_path / "tiny")
    assert " of 3,000,000 tokens; 1 requests" in check(str(tmp_path / "tiny"))["context"]
    found = check(str(tmp_path / "tiny"), "--max-model-len", "3000000", status=2)
    assert "max_model_len: 3000000 tokens do not fit the KV pool" in found["reason"]
    check(str(tmp_path / "tiny"), "--max-model-len", "1000")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = check("nobody/nothing", status=2)
    assert found["reason"].startswith("model: cannot load nobody/nothing: ")
