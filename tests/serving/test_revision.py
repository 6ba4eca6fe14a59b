"""Which replicas may continue each other's streams. No cluster."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from serve_app.checkpoints.model_files import digest_content, locate_model
from serve_app.engine.core import EngineConfig, EngineCore
from serve_app.model.executor import UnsupportedModelError
from serve_app.model.executors import gpu
from serve_app.model.options import ModelOptions
from serve_app.serving.revision import identify, revision_of
from serve_app.text.tokenizer import load_tokenizer
from tests.cli.conftest import tiny_folder

pytestmark = pytest.mark.wide

__all__ = ["tiny_folder"]


def revision(folder: Path, **options: Any) -> str:
    """Of a replica that has loaded the model in `folder`."""
    model = ModelOptions(model=str(folder), device="cpu", **options)
    engine = EngineCore.load(EngineConfig(model=model, max_num_seqs=2, max_num_batched_tokens=16, kv_cache_gib=0.01))
    identity = identify(
        asdict(engine.info),
        weights=digest_content(locate_model(str(folder))),
        tokenizer=load_tokenizer(str(folder)).digest,
        deterministic=False,
    )
    return revision_of(identity)


def flip_a_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def add_a_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")


def end_elsewhere(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(path.read_text().replace("{", '{"eos_token_id": 7,', 1))


@pytest.mark.parametrize("change", [flip_a_weight, add_a_template, end_elsewhere])
def test_other_files_under_the_same_name_are_another_revision(
    tiny_folder: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    before = revision(folder)
    change(folder)
    assert revision(folder) != before


def test_what_is_computed_counts_and_not_what_it_was_called(tiny_folder: Path, tmp_path: Path) -> None:
    here = revision(tiny_folder)
    assert revision(Path(shutil.copytree(tiny_folder, tmp_path / "elsewhere"))) == here
    assert revision(tiny_folder, dtype="float32", quantization="none") == here, "as the defaults turn out here"
    others = [{"attention_backend": "cpu"}, {"dtype": "bfloat16"}, {"max_model_len": 64}, {"quantization": "auto"}]
    assert len({here, *(revision(tiny_folder, **options) for options in others)}) == 1 + len(others)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the Triton executor needs Triton")
def test_a_replica_that_fell_back_to_a_slower_executor_is_another_revision(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention, dtype and build are the same."""

    def fail(*_: object) -> None:
        raise UnsupportedModelError("a kernel failed")

    from serve_app.model.gpu import decoder

    monkeypatch.setattr(decoder, "TOKEN_BUCKETS", (16,))
    fast = revision(tiny_folder, attention_backend="triton")
    monkeypatch.setattr(gpu, "_check_options", fail)
    assert revision(tiny_folder, attention_backend="triton") != fast
    assert "a kernel failed" in caplog.text


def test_a_replica_that_samples_elsewhere_is_another_revision(tiny_folder: Path) -> None:
    model = ModelOptions(model=str(tiny_folder), device="cpu")
    info = asdict(
        EngineCore.load(EngineConfig(model=model, max_num_seqs=2, max_num_batched_tokens=16, kv_cache_gib=0.01)).info
    )
    facts = {"weights": "", "tokenizer": "", "deterministic": False}
    assert info["sampler"] == "HostSampler"
    assert revision_of(identify(info, **facts)) != revision_of(identify(info | {"sampler": "DeviceSampler"}, **facts))
