"""Ours through HTTP, batched `generate`, and `transformers serve`, on the same requests in one run.

    python -m load_tests.side_by_side --peers build/peers --json FILE --png FILE

Decides the order (one contestant after another, each alone on the machine) and the ratios; each contestant is started
and stopped here, unless `--base-url` names a running server of ours.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from load_tests.baselines import model_folder, setup, transformers_serve
from load_tests.bench import find_model, run_repeats, warm_up
from load_tests.machine import machine
from load_tests.servers import RunningServer, ServerCommand, running
from load_tests.workloads import PromptWriter, build_workload, open_writer
from serve_app.cli.outputs import JsonFile, PngFile

OURS, GENERATE, PEER = "serve_app", "generate", "transformers_serve"
QUIET_LIMIT_S = 30.0
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"

console = Console(stderr=True)
Report = dict[str, Any]


def measure_server(
    command: ServerCommand, log: Path, writer: PromptWriter, workloads: Sequence[str], repeats: int, start: bool = True
) -> tuple[dict[str, Report], float | None]:
    """All workloads against one server; also the seconds it took to be ready (None when it ran already)."""
    console.print(f"[bold]{command.name}[/bold]")
    with running(command, log) if start else nullcontext() as server:
        info: RunningServer | None = server
        client = command.client("" if command.model else asyncio.run(find_model(command.base_url)))
        asyncio.run(warm_up(client, writer))
        reports = {
            name: run_repeats(
                client,
                writer,
                lambda repeat, name=name: build_workload(name, writer, repeat=repeat),  # type: ignore[misc]
                repeats=repeats,
                server_pid=info.pid if info is not None else None,
                quiet_limit_s=QUIET_LIMIT_S,
            )
            for name in workloads
        }
    return reports, round(info.ready_s, 1) if info is not None else None


def measure_generate(folder: Path, workloads: Sequence[str], repeats: int) -> dict[str, Report]:
    """The offline baseline in a process of its own, so that it shares nothing with the client."""
    console.print(f"[bold]{GENERATE}[/bold]")
    reports = {}
    for name in workloads:
        file = folder / f"generate-{name}.json"
        command = [sys.executable, "-m", "load_tests.baselines", "generate", "--workload", name]
        command += ["--repeats", str(repeats), "--wait-quiet", str(QUIET_LIMIT_S), "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        reports[name] = json.loads(file.read_text())
    return reports


def ratios(results: dict[str, dict[str, Report]], workloads: Sequence[str]) -> dict[str, dict[str, float]]:
    """Our output tokens per second over each other contestant's, by workload."""

    def rate(contestant: str, workload: str) -> float:
        return float(results[contestant][workload]["median"]["output_tok_s"])

    return {
        name: {other: round(rate(OURS, name) / rate(other, name), 2) for other in results if other != OURS}
        for name in workloads
    }


def show(results: dict[str, dict[str, Report]], workloads: Sequence[str]) -> Table:
    """Medians, ratios and disturbances as a table."""
    table = Table(
        "workload", "contestant", "output tok/s", "runs", "ours / this", "TTFT p50 ms", "ITL p99 ms", "foreign cores"
    )
    quotients = ratios(results, workloads)
    for name in workloads:
        for contestant, reports in results.items():
            median, runs = reports[name]["median"], reports[name]["runs"]
            table.add_row(
                name,
                contestant,
                f"{median['output_tok_s']:.1f}",
                " ".join(f"{run['output_tok_s']:.0f}" for run in runs),
                f"{quotients[name].get(contestant, 1.0):.2f}",
                str(median.get("ttft_ms", {}).get("p50", "")),
                str(median.get("itl_ms", {}).get("p99", "")),
                f"{median.get('foreign_cores', float('nan')):.2f}",
            )
    return table


def draw(path: Path, results: dict[str, dict[str, Report]], workloads: Sequence[str]) -> None:
    """Bars of output tokens per second by workload, each run as a dot; overwrites `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.5 + 3 * len(workloads), 4.2), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / len(results)
    for index, (contestant, colour) in enumerate(zip(results, (_BLUE, _ORANGE, _GREEN), strict=True)):
        places = [place + (index - (len(results) - 1) / 2) * width for place in range(len(workloads))]
        medians = [results[contestant][name]["median"]["output_tok_s"] for name in workloads]
        bars = axes.bar(places, medians, 0.92 * width, label=contestant, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=9, padding=4)
        for place, name in zip(places, workloads, strict=True):
            rates = [run["output_tok_s"] for run in results[contestant][name]["runs"]]
            axes.plot([place] * len(rates), rates, "o", color="black", markersize=2.5)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("output tokens per second")
    axes.set_title("Same requests, same machine (bars: medians, dots: runs)", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png")


def main(
    peers: Annotated[Path, typer.Option(help="Folder of the peers; made by the first run.")] = Path("build/peers"),
    workloads: Annotated[str, typer.Option(help="Names, separated by commas.")] = "decode,mixed",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    config: Annotated[Path, typer.Option(help="The Serve config that our server starts with.")] = Path(
        "deploy/config.yaml"
    ),
    base_url: Annotated[str, typer.Option(help="Measure this running server of ours instead.")] = "",
    json_file: JsonFile = None,
    png: PngFile = None,
) -> None:
    """Measure us and the baselines one after another on the same requests."""
    names = workloads.split(",")
    peers.mkdir(parents=True, exist_ok=True)
    setup(peers)
    writer = open_writer(str(model_folder(peers)))
    serve = (str(Path(sys.executable).with_name("serve-app")), "serve", str(config))
    ours = ServerCommand(OURS, serve, base_url or "http://127.0.0.1:8000", "/health/ready")
    results: dict[str, dict[str, Report]] = {}
    ready: dict[str, float | None] = {}
    results[OURS], ready[OURS] = measure_server(ours, peers / "serve_app.log", writer, names, repeats, not base_url)
    results[GENERATE] = measure_generate(peers, names, repeats)
    peer = transformers_serve(peers)
    results[PEER], ready[PEER] = measure_server(peer, peers / "transformers_serve.log", writer, names, repeats)
    Console().print(show(results, names))
    report = {"machine": machine(), "ready_s": ready, "ratios": ratios(results, names), "results": results}
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if png is not None:
        draw(png, results, names)


if __name__ == "__main__":
    typer.run(main)
