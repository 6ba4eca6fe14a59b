"""`serve-app experiment`: the commands' options; the experiments themselves are `demo.experiments`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile
from serve_app.errors import ServeAppError

experiment = typer.Typer(
    help="The experiments that made continuous batching known, on a real model.", no_args_is_help=True
)

_Model = Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')]
_Slots = Annotated[int, typer.Option(min=1, help="Requests at once, where their memory is reserved for the longest.")]
_Requests = Annotated[int, typer.Option(min=1, help="Number of requests.")]
_Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's choice.")]


@contextmanager
def _told() -> Iterator[None]:
    """Errors of the project are told in one line."""
    try:
        yield
    except ServeAppError as error:
        Console().print(f"[red]{error}")
        raise typer.Exit(1) from error


def _write(json_file: Path | None, figures: dict[str, Any]) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


@experiment.command()
def memory(
    model: _Model = "default",
    slots: _Slots = 8,
    requests: _Requests = 64,
    cap: Annotated[int, typer.Option(min=1, help="Greatest number of output tokens.")] = 384,
    threads: _Threads = None,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """KV memory reserved against used, over time: static batches, contiguous reservations, pages."""
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
