"""Compiles the CPU kernels while Ray starts; the engine replicas would have to wait for it later."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from serve_app.checkpoints.model_files import CACHE_DIR
from serve_app.model.cpu.build import KernelsUnavailableError, compiled, usable_builds
from serve_app.settings import Settings

_NVIDIA = Path("/dev/nvidiactl")
"""There where NVIDIA's driver is, and a GPU computes unless told otherwise."""


def compile_kernels(applications: Iterable[Settings]) -> None:
    """The fastest that compile, if a CPU is to compute. Where none do, the replicas will say so."""
    devices = {settings.device for settings in applications}
    if "cpu" not in devices and ("auto" not in devices or _NVIDIA.exists()):
        return
    for build in usable_builds():
        with suppress(KernelsUnavailableError):
            compiled(build, CACHE_DIR.expanduser())
            return
