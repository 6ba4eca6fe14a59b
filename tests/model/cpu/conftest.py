"""The builds of the kernels, and of their inner functions; those that this machine cannot run are
skipped."""

import ctypes
import subprocess
from collections.abc import Iterator
from ctypes import c_float, c_int, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.model.cpu.build import _FLAGS, BUILDS, SOURCES, find_compiler, usable_builds
from serve_app.model.cpu.ops import Kernels
from tests.models import needs_compiler


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def _params() -> Iterator[object]:
    """All builds; `make test` runs the fastest that this machine can run and the portable one."""
    quick = {usable_builds()[0], "portable"}
    for build in BUILDS:
        yield pytest.param(build, marks=[needs_compiler, *([] if build in quick else [pytest.mark.wide])])


@pytest.fixture(scope="session", params=_params())
def kernels(request: pytest.FixtureRequest, kernels_folder: Path) -> Kernels:
    if request.param not in usable_builds():
        pytest.skip(f"this CPU cannot run {request.param}")
    return Kernels(request.param, kernels_folder)


@pytest.fixture(scope="session")
def shim(kernels: Kernels, kernels_folder: Path) -> ctypes.CDLL:
    path = kernels_folder / f"shim-{kernels.build}.so"
    compiler = find_compiler()
    assert compiler is not None  # it made the kernels
    flags = [*_FLAGS, *(f"-m{name}" for name in BUILDS[kernels.build]), "-Wall", "-Wextra", "-Werror"]
    source = Path(__file__).with_name("shim.c")
    subprocess.run([compiler, *flags, f"-I{SOURCES}", str(source), "-o", str(path), "-lm"], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture(params=[1, 2, 3], ids=lambda threads: f"{threads}-threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """The suite's own count of one comes back after the test."""
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def call(function: Any, *arguments: Tensor | int | float) -> None:
    kinds = {Tensor: c_void_p, int: c_int, float: c_float}
    function.restype = None
    function.argtypes = [kinds[type(argument)] for argument in arguments]
    function(*(argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments))
