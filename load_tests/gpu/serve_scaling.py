"""One server under more load than a replica can serve: replicas scale up and down, metrics
show it."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load_tests.chaos.fleet import REPOSITORY, wait_for
from load_tests.chaos.traffic import ask, open_session, send
from load_tests.gpu.checks import Checks, Result
from load_tests.gpu.serve_faults import PROMPTS
from load_tests.gpu.server import Started, server, small_steps
from serve_app.system.http_client import fetch

_USERS = 64
_SCALE = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 3.0, "downscale_delay_s": 5.0}
_MOVING = {
    "serve_app_engine_busy_ratio": 0.5,
    "serve_app_ingress_queue_depth": 1,
    "serve_app_waiting_served_ratio": 0.01,
}
_MOVING_ON_GPUS = {"serve_app_gpu_utilization_ratio": 0.5, "serve_app_gpu_memory_used_bytes": 1}
"""Minimum values that gauges must reach under load."""
_DASHBOARDS = REPOSITORY / "grafana" / "json"
_NEEDS_MORE = re.compile(r"_key_")
"""Series that exist only with API keys."""
_ONLY_ON_GPUS = re.compile(r"_gpu_")


def check_scaling(checks: Checks, device: str, folder: Callable[[], Path]) -> None:
    """Send load until there are two replicas and the gauges have moved, then none until there is
    one."""
    gpu = device == "cuda"
    wanted = {**_MOVING, **(_MOVING_ON_GPUS if gpu else {})}
    highest = dict.fromkeys(wanted, 0.0)
    engine: dict[str, Any] = {"kv_cache_gib": 0.5, "max_num_seqs": 16, "max_num_waiting": 0, **small_steps(device)}
    args: dict[str, Any] = {
        "dtype": "bfloat16" if gpu else "float32",
        "engine": engine,
        "autoscaling": _SCALE,
        "ingress": {"max_queued_requests": 1024},
    }
    with server(folder(), device, **args) as started:

        def gauges() -> Result:
            return {"passed": all(highest[name] >= least for name, least in wanted.items()), **highest}

        def replicas() -> Result:
            return asyncio.run(_up_and_down(started, highest))

        def dashboards() -> Result:
            named, missing = _series(started, gpu)
            return {"passed": not missing, "series": named, "missing": ", ".join(sorted(missing))}

        checks.check("replicas follow the load", "1, 2, 1", replicas)
        checks.check("gauges under load", "move", gauges)
        checks.check("series of the dashboards", "all exist", dashboards)


async def _up_and_down(started: Started, highest: dict[str, float]) -> Result:
    """Return the seconds until the second replica takes requests, and until it has gone without
    load.

    `highest` gets the maxima of the gauges while one replica has all of the load.
    """
    fleet = started.fleet
    async with open_session() as session:

        async def user(number: int) -> None:
            while True:
                await send(session, started.url, ask(str(number), PROMPTS[number % len(PROMPTS)], 200))

        async def watch() -> None:
            while True:
                page = await asyncio.to_thread(fleet.metrics) or {}
                highest.update({name: max(value, page.get(name, 0.0)) for name, value in highest.items()})
                await asyncio.sleep(1)

        tasks = [asyncio.create_task(watch()), *(asyncio.create_task(user(number)) for number in range(_USERS))]
        try:
            up_s = await wait_for(lambda: len(fleet.ready_replicas()) == 2, "two replicas", 100)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    down_s = await wait_for(lambda: len(fleet.ready_replicas()) == 1, "one replica again", 90)
    return {"passed": True, "two_after_s": up_s, "one_again_after_s": down_s}


def _series(started: Started, gpu: bool) -> tuple[int, set[str]]:
    """Return the number of series on the dashboards, and those that the server does not have."""
    page = fetch(f"{started.url}/metrics", timeout_s=30).decode()
    scraped = set(re.findall(r"^(serve_app_\w+)", page, re.MULTILINE))
    dashboards = "".join(path.read_text() for path in _DASHBOARDS.glob("*.json"))
    named = set(re.findall(r"\bserve_app_\w+", dashboards))
    missing = {name for name in named - scraped if not _NEEDS_MORE.search(name)}
    return len(named), {name for name in missing if gpu or not _ONLY_ON_GPUS.search(name)}
