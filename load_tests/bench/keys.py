"""The cost of API keys and their guarantees, on servers that this command starts.

    python -m load_tests.bench.keys cost --repeats 6 --json cost.json
    python -m load_tests.bench.keys shares --minutes 5 --json shares.json

`cost`: with and without keys and a ledger. `shares`: weights 1 : 2, and a limit of 600 tokens a
minute. The exit status is 1 if a target is missed: decode at most 1 % slower, TTFT at most 0.3 ms
later; shares within 5 % of the weights while both queue, the limit used to 95 % and exceeded by at
most one request.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from load_tests.bench.contestants import write_config
from load_tests.servers import ServerCommand, running
from serve_app.cli.outputs import JsonFile
from serve_app.launch.ports import free_port
from serve_app.tenants.key_file import add_key
from serve_app.tenants.ledger import read_ledger
from serve_app.workloads.arrivals import random_arrivals
from serve_app.workloads.client import Server, run_workload
from serve_app.workloads.figures import median_of
from serve_app.workloads.mixes import build_workload, open_workload, read_names
from serve_app.workloads.prompts import open_writer
from serve_app.workloads.ratios import compare_results
from serve_app.workloads.report import circumstances
from serve_app.workloads.runs import measure, reach, through_http

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Config = Annotated[Path, typer.Option(exists=True, help="The configuration of the servers, but for keys and port.")]
Keys = Mapping[str, Mapping[str, int]]
Line = Mapping[str, Any]
Results = dict[str, dict[str, Any]]

_CONFIG = Path(__file__).parents[2] / "deploy" / "config.yaml"
_LIMITS = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "tokens_per_day": 10**10, "max_sequences": 10**4}
"""Limits that are checked but never reached."""
_LIMIT = 600
_SHARES: Keys = {"light": {"weight": 1}, "heavy": {"weight": 2}, "limited": {"weight": 4, "tokens_per_minute": _LIMIT}}
_PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 16
_WINDOW_S = 60.0
_LIMITED_RATE = 1.0


@app.command()
def cost(
    repeats: Annotated[int, typer.Option(min=1, help="Turns; in each, one server of either kind.")] = 6,
    workload: Annotated[str, typer.Option(help="As of `serve-app bench run`; `name:count`.")] = "decode,first_token",
    config: Config = _CONFIG,
    json_file: JsonFile = None,
) -> None:
    """Measure decode and TTFT of a server with a keys file, every limit and a ledger, and
    without."""
    writer = open_writer("default")
    kinds: dict[str, Keys] = {"without": {}, "with keys": {"bench": _LIMITS}}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {kind: {} for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="keys-") as scratch:
        for turn in range(repeats):
            for kind in list(kinds)[:: 1 - turn % 2 * 2]:
                with _serving(config, Path(scratch, f"{turn}-{kind}"), kinds[kind]) as servers:
                    (only,) = servers.values()
                    server = reach(only, writer)
                    for name, count in read_names(workload).items():
                        work = build_workload(name, writer, repeat=turn, num_requests=count)
                        title = f"{name}, {kind} {turn + 1}/{repeats}"
                        figures = measure(through_http(server, writer), work, title, writer.num_special)
                        runs[kind].setdefault(name, []).append(figures)
    results: dict[str, Results] = {
        kind: {name: {"median": median_of(each), "runs": each} for name, each in by_name.items()}
        for kind, by_name in runs.items()
    }
    _show_ratios(results["without"], results["with keys"])
    _finish({"results": results}, cost_faults(results["without"], results["with keys"]), json_file)


@app.command()
def shares(
    minutes: Annotated[float, typer.Option(min=1.0)] = 5.0,
    rate: Annotated[float, typer.Option(help="Requests a second of `light` and of `heavy`; more than served.")] = 60.0,
    config: Config = _CONFIG,
    json_file: JsonFile = None,
) -> None:
    """Send open-loop load of three keys. The ledger shows the share of each."""
    writer = open_writer("default")
    with tempfile.TemporaryDirectory(prefix="keys-") as scratch:
        folder = Path(scratch, "server")
        with _serving(config, folder, _SHARES) as servers:
            model = reach(servers["light"], writer).model

            async def offer() -> None:
                async with asyncio.TaskGroup() as group:
                    for key, server in servers.items():
                        often = _LIMITED_RATE if key == "limited" else rate
                        arrivals = random_arrivals(Random(key), often, 60 * minutes)
                        short = (arrival.clipped(_PROMPT_TOKENS, _OUTPUT_TOKENS) for arrival in arrivals)
                        work = open_workload(key, writer, short, Random(f"text-{key}"))
                        group.create_task(run_workload(replace(server, model=model), work, writer))

            asyncio.run(offer())
            lines = [line for _, line in read_ledger(folder / "ledger", date.min, date.max)]
    figures = share_figures(lines, 60 * minutes)
    _show("What the keys got", ("figure", "value"), ((name, str(value)) for name, value in figures.items()))
    _finish({"figures": figures}, share_faults(figures), json_file)


def cost_faults(without: Results, with_keys: Results) -> list[str]:
    """Return the costs beyond the targets, by medians, and failed requests."""
    faults = [
        f"{name}: requests failed or had the wrong length"
        for results in (without, with_keys)
        for name, report in results.items()
        if any(run["failures"] or run["wrong_length"] for run in report["runs"])
    ]
    if "decode" in without:
        before, after = (results["decode"]["median"]["output_tok_s"] for results in (without, with_keys))
        if after < 0.99 * before:
            faults.append(f"decode: {1 - after / before:.1%} slower")
    if "first_token" in without:
        before, after = (results["first_token"]["median"]["ttft_ms"]["p50"] for results in (without, with_keys))
        if after - before > 0.3:
            faults.append(f"first token: {after - before:.2f} ms later")
    return faults


def share_figures(lines: Iterable[Line], seconds: float) -> dict[str, Any]:
    """Return the shares of a run of `seconds` from its ledger lines.

    Requests count at their arrival, tokens as charged.
    """
    charged: dict[str, list[tuple[float, int]]] = {key: [] for key in _SHARES}
    for line in lines:
        if line["key"] in charged:
            ended = datetime.fromisoformat(line["time"]).timestamp()
            charged[line["key"]].append((ended - line["seconds"], line["prompt_tokens"] + line["output_tokens"]))
    tokens = {key: sum(amount for _, amount in each) for key, each in charged.items()}
    limited = sorted(charged["limited"])
    return {
        "requests": {key: len(each) for key, each in charged.items()},
        "tokens": tokens,
        "heavy_over_light": round(tokens["heavy"] / max(1, tokens["light"]), 4),
        "limited_tokens_per_minute": round(60 * tokens["limited"] / seconds, 1),
        "limited_most_in_a_minute": max(
            (sum(amount for at, amount in limited if begin <= at < begin + _WINDOW_S) for begin, _ in limited),
            default=0,
        ),
    }


def share_faults(figures: Mapping[str, Any]) -> list[str]:
    """Return the targets that the keys' shares or limits miss."""
    faults = []
    if abs(figures["heavy_over_light"] / 2 - 1) > 0.05:
        faults.append(f"heavy got {figures['heavy_over_light']} times what light got, not 2")
    if figures["limited_tokens_per_minute"] < 0.95 * _LIMIT:
        faults.append(f"the limited key got {figures['limited_tokens_per_minute']} of {_LIMIT} tokens a minute")
    if figures["limited_most_in_a_minute"] > _LIMIT + _PROMPT_TOKENS + _OUTPUT_TOKENS:
        faults.append(f"the limited key got {figures['limited_most_in_a_minute']} tokens in a minute")
    return faults


