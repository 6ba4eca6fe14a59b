"""Autoscaling on this machine: a locust ramp against a server, and its replicas over time.

    python -m load_tests.bench.autoscaling --users 24 --ramp-s 120 --json autoscaling.json

The exit status is 1 if the replicas did not scale up under the ramp and down after it, or if locust
had a failure.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from load_tests.servers import ServerCommand, running
from serve_app.system.http_client import fetch
from serve_app.workloads.machine import machine

_REPOSITORY = Path(__file__).parents[2]
_LOCUSTFILE = _REPOSITORY / "load_tests" / "locustfile.py"
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the server's state, `seconds` after the load began. Counts are of sequences."""

    seconds: float
    replicas: int
    queued: float
    waiting: float
    running: float
    kv_usage: float


def sample(base_url: str, began: float) -> Sample:
    """Return a sample of the server's own figures."""
    replicas = [
        replica for replica in json.loads(fetch(f"{base_url}/debug/replicas", timeout_s=30)) if not replica["leaving"]
    ]
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(fetch(f"{base_url}/metrics", timeout_s=30).decode()):
        for metric in family.samples:
            sums[metric.name] = sums.get(metric.name, 0.0) + metric.value
    total = sums.get("serve_app_kv_blocks_total", 0.0)
    return Sample(
        seconds=round(time.monotonic() - began, 1),
        replicas=len(replicas),
        queued=sums.get("serve_app_ingress_queue_depth", 0.0),
        waiting=sums.get("serve_app_requests_waiting", 0.0),
        running=sums.get("serve_app_requests_running", 0.0),
        kv_usage=round(sums.get("serve_app_kv_blocks_used", 0.0) / total, 3) if total else 0.0,
    )


def changes(samples: list[Sample]) -> Iterator[Sample]:
    """Yield the first and the last sample, and those at which the number of replicas had
    changed."""
    for before, now in zip([None, *samples], samples, strict=False):
        if before is None or before.replicas != now.replicas or now is samples[-1]:
            yield now


def show(samples: list[Sample]) -> Table:
    """Return the samples as a table."""
    table = Table("after s", "replicas", "queued", "waiting", "running", "KV usage", title="Autoscaling under a ramp")
    for item in changes(samples):
        row = (item.seconds, item.replicas, item.queued, item.waiting, item.running, item.kv_usage)
        table.add_row(*(f"{value:g}" for value in row))
    return table


def main(
    users: Annotated[int, typer.Option(help="locust users at the top of the ramp")] = 24,
    ramp_s: Annotated[float, typer.Option(help="how long locust runs, in seconds")] = 120.0,
    after_s: Annotated[float, typer.Option(help="how long to wait for the replicas to stop, in seconds")] = 120.0,
    model: Annotated[str, typer.Option(help="what to serve")] = "default",
    slots: Annotated[int, typer.Option(help="sequences that run at once in a replica")] = 4,
    max_replicas: Annotated[int, typer.Option(help="replicas at most")] = 3,
    port: int = 8000,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
) -> None:
    """Serve with one replica to `max_replicas`, run a locust ramp, wait until one replica
    is left."""
    config = yaml.safe_load((_REPOSITORY / "deploy" / "config.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] = {
        "model": model,
        "device": "cpu",
        "autoscaling": {"max_replicas": max_replicas, "upscale_delay_s": 5.0, "downscale_delay_s": 15.0},
        "engine": {"max_num_seqs": slots, "kv_cache_gib": 0.25},
    }
    base_url = f"http://127.0.0.1:{port}"
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        serve = (str(Path(sys.executable).with_name("serve-app")), "serve", str(path))
        with running(ServerCommand("serve_app", serve, base_url, "/health/ready"), Path(folder) / "server.log"):
            began = time.monotonic()
            status = _ramp(base_url, users, ramp_s, began, samples)
            deadline = time.monotonic() + after_s
            while samples[-1].replicas > 1 and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                samples.append(sample(base_url, began))
    Console().print(show(samples))
    most = max(item.replicas for item in samples)
    report: dict[str, Any] = {
        "machine": machine(),
        "locust_status": status,
        "most_replicas": most,
        "replicas_left": samples[-1].replicas,
        "samples": [asdict(item) for item in samples],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(status or most == 1 or samples[-1].replicas != 1)


def _ramp(base_url: str, users: int, seconds: float, began: float, samples: list[Sample]) -> int:
    """Run locust's ramp and sample the server.

    Return locust's exit status, 1 if a request failed.
    """
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--shape", "ramp"]
    command += ["-u", str(users), "-t", f"{seconds:g}s", "--host", base_url, "--pace", "2", "--exit-code-on-error", "1"]
    # Replicas start while the queue grows: what counts here is that all are answered, not how soon.
    command += ["--goodput", "0"]
    locust = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while locust.poll() is None:
            samples.append(sample(base_url, began))
            time.sleep(_POLL_S)
        return locust.returncode
    finally:
        if locust.poll() is None:
            locust.terminate()
            locust.wait()


if __name__ == "__main__":
    typer.run(main)
