"""`serve-app experiment`: the commands' options; the experiments themselves are `demo.experiments`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile
from serve_app.errors import ServeAppError

if TYPE_CHECKING:
    from serve_app.demo.experiments.step_costs import StepCost

experiment = typer.Typer(
    help="The experiments that made continuous batching known, on a real model.", no_args_is_help=True
)

_Model = Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')]
_Slots = Annotated[int, typer.Option(min=1, help="Slots where each has memory for the longest request.")]
_Requests = Annotated[int, typer.Option(min=1, help="Number of requests.")]
_ManyRequests = Annotated[int, typer.Option(min=20, help="Number of requests.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")]


@contextmanager
def _told() -> Iterator[None]:
    """Report the project's errors in one line."""
    try:
        yield
    except ServeAppError as error:
        Console().print(f"[red]{error}")
        raise typer.Exit(1) from error


def _write(json_file: Path | None, figures: dict[str, Any]) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


def _measured_cost(model: str, threads: int | None) -> "StepCost":
    """Measure the cost of the model's steps and print it in one line."""
    from serve_app.demo.compare import token_progress
    from serve_app.demo.experiments.step_costs import NUM_TOKENS, measure_cost

    with token_progress(Console(stderr=True)) as begin:
        cost = measure_cost(model, threads, begin("cost of a step", NUM_TOKENS))
    Console().print(
        f"A step costs {cost.base_s * 1e3:.2f} ms, {cost.token_s * 1e3:.3f} ms more for each position and "
        f"{cost.pair_s * 1e6:.3f} us for each pair of query and key (fitted to measured steps, mean error "
        f"{cost.error:.0%})."
    )
    return cost


def _positive(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (0,)
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers", param_hint=option)
    return numbers


@experiment.command()
def memory(
    model: _Model = "default",
    slots: _Slots = 8,
    requests: _Requests = 64,
    cap: Annotated[int, typer.Option(min=1, help="Maximum number of output tokens.")] = 384,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """KV memory, reserved and used, over time: static batches, contiguous reservations, pages."""
    from serve_app.demo.compare import token_progress
    from serve_app.demo.experiments.memory import draw, report, run, show
    from serve_app.demo.experiments.requests import make_job
    from serve_app.text.tokenizer import load_tokenizer

    with _told():
        job = make_job(load_tokenizer(model), requests, cap, slots, model=model, num_threads=threads)
        with token_progress(Console(stderr=True)) as begin:
            results = run(job, 4 * slots, lambda way: begin(way.value, job.output_tokens))
    show(Console(), results)
    if png is not None:
        draw(png, results)
    _write(json_file, report(results))


@experiment.command()
def lengths(
    model: _Model = "default",
    slots: _Slots = 8,
    requests: _Requests = 48,
    caps: Annotated[str, typer.Option(help="Maximum numbers of output tokens.")] = "8,32,128",
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Throughput with varying output lengths, and the contribution of iteration level, packing, paging and kernels.

    Runs on the CPU. Lengths are exponential with mean 32, cut at each cap: 25 % of the published experiment's.
    """
    from serve_app.demo.compare import token_progress
    from serve_app.demo.experiments.lengths import draw, report, run, show
    from serve_app.text.tokenizer import load_tokenizer

    cut_at = _positive(caps, "--caps")
    with _told(), token_progress(Console(stderr=True)) as begin:
        fields: dict[str, Any] = {"model": model, "device": "cpu", "num_threads": threads}
        results = run(load_tokenizer(model), requests, cut_at, slots, begin, **fields)
    show(Console(), results)
    if png is not None:
        draw(png, results)
    _write(json_file, report(results))


@experiment.command()
def latency(
    model: _Model = "default",
    slots: _Slots = 16,
    requests: _ManyRequests = 400,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Latency and TTFT for Poisson arrivals at 40 to 110 % of capacity: static and continuous, padded and packed.

    Runs the real scheduler in simulated time, from the measured cost of the model's steps.
    """
    from serve_app.demo.experiments.latency import draw, report, run, show

    with _told():
        result = run(_measured_cost(model, threads), requests, slots)
    show(Console(), result)
    if png is not None:
        draw(png, result)
    _write(json_file, report(result))


@experiment.command()
def waiting(
    model: _Model = "default",
    slots: _Slots = 16,
    requests: _ManyRequests = 400,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Sweep of the waiting-served ratio for fused and separate prefill: TTFT, pauses, ITL, throughput.

    Runs the real scheduler in simulated time, from the measured cost of the model's steps.
    """
    from serve_app.demo.experiments.waiting import draw, report, run, show

    with _told():
        result = run(_measured_cost(model, threads), requests, slots)
    show(Console(), result)
    if png is not None:
        draw(png, result)
    _write(json_file, report(result))


@experiment.command()
def window(
    model: _Model = "default",
    requests: _ManyRequests = 300,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Batches by size or by time (max_batch_size, max_wait_time) for random arrivals, beside continuous batching.

    Runs the real scheduler in simulated time, from the measured cost of the model's steps.
    """
    from serve_app.demo.experiments.window import draw, report, run, show

    with _told():
        result = run(_measured_cost(model, threads), requests)
    show(Console(), result)
    if png is not None:
        draw(png, result)
    _write(json_file, report(result))
