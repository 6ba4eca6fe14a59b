"""Runs the named workloads repeatedly against one running server.

Warms up first. Every repeat has its own prompts. The report has the single runs and the median of
each figure. Starts and stops no server. `serve-app bench run` is the command.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serve_app.workloads.client import RequestResult, Run, Server, open_session, run_workload, send
from serve_app.workloads.figures import median_of, summarize
from serve_app.workloads.machine import Meter, wait_until_quiet
from serve_app.workloads.mixes import WorkItem, Workload
from serve_app.workloads.prompts import PromptWriter

OnDone = Callable[[RequestResult], None]
Runner = Callable[[Workload, OnDone], Run]
"""Runs a workload to its end and calls back after each request."""

_WARM_UP_TOKENS = 16
console = Console(stderr=True)


async def warm_up(server: Server, writer: PromptWriter, at_once: int = 16) -> None:
    """Send one request alone, then several concurrently.

    Raises `RuntimeError` with the server's answer if one fails.
    """
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


async def find_model(server: Server) -> str:
    """Return the name of the first model that the server lists."""
    url = f"{server.base_url.rstrip('/')}/v1/models"
    async with open_session(replace(server, timeout_s=30)) as session, session.get(url) as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])


def reach(server: Server, writer: PromptWriter) -> Server:
    """Return the server, warmed up, with its model's name. Raises `RuntimeError` on failure."""
    try:
        server = replace(server, model=server.model or uvloop.run(find_model(server)))
        uvloop.run(warm_up(server, writer))
    except (aiohttp.ClientError, OSError, RuntimeError) as error:
        raise RuntimeError(f"{server.base_url}: {error}") from error
    return server


def run_repeats(
    server: Server,
    writer: PromptWriter,
    build: Callable[[int], Workload],
    *,
    repeats: int,
    server_pid: int | None = None,
    quiet_limit_s: float = 0.0,
) -> dict[str, Any]:
    """Return the median and the single runs of one workload. Shows progress.

    `build(repeat)` returns the workload of a repeat.
    """
    run = through_http(server, writer)
    workloads = (build(repeat) for repeat in range(repeats))
    runs = [
        measure(run, workload, f"{workload.name} {number}/{repeats}", writer.num_special, server_pid, quiet_limit_s)
        for number, workload in enumerate(workloads, start=1)
    ]
    return {"median": median_of(runs), "runs": runs}


def through_http(server: Server, writer: PromptWriter) -> Runner:
    """Return a runner that sends workloads to a server."""
    return lambda workload, on_done: uvloop.run(run_workload(server, workload, writer, on_done))


def measure(
    run: Runner,
    workload: Workload,
    title: str,
    extra_prompt_tokens: int = 0,
    server_pid: int | None = None,
    quiet_limit_s: float = 0.0,
) -> dict[str, Any]:
    """Return the figures of one run (see `summarize`). Shows progress.

    Includes the usage of the server's process tree if its pid is given. Waits for a quiet machine
    first, at most `quiet_limit_s` seconds.
    """
    if quiet_limit_s:
        wait_until_quiet(quiet_limit_s, server_pid)
    with show_progress(workload, title) as on_done:
        meter = Meter(server_pid)
        done = run(workload, on_done)
        usage = meter.read() if server_pid is not None else {}
    return summarize(done, extra_prompt_tokens) | usage


@contextmanager
def show_progress(workload: Workload, title: str) -> Iterator[OnDone]:
    """Show a progress bar on standard error; yields the function to call with every result."""
    columns = TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[tokens]} tokens"), console=console) as progress:
        task = progress.add_task(title, total=len(workload.items), tokens=0)

        def on_done(result: RequestResult) -> None:
            progress.update(task, advance=1, tokens=progress.tasks[0].fields["tokens"] + result.output_tokens)

        yield on_done
