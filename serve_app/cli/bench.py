"""`serve-app bench`: named workloads against a running server, and two reports side by side.

Decides the commands' options and what they print. Load, figures and reports are `workloads`, most
of which needs the extra `load`.
"""

import json
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from serve_app.cli.outputs import HtmlFile, JsonFile, write_json
from serve_app.environment import client_api_key
from serve_app.workloads.mixes import WORKLOADS, Workload, build_workload

bench = typer.Typer(help="Measure a running server; compare two measurements.", no_args_is_help=True)


@bench.callback()
def needs_the_extra_load() -> None:
    """Measure a running server; compare two measurements."""
    try:
        import aiohttp  # noqa: F401
        import psutil  # type: ignore[import-untyped]  # noqa: F401
    except ImportError as error:
        Console(stderr=True).print(f"[red]serve-app bench needs the extra: pip install 'serve_app\\[load]' ({error})")
        raise typer.Exit(1) from error


@bench.command()
def run(
    base_url: Annotated[str, typer.Option(help="The server's root, without /v1.")] = "http://127.0.0.1:8000",
    workload: Annotated[str, typer.Option(help=f"Names, separated by commas: {', '.join(WORKLOADS)}.")] = "decode",
    model: Annotated[str, typer.Option(help="Model name to send; default: the first that the server lists.")] = "",
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json, a folder with one, or a model.")] = "default",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each workload, each with its own prompts.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of lengths and texts.")] = 0,
    salt: Annotated[
        str,
        typer.Option(help="Changes only the prompts' text: for a second run on a server with a warm prefix cache."),
    ] = "",
    num_requests: Annotated[int | None, typer.Option(min=1, help="Number of requests (closed loop).")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="poisson, bursty: requests per second.")] = 1.0,
    duration: Annotated[float, typer.Option(min=0.1, help="poisson, bursty: seconds of arrivals.")] = 60.0,
    server_pid: Annotated[int | None, typer.Option(help="Also report CPU and memory of this process tree.")] = None,
    wait_quiet: Annotated[float, typer.Option(help="Wait at most this many seconds for a quiet machine.")] = 0.0,
    extra_body: Annotated[str, typer.Option(help='JSON merged into each body; "$MAX_TOKENS" is replaced.')] = "{}",
    extensions: Annotated[bool, typer.Option(help="Send ignore_eos and stream_options.")] = True,
    json_file: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Run workloads against a server. Exit status 1: a request failed or had the wrong length.

    If the server requires an API key, set SERVE_APP_API_KEY.
    """
    names = workload.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(WORKLOADS)}", param_hint="--workload")
    from serve_app.workloads.client import Server
    from serve_app.workloads.prompts import open_writer
    from serve_app.workloads.report import bench_page, circumstances
    from serve_app.workloads.runs import reach, run_repeats

    writer = open_writer(tokenizer)
    try:
        server = reach(Server(base_url, model, json.loads(extra_body), extensions, api_key=client_api_key()), writer)
    except RuntimeError as error:
        Console(stderr=True).print(f"[red]{error}")
        raise typer.Exit(1) from error

    def build(name: str, repeat: int) -> Workload:
        return build_workload(
            name, writer, seed=seed, repeat=repeat, salt=salt, rate=rate, duration_s=duration, num_requests=num_requests
        )

    results = {
        name: run_repeats(
            server, writer, partial(build, name), repeats=repeats, server_pid=server_pid, quiet_limit_s=wait_quiet
        )
        for name in names
    }
    facts = circumstances(server=base_url, model=server.model, seed=seed)
    report = {"circumstances": facts, "results": results}
    print(json.dumps(report, indent=1))
    write_json(json_file, report)
    if html is not None:
        html.write_text(bench_page(f"{server.model}: {', '.join(names)}", facts, results), encoding="utf-8")
    _fail_on_bad_answers(results)


def _fail_on_bad_answers(results: dict[str, Any]) -> None:
    if any(report["median"]["failures"] or report["median"]["wrong_length"] for report in results.values()):
        Console(stderr=True).print("[red]some requests failed or had the wrong length")
        raise typer.Exit(1)


_Report = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Written with --json.")]


@bench.command()
def compare(a: _Report, b: _Report, html: HtmlFile = None) -> None:
    """Print B / A for every figure, with the lowest and highest ratio of single runs."""
    from serve_app.workloads.plots import draw_ratios, image
    from serve_app.workloads.ratios import compare_results, read_results
    from serve_app.workloads.report import page, table

    try:
        ratios = compare_results(read_results(a), read_results(b))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    header = ("workload", "figure", "A", "B", "B / A", "spread of runs", "runs", "")
    rows = [
        (
            one.workload,
            one.figure,
            f"{one.a:.4g}",
            f"{one.b:.4g}",
            f"{one.ratio:.3f}",
            f"{one.low:.3f} to {one.high:.3f}",
            "{} and {}".format(*one.runs),
            one.verdict,
        )
        for one in ratios
    ]
    shown = Table(*header, title=f"A: {a}   B: {b}")
    for row in rows:
        shown.add_row(*row)
    Console().print(shown if rows else "The two reports have no workload in common.")
    if html is not None:
        body = f"<h1>B over A</h1><p>A: {escape(a.name)}, B: {escape(b.name)}</p>" + table(header, rows)
        body += image(draw_ratios(ratios), "B / A for each figure, with the spread of the runs")
        html.write_text(page(f"{b.name} over {a.name}", body), encoding="utf-8")
