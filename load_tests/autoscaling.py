"""Scaling shown on this machine: a server with `autoscaling`, a locust ramp against it, and the replicas over time.

    python -m load_tests.autoscaling --users 24 --ramp-s 120 --json autoscaling.json

Decides the load and what is looked at. Exits with 1 when the replicas did not go up under the ramp and down after it,
or when locust saw a failure.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from load_tests.machine import machine
from load_tests.servers import ServerCommand, running

_REPOSITORY = Path(__file__).parents[1]
_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the server, `seconds` after the load began. Counts are of sequences."""

    seconds: float
    replicas: int
    queued: float
    waiting: float
    running: float
    kv_usage: float


def look(base_url: str, began: float) -> Look:
    """What the server says of itself now."""
    replicas = [replica for replica in json.loads(_get(f"{base_url}/debug/replicas")) if not replica["leaving"]]
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(_get(f"{base_url}/metrics")):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    total = sums.get("serve_app_kv_blocks_total", 0.0)
    return Look(
        seconds=round(time.monotonic() - began, 1),
        replicas=len(replicas),
        queued=sums.get("serve_app_ingress_queue_depth", 0.0),
        waiting=sums.get("serve_app_requests_waiting", 0.0),
        running=sums.get("serve_app_requests_running", 0.0),
        kv_usage=round(sums.get("serve_app_kv_blocks_used", 0.0) / total, 3) if total else 0.0,
    )


def _get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return str(answer.read().decode())


def changes(looks: list[Look]) -> Iterator[Look]:
    """The looks at which the number of replicas was another than before, and the first and the last."""
    for before, now in zip([None, *looks], looks, strict=False):
        if before is None or before.replicas != now.replicas or now is looks[-1]:
            yield now


def show(looks: list[Look]) -> Table:
    """The course of it as a table."""
    table = Table("after s", "replicas", "queued", "waiting", "running", "KV usage", title="Autoscaling under a ramp")
    for item in changes(looks):
        row = (item.seconds, item.replicas, item.queued, item.waiting, item.running, item.kv_usage)
        table.add_row(*(f"{value:g}" for value in row))
    return table


def main(
    users: Annotated[int, typer.Option(help="locust users at the top of the ramp")] = 24,
    ramp_s: Annotated[float, typer.Option(help="how long locust runs, in seconds")] = 120.0,
    after_s: Annotated[float, typer.Option(help="how long to wait for the replicas to go, in seconds")] = 120.0,
    model: Annotated[str, typer.Option(help="what to serve")] = "default",
    seats: Annotated[int, typer.Option(help="sequences that run at once in a replica")] = 4,
    max_replicas: Annotated[int, typer.Option(help="replicas at most")] = 3,
    port: int = 8000,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
) -> None:
    """Serve with one replica to `max_replicas`, run a locust ramp, wait until one replica is left."""
    config = yaml.safe_load((_REPOSITORY / "deploy" / "config.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"] = {
        "model": model,
        "device": "cpu",
        "autoscaling": {"max_replicas": max_replicas, "upscale_delay_s": 5.0, "downscale_delay_s": 15.0},
        "engine": {"max_num_seqs": seats, "kv_cache_gib": 0.25},
    }
    base_url = f"http://127.0.0.1:{port}"
    looks: list[Look] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        serve = (str(Path(sys.executable).with_name("serve-app")), "serve", str(path))
        with running(ServerCommand("serve_app", serve, base_url, "/health/ready"), Path(folder) / "server.log"):
            began = time.monotonic()
            status = _ramp(base_url, users, ramp_s, began, looks)
            deadline = time.monotonic() + after_s
            while looks[-1].replicas > 1 and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                looks.append(look(base_url, began))
    Console().print(show(looks))
    most = max(item.replicas for item in looks)
    report: dict[str, Any] = {
        "machine": machine(),
        "locust_status": status,
        "most_replicas": most,
        "replicas_left": looks[-1].replicas,
        "looks": [asdict(item) for item in looks],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(status or most == 1 or looks[-1].replicas != 1)


def _ramp(base_url: str, users: int, seconds: float, began: float, looks: list[Look]) -> int:
    """Run locust's ramp, looking on; its exit status, which is 1 when a request failed."""
    command = [sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--shape", "ramp"]
    command += ["-u", str(users), "-t", f"{seconds:g}s", "--host", base_url, "--pace", "2", "--exit-code-on-error", "1"]
    # Replicas come while the queue grows: what counts here is that everybody is answered, not how soon.
    command += ["--goodput", "0"]
    locust = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while locust.poll() is None:
            looks.append(look(base_url, began))
            time.sleep(_POLL_S)
        return locust.returncode
    finally:
        if locust.poll() is None:
            locust.terminate()
            locust.wait()


if __name__ == "__main__":
    typer.run(main)
