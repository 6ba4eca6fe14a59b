"""Open-loop load: requests are sent at their due time, independent of the answers.

    python -m load_tests.bench.open_loop --rate 2 --duration 60 --html report.html
    python -m load_tests.bench.open_loop --rate 2 --duration 60 --variation 4
    python -m load_tests.bench.open_loop --trace BurstGPT_1.csv --speed 10 --num-requests 500

Arrivals are Poisson, bursts with `--variation`, or those of a trace. A generator that waits for
answers slows down with the server and hides the queue. This one does not, and measures latency from
the due time. The exit status is 1 if the objective is missed. `workloads.client` sends requests and
records answers.
"""

import asyncio
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console

from load_tests.bench.run_report import run_page
from load_tests.bench.server_view import Comparison, ServerView, compare_views
from serve_app.cli.outputs import HtmlFile, JsonFile
from serve_app.workloads.arrivals import Arrival, random_arrivals, read_trace
from serve_app.workloads.client import Run, Server, run_workload
from serve_app.workloads.figures import Objective, summarize
from serve_app.workloads.mixes import Workload, open_workload
from serve_app.workloads.prompts import PromptWriter, open_writer
from serve_app.workloads.report import circumstances
from serve_app.workloads.runs import reach, show_progress

console = Console(stderr=True)


def run_open_loop(
    server: Server, workload: Workload, writer: PromptWriter, retries: int = 0
) -> tuple[Run, list[Comparison]]:
    """Send an open-loop workload once, with a progress bar.

    Also compare it with the server's metrics.
    """
    before = ServerView.read(server.base_url)
    with show_progress(workload, workload.name) as on_done:
        run = asyncio.run(run_workload(server, workload, writer, on_done, retries))
    return run, compare_views(before, ServerView.read(server.base_url), run.results)


def main(
    base_url: Annotated[str, typer.Option(help="The server's root, without /v1.")] = "http://127.0.0.1:8000",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests per second.")] = 1.0,
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of arrivals.")] = 60.0,
    variation: Annotated[
        float, typer.Option(min=0.01, help="Coefficient of variation of the gaps: 1 is Poisson, more is bursty.")
    ] = 1.0,
    trace: Annotated[Path | None, typer.Option(exists=True, help="Replay this file (BurstGPT or Azure).")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Trace: speed-up factor.")] = 1.0,
    num_requests: Annotated[int | None, typer.Option(min=1, help="Trace: only the first N requests.")] = None,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are cut to this.")] = 1024,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Longer answers are cut to this.")] = 1024,
    slo_ttft: Annotated[float, typer.Option(help="Objective: seconds to the first token.")] = 1.0,
    slo_tpot: Annotated[float, typer.Option(help="Objective: mean seconds per token after the first.")] = 0.1,
    goodput: Annotated[float, typer.Option(min=0, max=1, help="Objective: share of requests within both.")] = 0.9,
    retries: Annotated[
        int, typer.Option(min=0, help="How often a refused request is retried after its Retry-After.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of times, lengths and texts.")] = 0,
    model: Annotated[str, typer.Option(help="Model name to send; default: the first that the server lists.")] = "",
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json, a folder with one, or a model.")] = "default",
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Send open-loop load to a running server. The exit status is 1 if the objective is missed."""
    objective = Objective(slo_ttft, slo_tpot, goodput)
    writer = open_writer(tokenizer)
    try:
        arrivals: Iterable[Arrival]
        if trace is not None:
            name, arrivals = trace.stem, read_trace(trace, speed=speed, limit=num_requests)
        else:
            name = "poisson" if variation == 1.0 else "bursty"
            arrivals = random_arrivals(Random(f"arrivals-{seed}"), rate, duration, variation)
        clipped = (arrival.clipped(max_prompt_tokens, max_output_tokens) for arrival in arrivals)
        workload = open_workload(name, writer, clipped, Random(f"text-{seed}"))
        server = reach(Server(base_url, model), writer)
    except (RuntimeError, ValueError) as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    if not workload.items:
        console.print("[red]no request is due within the duration")
        raise typer.Exit(1)
    run, views = run_open_loop(server, workload, writer, retries)
    summary = summarize(run, writer.num_special, objective)
    report = make_report(workload, server, objective, summary, views)
    text = json.dumps(report, indent=1)
    print(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    if html is not None:
        title = f"Open loop, {name}: {server.model}"
        html.write_text(run_page(title, report["circumstances"], run, summary, objective, views), encoding="utf-8")
    if summary["goodput"] < objective.goodput:
        console.print(f"[red]objective missed: goodput {summary['goodput']:.1%} instead of {objective.goodput:.1%}")
        sys.exit(1)


def make_report(
    workload: Workload, server: Server, objective: Objective, summary: dict[str, Any], views: list[Comparison]
) -> dict[str, Any]:
    """Return the report as plain data, in the format that `serve-app bench compare` reads."""
    offered = len(workload.items) / max(1e-9, workload.items[-1].at_s)
    facts = circumstances(
        server=server.base_url,
        model=server.model,
        offered_per_s=round(offered, 3),
        objective=f"TTFT < {objective.ttft_s:g} s and TPOT < {objective.tpot_s:g} s for {objective.goodput:.0%}",
    )
    return {
        "circumstances": facts,
        "results": {workload.name: {"median": summary, "runs": [summary]}},
        "server_view": [view.as_dict() for view in views],
    }


if __name__ == "__main__":
    typer.run(main)
