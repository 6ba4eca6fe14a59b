"""`serve-app experiment`: the commands' options. The module of `experiments` of that name measures,
shows and draws."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile, errors_in_one_line, write_json

if TYPE_CHECKING:
    from serve_app.experiments.step_costs import StepCost

experiment = typer.Typer(
    help="The experiments that made continuous batching known, on a real model.", no_args_is_help=True
)

_Model = Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')]
_Slots = Annotated[int, typer.Option(min=1, help="Slots where each has memory for the longest request.")]
_Requests = Annotated[int, typer.Option(min=1, help="Number of requests.")]
_ManyRequests = Annotated[int, typer.Option(min=20, help="Number of requests.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")]


class Experiment(Protocol):
    """A module of `serve_app.experiments`; what `run` measured is a type of its own in each."""

    run: Callable[..., Any]

    def report(self, result: Any, /) -> dict[str, Any]:
        """The figures as plain data."""

    def show(self, console: Console, result: Any, /) -> None:
        """The figures as a table."""

    def draw(self, path: Path, result: Any, /) -> None:
        """The figures as a picture, a PNG."""


def _perform(
    name: str, measure: Callable[[Experiment, Console], Any], png: Path | None, json_file: Path | None
) -> None:
    """Show, draw and write what `measure` finds, called with the experiment and a console for its
    progress."""
    found: Any = import_module(f"serve_app.experiments.{name}")
    module: Experiment = found
    with errors_in_one_line():
        result = measure(module, Console(stderr=True))
    module.show(Console(), result)
    if png is not None:
        module.draw(png, result)
    write_json(json_file, module.report(result))


def _measured_cost(model: str, threads: int | None, progress: Console) -> "StepCost":
    """Measure the cost of the model's steps and print it in one line."""
    from serve_app.experiments.compare import token_progress
    from serve_app.experiments.step_costs import NUM_TOKENS, measure_cost

    with token_progress(progress) as begin:
        cost = measure_cost(model, threads, begin("cost of a step", NUM_TOKENS))
    Console().print(
        f"A step costs {cost.base_s * 1e3:.2f} ms, {cost.token_s * 1e3:.3f} ms more for each position and "
        f"{cost.pair_s * 1e6:.3f} us for each pair of query and key (fitted to measured steps, mean error "
        f"{cost.error:.0%})."
    )
    return cost


def _replay(name: str, model: str, threads: int | None, png: Path | None, json_file: Path | None, *counts: int) -> None:
    """Run an experiment in simulated time, from the measured cost of steps."""

    def measure(module: Experiment, progress: Console) -> Any:
        return module.run(_measured_cost(model, threads, progress), *counts)

    _perform(name, measure, png, json_file)


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
    from serve_app.experiments.compare import token_progress
    from serve_app.experiments.requests import make_job
    from serve_app.text.tokenizer import load_tokenizer

    def measure(module: Experiment, progress: Console) -> Any:
        job = make_job(load_tokenizer(model), requests, cap, slots, model=model, num_threads=threads)
        with token_progress(progress) as begin:
            return module.run(job, 4 * slots, lambda way: begin(way.value, job.output_tokens))

    _perform("memory", measure, png, json_file)


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
    """Throughput with varying output lengths, and the contribution of iteration level, packing,
    paging and kernels.

    Runs on the CPU. Lengths are exponential with mean 32, cut at each cap: 25 % of the published
    experiment's.
    """
    from serve_app.experiments.compare import token_progress
    from serve_app.text.tokenizer import load_tokenizer

    cut_at = _positive(caps, "--caps")

    def measure(module: Experiment, progress: Console) -> Any:
        fields: dict[str, Any] = {"model": model, "device": "cpu", "num_threads": threads}
        with token_progress(progress) as begin:
            return module.run(load_tokenizer(model), requests, cut_at, slots, begin, **fields)

    _perform("lengths", measure, png, json_file)


@experiment.command()
def latency(
    model: _Model = "default",
    slots: _Slots = 16,
    requests: _ManyRequests = 400,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Latency and TTFT for Poisson arrivals at 40 to 110 % of capacity: static and continuous,
    padded and packed.

    Runs the real scheduler in simulated time, from the measured cost of the model's steps.
    """
    _replay("latency", model, threads, png, json_file, requests, slots)


@experiment.command()
def waiting(
    model: _Model = "default",
    slots: _Slots = 16,
    requests: _ManyRequests = 400,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Sweep of the waiting-served ratio for fused and separate prefill: TTFT, pauses, ITL,
    throughput.

    Runs the real scheduler in simulated time, from the measured cost of the model's steps.
    """
    _replay("waiting", model, threads, png, json_file, requests, slots)


@experiment.command()
def window(
    model: _Model = "default",
    requests: _ManyRequests = 300,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Batches by size or by time (max_batch_size, max_wait_time), and continuous batching, for
    random arrivals.

    Runs the real scheduler in simulated time, from the measured cost of the model's steps.
    """
    _replay("window", model, threads, png, json_file, requests)
