"""The `serve-app` command: one small module per subcommand.

Decides which subcommands exist and what `serve-app --help` says. Each module imports what is slow
to import (torch, Ray, matplotlib) only when its command runs, so that help and version answer at
once.
"""

from typing import Annotated

import typer

import serve_app
from serve_app.cli.bench import bench
from serve_app.cli.check import check
from serve_app.cli.compare import compare
from serve_app.cli.experiment import experiment
from serve_app.cli.explain import explain
from serve_app.cli.keys import keys
from serve_app.cli.serve import serve
from serve_app.cli.timeline import timeline
from serve_app.cli.usage import usage

app = typer.Typer(
    name="serve-app",
    help="LLM serving on Ray Serve with continuous batching: run it, watch it, measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(serve_app.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """LLM serving on Ray Serve with continuous batching: run it, watch it, measure it."""


app.command()(serve)
app.command()(check)
app.command()(compare)
app.command()(explain)
app.add_typer(experiment, name="experiment")
app.add_typer(bench, name="bench")
app.command()(timeline)
app.add_typer(keys, name="keys")
app.command()(usage)
