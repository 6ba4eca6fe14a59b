"""Prometheus, Debian's package, on our configuration; and what our metrics are called.

Without it on the machine (Debian: `apt-get install prometheus`) the tests that need it are skipped
and say so.
"""

import asyncio
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from serve_app.core.step_record import SchedulerStats
from serve_app.observability.held_bytes import HeldBytes, register_held_bytes
from serve_app.observability.metrics import EngineMetrics, IngressMetrics
from serve_app.observability.upkeep import register_upkeep
from serve_app.system.lasting import LastingTasks

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRAPE_INTERVAL_S = 1

ONLY_ON_GPUS = frozenset(
    {"serve_app_gpu_utilization_ratio", "serve_app_gpu_memory_used_bytes", "serve_app_gpu_memory_total_bytes"}
)

ONLY_WITH_KEYS = frozenset({"serve_app_key_requests_total", "serve_app_key_tokens_total"})


def find(binary: str) -> str:
    """`prometheus` or `promtool`."""
    path = shutil.which(binary)
    if path is None:
        pytest.skip(f"no {binary} on this machine (Debian: apt-get install prometheus)")
    return path


def promtool(*arguments: str) -> None:
    """Run it; what it complains about fails the test."""
    done = subprocess.run([find("promtool"), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def metric_names(text: str) -> set[str]:
    """Our series and recording rules that a PromQL expression names."""
    return set(re.findall(r"\bserve_app[_:]\w[\w:]*", text))


def defined_series() -> set[str]:
    """The names of all series of a scraped process of ours, as they are defined."""
    engine = EngineMetrics(gpu_ids=["0"])
    engine.read_stats_from(lambda: SchedulerStats(waiting=0, running=0, blocks_total=1, blocks_used=0, blocks_cached=0))
    register_held_bytes(engine.registry, {"outputs": HeldBytes(lambda: 0, 1)})
    ingress = IngressMetrics(lambda: 0, lambda: 0)
    loop = asyncio.new_event_loop()
    register_upkeep(ingress.registry, loop, LastingTasks(), lambda: False, lambda: False)
    families = [*engine.registry.collect(), *ingress.registry.collect()]
    loop.close()
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    names = {family.name + ending for family in families for ending in endings[family.type]}
    assert names > ONLY_ON_GPUS
    return names


Labels = frozenset[tuple[str, str]]


@dataclass
class Prometheus:
    """A running one."""

    http: httpx.Client

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    def query(self, expr: str) -> dict[Labels, float]:
        """The samples of an expression now, by their labels."""
        return {
            frozenset(sample["metric"].items()): float(sample["value"][1])
            for sample in self._get("query", query=expr)["result"]
        }

    def value(self, expr: str) -> float:
        """The one sample of an expression; 0 if there is none."""
        values = list(self.query(expr).values())
        assert len(values) <= 1, expr
        return values[0] if values else 0.0

    def targets(self) -> dict[str, dict[str, str]]:
        """The labels of the targets that answered when they were last asked, by their addresses."""
        active = self._get("targets", state="active")["activeTargets"]
        return {target["labels"]["instance"]: target["labels"] for target in active if target["health"] == "up"}

    def names(self) -> set[str]:
        """Of all series that were ever there."""
        return set(self._get("label/__name__/values"))

    def rules(self) -> list[dict[str, Any]]:
        """Recording rules and alerts, with how their last evaluation went."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]


@contextmanager
def running_prometheus(folder: Path, server_url: str) -> Iterator[Prometheus]:
    """deploy/prometheus.yml for the server at this address, with shorter intervals."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"] = {name: f"{SCRAPE_INTERVAL_S}s" for name in ("scrape_interval", "evaluation_interval")}
    config["rule_files"] = [str(DEPLOY / name) for name in config["rule_files"]]
    ours = next(job for job in config["scrape_configs"] if job["job_name"] == "serve_app")
    for discovery in ours["http_sd_configs"]:
        discovery["url"] = discovery["url"].replace("http://127.0.0.1:8000", server_url)
        discovery["refresh_interval"] = f"{SCRAPE_INTERVAL_S}s"
    config["scrape_configs"] = [ours]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        find("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            deadline = time.monotonic() + 60
            while not _is_ready(http):
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                assert time.monotonic() < deadline, (folder / "prometheus.log").read_text()
                time.sleep(0.1)
            yield Prometheus(http)
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False
