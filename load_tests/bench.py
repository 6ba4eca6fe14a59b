"""One workload against one running server: `python -m load_tests.bench --workload decode --repeats 3 --json FILE`.

Decides how runs are repeated and reported: warm-up first, then every repeat with a text of its own; the median of each
figure stands beside the single runs. It starts and stops no server.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from random import Random
from typing import Annotated, Any

import aiohttp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from load_tests.client import RequestResult, Server, median_of, open_session, run_workload, send, summarize
from load_tests.machine import Meter, wait_until_quiet
from load_tests.workloads import WORKLOADS, PromptWriter, WorkItem, Workload, build_workload, open_writer
from serve_app.cli.outputs import JsonFile

_WARM_UP_TOKENS = 16
console = Console(stderr=True)


async def warm_up(server: Server, writer: PromptWriter, at_once: int = 16) -> None:
    """One request alone, then several at once. Raises `RuntimeError` with the server's answer if one fails."""
    rng = Random("warm-up")

    def item(prompt_tokens: int) -> WorkItem:
        return WorkItem(writer.write(rng, prompt_tokens), prompt_tokens, _WARM_UP_TOKENS)

    async with open_session(server) as session:
        first = await send(session, server, item(32), writer.count)
        results = [
            first,
            *await asyncio.gather(*(send(session, server, item(48), writer.count) for _ in range(at_once))),
        ]
    for result in results:
        if result.error is not None:
            raise RuntimeError(f"warm-up failed: {result.error}")


async def find_model(base_url: str) -> str:
    """The name of the first model the server lists."""
    url = f"{base_url.rstrip('/')}/v1/models"
    async with open_session(Server(base_url, "", timeout_s=30)) as session, session.get(url) as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def run_repeats(
    server: Server,
    writer: PromptWriter,
    build: Callable[[int], Workload],
    *,
    repeats: int,
    server_pid: int | None = None,
    quiet_limit_s: float = 0.0,
) -> dict[str, Any]:
    """Median and single runs of one workload; `build(repeat)` gives the workload of a repeat. Shows progress."""
    runs = []
    for repeat in range(repeats):
        workload = build(repeat)
        if quiet_limit_s:
            wait_until_quiet(quiet_limit_s, server_pid)
        with _progress() as progress:
            task = progress.add_task(f"{workload.name} {repeat + 1}/{repeats}", total=len(workload.items), tokens=0)

            def on_done(result: RequestResult, progress: Progress = progress, task: Any = task) -> None:
                tokens = progress.tasks[0].fields["tokens"] + result.output_tokens
                progress.update(task, advance=1, tokens=tokens)

            meter = Meter(server_pid)
            run = asyncio.run(run_workload(server, workload, writer, on_done))
            usage = meter.read() if server_pid is not None else {}
            runs.append(summarize(run, writer.num_special) | usage)
    return {"median": median_of(runs), "runs": runs}


def _progress() -> Progress:
    columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[tokens]} tokens"), console=console)


def main(
    base_url: Annotated[str, typer.Option(help="The server's root, without /v1.")] = "http://127.0.0.1:8000",
    workload: Annotated[str, typer.Option(help=f"One of: {', '.join(WORKLOADS)}.")] = "decode",
    model: Annotated[str, typer.Option(help="Model name to send; by default the first that the server lists.")] = "",
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json, a folder with one, or a model.")] = "default",
    repeats: Annotated[int, typer.Option(min=1)] = 1,
    seed: int = 0,
    salt: Annotated[str, typer.Option(help="Changes the text only; for a second run on a live server.")] = "",
    num_requests: Annotated[int | None, typer.Option(min=1, help="How many (closed loop).")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="poisson: requests per second.")] = 1.0,
    duration: Annotated[float, typer.Option(min=0.1, help="poisson: seconds of arrivals.")] = 60.0,
    server_pid: Annotated[int | None, typer.Option(help="Also report this process tree's CPU and memory.")] = None,
    wait_quiet: Annotated[float, typer.Option(help="Wait up to so many seconds for a quiet machine.")] = 0.0,
    extra_body: Annotated[str, typer.Option(help='JSON merged into each body; "$MAX_TOKENS" is filled in.')] = "{}",
    extensions: Annotated[bool, typer.Option(help="Send ignore_eos and stream_options.")] = True,
    json_file: JsonFile = None,
) -> None:
    """Measure one workload against a running server."""
    if workload not in WORKLOADS:
        raise typer.BadParameter(f"{workload!r} is none of {', '.join(WORKLOADS)}", param_hint="--workload")
    writer = open_writer(tokenizer)
    try:
        server = Server(base_url, model or asyncio.run(find_model(base_url)), json.loads(extra_body), extensions)
        asyncio.run(warm_up(server, writer))
    except (aiohttp.ClientError, OSError, RuntimeError) as error:
        console.print(f"[red]{base_url}: {error}")
        raise typer.Exit(1) from error

    def build(repeat: int) -> Workload:
        return build_workload(
            workload,
            writer,
            seed=seed,
            repeat=repeat,
            salt=salt,
            rate=rate,
            duration_s=duration,
            num_requests=num_requests,
        )

    report = run_repeats(server, writer, build, repeats=repeats, server_pid=server_pid, quiet_limit_s=wait_quiet)
    report |= {"base_url": base_url, "model": server.model, "workload": workload, "seed": seed}
    text = json.dumps(report, indent=1)
    print(text)
    if json_file is not None:
        json_file.write_text(text + "\n")
    if report["median"]["failures"] or report["median"]["wrong_length"]:
        console.print("[red]some requests failed or had the wrong length")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
