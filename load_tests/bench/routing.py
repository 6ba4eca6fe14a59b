"""Our router and two of Ray's in front of the same replicas, on requests that share prefixes.

    python -m load_tests.bench.routing --json FILE

24 prefixes of 512 tokens, 4 requests each, shuffled, on 3 replicas. Each router gets its own
server, one after another. Compared are the prefix hit rate (the share of prompt tokens found in the
engines' prefix caches) and TTFT.
"""

import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean
from typing import Annotated, Any

import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from load_tests.servers import ServerCommand, running
from serve_app.cli.outputs import JsonFile
from serve_app.system.http_client import fetch
from serve_app.workloads.client import Run, Server, run_workload
from serve_app.workloads.figures import percentile, summarize
from serve_app.workloads.machine import Meter, machine, wait_until_quiet
from serve_app.workloads.mixes import WorkItem, Workload
from serve_app.workloads.prompts import PromptWriter, open_writer
from serve_app.workloads.runs import reach, show_progress

OURS, POWER_OF_TWO, PREFIX_TREE = "serve_app", "power_of_two", "prefix_tree"
APPLICATIONS = {
    OURS: "serve_app.app:build",
    POWER_OF_TWO: "load_tests.bench.routing_rivals:power_of_two",
    PREFIX_TREE: "load_tests.bench.routing_rivals:prefix_tree",
}
_HITS, _QUERIES = "serve_app_prefix_cache_hit_tokens_total", "serve_app_prefix_cache_query_tokens_total"
_PREFIXES, _REQUESTS_EACH, _PREFIX_TOKENS, _OWN_TOKENS, _OUTPUT_TOKENS = 24, 4, 512, 32, 8
_REPLICAS = 3
_WANTED_RATIO = 1.5

console = Console(stderr=True)
Report = dict[str, Any]


def build_prefix_groups(writer: PromptWriter, repeat: int, concurrency: int) -> Workload:
    """Return the requests of all prefixes, shuffled by the repeat's number."""
    rng = Random(f"prefix-groups-{repeat}")
    prompts = []
    for _ in range(_PREFIXES):
        prefix = writer.write(rng, _PREFIX_TOKENS)
        prompts += [writer.write(rng, _OWN_TOKENS, after=prefix) for _ in range(_REQUESTS_EACH)]
    rng.shuffle(prompts)
    items = tuple(WorkItem(prompt, _PREFIX_TOKENS + _OWN_TOKENS, _OUTPUT_TOKENS) for prompt in prompts)
    return Workload("prefix_groups", items, concurrency)


def parse_counters(page: str) -> dict[str, dict[str, float]]:
    """Return the two prefix cache counters of each replica, from the ingress's `/metrics`."""
    counters: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in (_HITS, _QUERIES):
                counters.setdefault(sample.labels["replica"], {})[sample.name] = sample.value
    return counters


