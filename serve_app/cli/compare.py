"""`serve-app compare`: the command's options; the demonstration itself is `demo.compare`."""

import json
from typing import Annotated

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile
from serve_app.demo.compare import CAPS, PROMPTS, draw, make_job, report, run_all, show
from serve_app.errors import ServeAppError

_DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Without `auto`: the engine and transformers would not choose the same dtype."""


def compare(
    model: Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    slots: Annotated[int, typer.Option(min=1, help="Requests at once, in all runs.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="How often the six prompts are repeated, in order.")] = 8,
    caps: Annotated[str, typer.Option(help="Output tokens of each of the six prompts.")] = ",".join(map(str, CAPS)),
    dtype: Annotated[str, typer.Option(help="Compute dtype of all runs.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default torch's choice.")] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Let the packed runs reuse cached blocks of repeated prompts.")
    ] = False,
    kv_cache_gib: Annotated[float, typer.Option(min=0.001, help="Size of the packed runs' KV pool.")] = 1.0,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """Static against continuous batching: same requests, same slots, measured and drawn as timelines."""
    from serve_app.text.tokenizer import load_tokenizer

    console = Console()
    try:
        lengths = _parse_caps(caps)
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
        job = make_job(load_tokenizer(model), PROMPTS, lengths, repeat, **fields)
        results = run_all(job, Console(stderr=True))
    except ServeAppError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    groups = {f"request-{index}": index % len(PROMPTS) for index in range(len(job.caps))}
    show(console, job, results, groups)
    if png is not None:
        draw(png, results, groups, [f"{cap} tokens out" for cap in lengths])
    if json_file is not None:
        json_file.write_text(json.dumps(report(results), indent=1) + "\n")


def _parse_caps(text: str) -> tuple[int, ...]:
    try:
        caps = tuple(int(part) for part in text.split(","))
    except ValueError:
        caps = ()
    if len(caps) != len(PROMPTS) or min(caps) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of {len(PROMPTS)} positive numbers", param_hint="--caps")
    return caps
