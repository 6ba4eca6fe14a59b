"""The kernels that are compiled while Ray starts."""

from pathlib import Path

import pytest

from serve_app.launch import kernels
from serve_app.model.cpu.build import load_library, usable_builds
from serve_app.settings import Settings
from tests.models import needs_compiler


@needs_compiler
@pytest.mark.wide
def test_compiles_what_a_replica_will_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CACHE_DIR", tmp_path)
    kernels.compile_kernels([Settings(device="cpu")])
    (library,) = tmp_path.glob("kernels/*.so")
    load_library(usable_builds()[0], tmp_path)
    assert [*tmp_path.glob("kernels/*.so")] == [library]


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_compiles_nothing_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(kernels, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(kernels, "_NVIDIA", tmp_path)
    kernels.compile_kernels([Settings(device=device)])
    assert not [*tmp_path.iterdir()]
