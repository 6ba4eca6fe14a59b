"""`serve-app explain`: the command's options; the demonstration itself is `experiments.explain`."""

from typing import Annotated

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, PngFile, errors_in_one_line, write_json
from serve_app.experiments.explain import BUDGET, FIRST, MAX_NUM_SEQS, MIXED, run, show
from serve_app.experiments.packed_step import draw_mask_png


def explain(
    model: Annotated[str, typer.Option(help='"default", a folder, a .gguf file or a hub id.')] = "default",
    budget: Annotated[int, typer.Option(min=MAX_NUM_SEQS, help="Tokens that one step may compute.")] = BUDGET,
    step: Annotated[
        str, typer.Option(help='"first", "mixed" (two requests decode, two more begin), or a step\'s number, from 0.')
    ] = MIXED,
    kv_cache_gib: Annotated[float, typer.Option(min=0.001, help="Size of the KV pool.")] = 1.0,
    png: PngFile = None,
    json_file: JsonFile = None,
) -> None:
    """One packed step of a real run: which requests' tokens it computes, and what each may attend to."""
    console = Console()
    if step not in (FIRST, MIXED) and not step.isdecimal():
        raise typer.BadParameter(f"{step!r} is not {FIRST}, {MIXED} or a number", param_hint="--step")
    with errors_in_one_line(), Console(stderr=True).status("loading the model"):
        found = run(model, budget, kv_cache_gib, step)
    show(console, found)
    if png is not None:
        draw_mask_png(png, found)
    write_json(json_file, found.to_json())
