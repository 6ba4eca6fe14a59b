"""How many GPUs the replicas ask for, beside what Ray's cluster has: without them Ray waits, and says nothing."""

import asyncio
import logging
from collections.abc import Iterable

import ray

from serve_app.environment import internal_key_file
from serve_app.settings import Settings

logger = logging.getLogger(__name__)

_REPORT_S = 30.0


def cluster_gpus() -> int:
    """GPUs of all nodes, free or not. Raises `ray.exceptions.RayError`."""
    return int(ray.cluster_resources().get("GPU", 0))


def use_gpu(settings: Settings) -> bool:
    """Whether each replica takes a GPU: as told, or if Ray's cluster has any."""
    if settings.device == "auto":
        return bool(ray.is_initialized() and cluster_gpus() >= 1)
    return settings.device == "cuda"


def gpus_wanted(applications: Iterable[Settings]) -> int:
    """GPUs that the replicas of these applications take before Ray says that all of them run."""
    return sum(
        settings.num_replicas if settings.autoscaling is None else settings.autoscaling.min_replicas
        for settings in applications
        if use_gpu(settings)
    )


def lacking_gpus(applications: Iterable[Settings]) -> str | None:
    """What is waited for, if the cluster has too few; None if it has enough."""
    wanted, there = gpus_wanted(applications), cluster_gpus()
    if wanted <= there:
        return None
    return f"waiting for {wanted} GPU{'s' * (wanted > 1)}; the cluster has {there or 'none'}"


async def report_lacking_gpus(settings: Settings) -> None:
    """Log what is waited for, every 30 s until cancelled; nothing where our launcher does so."""
    while internal_key_file() is None:
        if (lack := await asyncio.to_thread(lacking_gpus, [settings])) is not None:
            logger.warning(lack)
        await asyncio.sleep(_REPORT_S)
