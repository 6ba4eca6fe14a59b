"""`serve-app explain`: the command's options; the demonstration itself is `demo.explain`."""

import json
from typing import Annotated

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile
from serve_app.demo.explain import BUDGET, MAX_NUM_SEQS, run, show
from serve_app.demo.packed_step import draw_mask_png
from serve_app.errors import ServeAppError


def explain(
    model: Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    budget: Annotated[int, typer.Option(min=MAX_NUM_SEQS, help="Tokens that one step may compute.")] = BUDGET,
    kv_cache_gib: Annotated[float, typer.Option(min=0.001, help="Size of the KV pool.")] = 1.0,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """One packed step of a real run: which requests' tokens it computes, and what each may attend to."""
    console = Console()
    try:
        with Console(stderr=True).status("loading the model"):
            step = run(model, budget, kv_cache_gib)
    except ServeAppError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    show(console, step)
    if png is not None:
        draw_mask_png(png, step)
    if json_file is not None:
        json_file.write_text(json.dumps(step.to_json(), indent=1) + "\n")
