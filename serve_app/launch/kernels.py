"""Compiles the CPU kernels while Ray starts, so that engine replicas need not wait for them."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from serve_app.checkpoints.model_files import CACHE_DIR
from serve_app.model.cpu.build import KernelsUnavailableError, compiled, usable_builds
from serve_app.settings import Settings

_NVIDIA = Path("/dev/nvidiactl")
"""Exists if NVIDIA's driver is installed. Then a GPU computes, unless configured otherwise."""


def compile_kernels(applications: Iterable[Settings]) -> None:
    """Compile the fastest usable kernels, if a CPU will compute.

    If none compile, the replicas report it.
    """
    devices = {settings.device for settings in applications}
    if "cpu" not in devices and ("auto" not in devices or _NVIDIA.exists()):
        return
    for build in usable_builds():
        with suppress(KernelsUnavailableError):
            compiled(build, CACHE_DIR.expanduser())
            return
