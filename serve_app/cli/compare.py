"""`serve-app compare`: the command's options; the demonstration itself is `experiments.compare`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile, errors_in_one_line, write_json
from serve_app.experiments.compare import (
    CAPS,
    PROMPTS,
    draw,
    make_job,
    read_requests,
    report,
    run_all,
    show,
    show_events,
)
from serve_app.observability.timeline import PALETTE

_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Without `auto`: the engine and transformers would not choose the same dtype."""


def compare(
    model: Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    slots: Annotated[int, typer.Option(min=1, help="Requests at once, in all runs.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="Number of passes over the list of prompts.")] = 8,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt instead of the built-in six; repeatable.")] = None,
    caps: Annotated[str, typer.Option(help="Output tokens of each prompt, in order.")] = ",".join(map(str, CAPS)),
    requests: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help='A JSONL file instead: {"prompt": "...", "max_tokens": 20} a line.'
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype of all runs.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Let the packed runs reuse cached blocks of repeated prompts.")
    ] = False,
    kv_cache_gib: Annotated[float, typer.Option(min=0.001, help="Size of the packed runs' KV pool.")] = 1.0,
    events: Annotated[bool, typer.Option("--events", help="Print when requests take and leave their slots.")] = False,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Compare static and continuous batching on the same requests and slots, with timelines."""
    from serve_app.text.tokenizer import load_tokenizer

    console = Console()
    with errors_in_one_line():
        if prompt and requests:
            raise typer.BadParameter("cannot be combined with --requests", param_hint="--prompt")
        prompts, lengths = read_requests(requests) if requests else _with_caps(prompt or PROMPTS, caps)
        if device not in ("auto", "cpu", "cuda"):
            raise typer.BadParameter(f"{device!r} is not one of auto, cpu, cuda", param_hint="--device")
        if dtype not in _DTYPES:
            raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(_DTYPES)}", param_hint="--dtype")
        fields = {
            "slots": slots,
            "model": model,
            "dtype": dtype,
            "device": device,
            "prefix_cache": prefix_cache,
            "num_threads": threads,
            "kv_cache_gib": kv_cache_gib,
        }
        job = make_job(load_tokenizer(model), prompts, lengths, repeat, **fields)
        results = run_all(job, Console(stderr=True))
    groups = {f"request-{index}": index % len(prompts) for index in range(len(job.caps))}
    show(console, job, results, groups)
    if events:
        show_events(console, results)
    if png is not None:
        # Colours repeat after eight, so that of more prompts none has one of its own.
        draw(png, results, groups, [f"{cap} tokens out" for cap in lengths] if len(lengths) <= len(PALETTE) else [])
    write_json(json_file, report(results))


def _with_caps(prompts: Sequence[str], text: str) -> tuple[Sequence[str], tuple[int, ...]]:
    """Return the prompts with the number of output tokens of each."""
    try:
        caps = tuple(int(part) for part in text.split(","))
    except ValueError:
        caps = ()
    if len(caps) != len(prompts) or min(caps) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of {len(prompts)} positive numbers", param_hint="--caps")
    return prompts, caps
