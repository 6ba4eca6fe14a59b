"""Replicas come under load and go after it, on a real cluster, without a stream noticing."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.conftest import Server, wait_for
from tests.serving.traffic import replicas, traffic

StartServer = Callable[..., Server]


@pytest.mark.cluster
async def test_replicas_come_under_load_and_go_after_it(start: StartServer, tiny_folder: Path) -> None:
    server = start(
        {
            "model": str(tiny_folder),
            "served_model_name": "tiny",
            "device": "cpu",
            "autoscaling": {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 0.5},
            "engine": {"max_num_seqs": 4, "kv_cache_gib": 0.05},
        },
        {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"},
    )
    await asyncio.to_thread(server.wait_ready)
    assert len(replicas(server)) == 1
    async with traffic(server) as seen:
        await asyncio.to_thread(wait_for, lambda: len(replicas(server)) == 2, "a second replica", timeout_s=90)
        seen.workers = 1
        await asyncio.to_thread(wait_for, lambda: len(replicas(server)) == 1, "one replica is left", timeout_s=90)
        done = seen.done
        await asyncio.to_thread(wait_for, lambda: seen.done > done, "the stream goes on")
    assert seen.wrong == []
