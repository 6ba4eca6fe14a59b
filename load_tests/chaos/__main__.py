"""`python -m load_tests.chaos`: inject faults into real fleets and report what clients see."""

import asyncio
import json as json_format
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from load_tests.chaos import kill_loop, memory, overload, profile_share, soak, soak_report
from load_tests.chaos.experiment import Fault, Row
from load_tests.chaos.faults import FAULTS
from load_tests.chaos.fleet import PATHS, Fleet, Shape, serving
from load_tests.chaos.report import show, show_problems, write_json
from load_tests.chaos.small_model import write_small_model
from load_tests.chaos.suite import run_faults

T = TypeVar("T")
Figures = dict[str, Any]
_KV_CACHE_GIB = 0.5
"""KV pool per replica, for models other than the small one."""

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Json = Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")]
Seed = Annotated[int, typer.Option(help="decides everything random")]
Path_ = Annotated[str, typer.Option("--path", help="Ray's path: fast or default")]
Model = Annotated[str, typer.Option(help="the model to serve; small: random weights written for the suite")]


@app.command("faults")
def faults_command(
    only: Annotated[str, typer.Option(help="faults whose name contains this")] = "",
    path: Annotated[list[str], typer.Option(help="Ray's paths: fast, default")] = list(PATHS),  # noqa: B006
    moment: Annotated[list[str], typer.Option(help="known, random")] = ["known", "random"],  # noqa: B006
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Inject every fault at a known and at a random point.

    The exit status is 1 if an expectation is missed.
    """
    chosen = [fault for fault in FAULTS if only in fault.name]
    rows = _run(_faults(chosen, path, moment, seed))
    show(rows)
    if json is not None:
        write_json(rows, json, seed)
    sys.exit(any(row.problems for row in rows))


@app.command("kill-loop")
def kill_loop_command(
    requests: int = 1000,
    at_once: int = 16,
    every: Annotated[float, typer.Option(help="seconds between kills")] = 5.0,
    path: Path_ = "fast",
    model: Model = "small",
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Run streams on 3 replicas while a random ready one is killed every few seconds."""
    # Many wait for the last replica while the others start; none of them is to be refused for lack
    # of room.
    shape = replace(Shape(), queue=max(Shape().queue, 2 * at_once))
    work = partial(kill_loop.kill_loop, requests=requests, at_once=at_once, every_s=every, seed=seed)
    _measure(path, model, shape, json, work, kill_loop.verdict)


@app.command("overload")
def overload_command(
    seconds: float = 300.0,
    capacity_seconds: float = 45.0,
    replicas: int = 1,
    path: Path_ = "fast",
    model: Model = "small",
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Measure capacity, then offer ten times as much, open loop."""
    work = partial(overload.overload, seconds=seconds, capacity_s=capacity_seconds, seed=seed)
    _measure(path, model, Shape(replicas=replicas), json, work, overload.verdict)


@app.command("profile-share")
def profile_share_command(
    seconds: float = 30.0, path: Path_ = "fast", model: Model = "small", seed: Seed = 0, json: Json = None
) -> None:
    """Measure the share of CPU time that failover, metrics and step records cost in ingress and
    replicas."""
    work = partial(profile_share.profile_share, seconds=seconds, seed=seed)
    _measure(path, model, Shape(), json, work, profile_share.verdict)


@app.command("memory")
def memory_command(
    seconds: float = 300.0, path: Path_ = "fast", model: Model = "small", seed: Seed = 0, json: Json = None
) -> None:
    """Run 200 clients that read nothing and 100 that send 4 MiB bodies, beside ordinary streams."""
    shape = replace(Shape(), queue=memory.PLACES)
    _measure(path, model, shape, json, partial(memory.memory, seconds=seconds, seed=seed), memory.verdict)


@app.command("soak")
def soak_command(
    minutes: float = 60.0,
    path: Path_ = "fast",
    model: Model = "small",
    seed: Seed = 0,
    json: Json = None,
    png: Annotated[Path | None, typer.Option(help="also draw what the processes held")] = None,
) -> None:
    """Run at 80 % load, with clients that disconnect, a kill every 2 minutes and an update every
    10."""

    async def work(fleet: Fleet) -> Figures:
        figures = await soak.soak(fleet, 60 * minutes, seed)
        if png is not None:
            soak_report.draw(figures, png)
        return figures

    _measure(path, model, Shape(), json, work, soak_report.verdict)


async def _faults(chosen: list[Fault], paths: list[str], moments: list[str], seed: int) -> list[Row]:
    rows: list[Row] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = Path(scratch)
        write_small_model(folder / "model")
        for path in paths:
            async for row in run_faults(chosen, path, moments, str(folder / "model"), folder, seed):
                rows.append(row)
                outcome = "FAILED" if row.problems else "ok"
                print(f"[{time.monotonic() - started:5.0f} s] {row.fault}, {path}, {row.moment}: {outcome}", flush=True)
                show_problems(row)
    return rows


def _measure(
    path: str,
    model: str,
    shape: Shape,
    json: Path | None,
    measure: Callable[[Fleet], Awaitable[Figures]],
    verdict: Callable[[Figures], list[str]],
) -> None:
    """Print the figures and the expectations that they miss.

    The exit status is 1 if there are any.
    """

    async def run() -> Figures:
        async with _fleet(path, model, shape) as fleet:
            return {"command": " ".join(sys.argv[1:]), "model": model, **await measure(fleet)}

    figures = _run(run())
    figures["faults"] = verdict(figures)
    print(json_format.dumps({name: figure for name, figure in figures.items() if name != "samples"}, indent=2))
    for fault in figures["faults"]:
        print(f"FAILED: {fault}")
    if json is not None:
        json.write_text(json_format.dumps(figures, indent=2) + "\n")
    sys.exit(bool(figures["faults"]))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run the command. SIGTERM ends it and its servers like Ctrl-C."""

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    return asyncio.run(main())


@asynccontextmanager
async def _fleet(path: str, model: str, shape: Shape) -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        folder = Path(scratch)
        if model == "small":
            model = str(folder / "model")
            write_small_model(Path(model))
        else:
            shape = replace(shape, kv_cache_gib=_KV_CACHE_GIB)
        async with serving(path, model, folder, shape) as fleet:
            yield fleet


if __name__ == "__main__":
    app()
