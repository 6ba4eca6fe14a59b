"""Blueprints on disk: a later start builds the same model without transformers, and never from a
wrong one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.model.test_packed_weights import gguf, load, logits
from tests.models import needs_compiler, tiny_model

pytestmark = needs_compiler

__all__ = ["gguf"]

LATER_START = """
import sys
import torch
from serve_app.model.loader import load_model
from serve_app.model.options import ModelOptions
from tests.model.stepping import Sequences
path, cache_dir, quantization, target = sys.argv[1:]
model = load_model(ModelOptions(model=path, cache_dir=cache_dir, quantization=quantization))
model.allocate_kv_cache(8)
tokens = torch.arange(3, 40) * 7 % 200
torch.save(Sequences(model, [tokens], [[1, 2, 3]]).step({0: len(tokens)})[0], target)
print(*sys.modules)
"""


def blueprints(model: Path) -> list[Path]:
    return sorted((model.parent / "cache" / "blueprints").glob("*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    tiny_model("qwen3", torch.float32, head_dim=32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["gguf", "folder"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_later_start_computes_the_same_without_transformers(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, quantization: str
) -> None:
    model: Path = request.getfixturevalue(kind)
    first = load(model, quantization=quantization)
    expected = logits(first)
    script = tmp_path / "later_start.py"
    script.write_text(LATER_START)
    arguments = [str(script), str(model), str(model.parent / "cache"), quantization, str(tmp_path / "logits.pt")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    told = subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True)
    modules = told.stdout.split()
    assert "serve_app.model.paged_model" in modules
    assert [name for name in modules if name.startswith("transformers")] == []
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_what_is_known_of_the_model_is_the_same(gguf: Path) -> None:
    first, second = load(gguf, max_model_len=100), load(gguf, max_model_len=100)
    assert second.facts == first.facts
    assert second.facts.max_model_len == 100


def test_each_choice_has_its_own_and_a_changed_model_replaces_it(gguf: Path) -> None:
    load(gguf)
    load(gguf, quantization="int8")
    load(gguf, max_model_len=50)
    before = blueprints(gguf)
    assert len(before) == 3
    os.utime(gguf, ns=(0, 0))
    load(gguf)
    after = blueprints(gguf)
    assert len(after) == 3
    assert len({*before} & {*after}) == 2


def test_a_file_of_two_names_keeps_them_apart(gguf: Path) -> None:
    link = gguf.with_name("link.gguf")
    link.symlink_to(gguf)
    assert [load(path).name for path in (gguf, link, gguf, link)] == ["small", "link"] * 2


def test_a_changed_configuration_is_seen(folder: Path) -> None:
    before = logits(load(folder))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))
    assert not torch.equal(logits(load(folder)), before)


@pytest.mark.parametrize("damaged", [b"", b"no pickle", b"\x80\x04N."])
def test_a_damaged_one_is_named_and_made_again(gguf: Path, damaged: bytes, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits(load(gguf))
    (path,) = blueprints(gguf)
    path.write_bytes(damaged)
    assert torch.equal(logits(load(gguf)), expected)
    assert f"{path} is damaged" in caplog.text
    caplog.clear()
    assert torch.equal(logits(load(gguf)), expected)
    assert not caplog.text


def test_a_disk_that_takes_none_is_no_error(gguf: Path) -> None:
    expected = logits(load(gguf))
    (gguf.parent / "cache" / "blueprints").rename(gguf.parent / "kept")
    (gguf.parent / "cache" / "blueprints").touch()  # where a folder should be
    assert torch.equal(logits(load(gguf)), expected)