@contextmanager
def _serving(config: Path, folder: Path, keys: Keys) -> Iterator[dict[str, Server]]:
    """Run a server with `config`. Yields it by name of each of `keys`; once if there are none."""
    folder.mkdir()
    api_keys = {name: add_key(folder / "keys.yaml", name, dict(fields)) for name, fields in keys.items()}
    ingress = dict(yaml.safe_load(config.read_text())["applications"][0]["args"].get("ingress", {}))
    if keys:
        ingress |= {"keys_file": str(folder / "keys.yaml"), "ledger_folder": str(folder / "ledger")}
    port = free_port()
    write_config(config, folder / "config.yaml", port, ingress=ingress)
    command = (str(Path(sys.executable).with_name("serve-app")), "serve", str(folder / "config.yaml"))
    url = f"http://127.0.0.1:{port}"
    with running(ServerCommand("serve_app", command, url, "/health/ready"), folder / "server.log"):
        yield {name: Server(url, "", api_key=key) for name, key in api_keys.items()} or {"": Server(url, "")}


def _show_ratios(without: Results, with_keys: Results) -> None:
    rows = (
        (
            one.workload,
            one.figure,
            f"{one.a:.4g}",
            f"{one.b:.4g}",
            f"{one.ratio:.4f}",
            f"{one.low:.3f} to {one.high:.3f}",
        )
        for one in compare_results(without, with_keys)
    )
    _show("With a keys file over without", ("workload", "figure", "without", "with", "ratio", "single runs"), rows)


def _show(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(*header, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _finish(report: dict[str, Any], faults: list[str], json_file: Path | None) -> None:
    """Write the report. The exit status is 1 if there are faults."""
    report = {"circumstances": circumstances(), **report, "faults": faults}
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    for fault in faults:
        print(f"FAILED: {fault}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    app()