def prefix_figures(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the hit rate between two samples, and the busiest replica's share of the prompt
    tokens."""
    growth = {name: {key: after[name][key] - before[name][key] for key in (_HITS, _QUERIES)} for name in after}
    queries = [one[_QUERIES] for one in growth.values()]
    hits = sum(one[_HITS] for one in growth.values())
    return {"hit_rate": round(hits / sum(queries), 4), "busiest_share": round(max(queries) / sum(queries), 4)}


def measure(router: str, config: dict[str, Any], writer: PromptWriter, repeats: int, concurrency: int) -> list[Report]:
    """Start one router's server, measure, and stop it. Return a summary per repeat."""
    console.print(f"[bold]{router}[/bold]")
    with tempfile.TemporaryDirectory() as folder:
        base_url = f"http://127.0.0.1:{config['http_options']['port']}"
        config["applications"][0]["import_path"] = APPLICATIONS[router]
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        serve = (str(Path(sys.executable).with_name("serve-app")), "serve", str(file))
        # Ray's processes import the rivals from here, which are in no installed package.
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = ServerCommand(router, serve, base_url, "/health/ready", environment=environment)
        log = Path(tempfile.gettempdir()) / f"serve-app-routing-{router}.log"
        with running(command, log) as server:
            client = reach(command.client(), writer)
            runs = []
            for repeat in range(repeats):
                wait_until_quiet(20.0, server.pid)
                runs.append(_measure_once(client, build_prefix_groups(writer, repeat, concurrency), writer, server.pid))
    return runs


def _measure_once(client: Server, workload: Workload, writer: PromptWriter, server_pid: int) -> Report:
    before, meter = parse_counters(_page(client.base_url)), Meter(server_pid)
    with show_progress(workload, workload.name) as on_done:
        run = asyncio.run(run_workload(client, workload, writer, on_done))
    usage = meter.read()
    figures = prefix_figures(before, parse_counters(_page(client.base_url)))
    return figures | first_token_figures(run) | summarize(run, writer.num_special) | usage


def first_token_figures(run: Run) -> dict[str, float | None]:
    """Return mean and percentiles of TTFT in milliseconds; None if no token arrived."""
    times = [result.ttft_s for result in run.results if result.ttft_s is not None]
    values = {"mean": mean(times) if times else None} | {f"p{p}": percentile(times, p) for p in (50, 99)}
    return {f"ttft_{name}_ms": None if value is None else round(1000 * value, 1) for name, value in values.items()}


def _page(base_url: str) -> str:
    return fetch(f"{base_url}/metrics", timeout_s=30).decode()


def make_config(model: str) -> dict[str, Any]:
    """Return a config of three replicas on loopback, each with room for all prefixes, on a free
    port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A fixed number of slots per replica, because Ray's routers count slots.
    engine = {"kv_cache_gib": 1.0, "max_num_seqs": 16}
    args = {"model": model, "device": "cpu", "num_replicas": _REPLICAS, "engine": engine}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [{"name": "serve_app", "route_prefix": "/", "args": args}],
    }


def totals(runs: Sequence[Report]) -> dict[str, float]:
    """Return the means of the compared figures over the repeats."""
    keys = ("hit_rate", "busiest_share", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "seconds", "foreign_cores")
    return {key: round(mean(run[key] for run in runs), 4) for key in keys}


def show(results: dict[str, list[Report]]) -> Table:
    """Return the table, with one row per router."""
    table = Table("router", "prefix hit rate", "TTFT mean ms", "p50", "p99", "seconds", "busiest replica", "foreign")
    for router, runs in results.items():
        figures = totals(runs)
        table.add_row(
            router,
            f"{figures['hit_rate']:.1%}",
            *(f"{figures[f'ttft_{name}_ms']:.0f}" for name in ("mean", "p50", "p99")),
            f"{figures['seconds']:.1f}",
            f"{figures['busiest_share']:.0%}",
            f"{figures['foreign_cores']:.2f}",
        )
    return table


def verdict(results: dict[str, list[Report]]) -> list[str]:
    """Return the expectations that were missed, as sentences."""
    faults = [
        f"{router}: {run['failures']} failed, {run['wrong_length']} of wrong length {run['errors']}"
        for router, runs in results.items()
        for run in runs
        if run["failures"] or run["wrong_length"]
    ]
    if OURS in results and POWER_OF_TWO in results and not faults:
        ours, other = totals(results[OURS]), totals(results[POWER_OF_TWO])
        if ours["hit_rate"] < _WANTED_RATIO * other["hit_rate"]:
            faults.append(f"the hit rate is only {ours['hit_rate'] / other['hit_rate']:.2f} times power of two's")
        if ours["ttft_mean_ms"] >= other["ttft_mean_ms"]:
            faults.append("the mean time to first token is not below power of two's")
    return faults


def main(
    model: Annotated[str, typer.Option(help="The model to serve.")] = "default",
    routers: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(APPLICATIONS),
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 12,
    json_file: JsonFile = None,
) -> None:
    """Measure the routers one after another on the same requests."""
    names = routers.split(",")
    if unknown := set(names) - set(APPLICATIONS):
        raise typer.BadParameter(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(APPLICATIONS)}")
    writer = open_writer(model)
    results = {name: measure(name, make_config(model), writer, repeats, concurrency) for name in names}
    Console(width=max(console.width, 120)).print(show(results))
    faults = verdict(results)
    for fault in faults:
        console.print(f"[red]{fault}")
    if json_file is not None:
        figures = {name: totals(runs) for name, runs in results.items()}
        report = {"machine": machine(), "model": model, "figures": figures, "runs": results, "faults": faults}
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if faults:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
