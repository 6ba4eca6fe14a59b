"""The three builds of the kernels; those that this machine cannot run are skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve_app.model.cpu.build import BUILDS, best_build
from serve_app.model.cpu.ops import Kernels


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session", params=BUILDS)
def kernels(request: pytest.FixtureRequest, kernels_folder: Path) -> Kernels:
    builds = list(BUILDS)
    if builds.index(request.param) < builds.index(best_build()):
        pytest.skip(f"this CPU cannot run {request.param}")
    return Kernels(request.param, kernels_folder)


@pytest.fixture(params=[1, 2, 3], ids=lambda threads: f"{threads}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """The suite's own count of one comes back after the test."""
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)
