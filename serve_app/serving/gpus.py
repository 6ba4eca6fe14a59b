"""Compares the GPUs that replicas need with those in Ray's cluster.

Ray waits for missing GPUs silently.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import ray

from serve_app.environment import internal_key_file
from serve_app.serving.ray_patches import gpus_wanted
from serve_app.settings import Settings

logger = logging.getLogger(__name__)

_LOOK_S, _REPORT_S = 1.0, 30.0


def cluster_gpus() -> int:
    """Return the number of GPUs on all nodes, free or not. Raises `ray.exceptions.RayError`."""
    return int(cluster_resources().get("GPU", 0))


def cluster_resources() -> dict[str, float]:
    """Return the resources of all nodes by Ray's names, free or not.

    Raises `ray.exceptions.RayError`.
    """
    return dict(ray.cluster_resources())


def use_gpu(settings: Settings) -> bool:
    """Whether each replica uses a GPU: as configured; for `auto`, if Ray's cluster has any."""
    if settings.device == "auto":
        return bool(ray.is_initialized() and cluster_gpus() >= 1)
    return settings.device == "cuda"


class GpuReports:
    """Reports missing GPUs, at once and then every 30 s. Ray does not report them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints a line."""
        self._say = say
        self._next = 0.0

    def look(self) -> None:
        """Report missing GPUs. Call this repeatedly while applications start.

        Returns at once if the last check was less than a second ago. Raises Ray's errors.
        """
        if (now := time.monotonic()) < self._next:
            return
        wanted, there = gpus_wanted(), cluster_gpus()
        if is_lacking := wanted > there:
            self._say(f"waiting for {wanted:g} GPU{'s' * (wanted > 1)}; the cluster has {there or 'none'}")
        self._next = now + (_REPORT_S if is_lacking else _LOOK_S)


async def report_lacking_gpus() -> None:
    """Log missing GPUs every 30 s until cancelled.

    Does nothing if our launcher runs, which reports them.
    """
    reports = GpuReports(logger.warning)
    while internal_key_file() is None:
        await asyncio.to_thread(reports.look)
        await asyncio.sleep(_LOOK_S)
