"""Options `--json`, `--png` and `--html` of measuring commands, checked before the work."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from serve_app.errors import ServeAppError


def check_output(path: Path | None) -> Path | None:
    """Return the path if a file can be written there; else raise `typer.BadParameter`."""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written")
    return path


JsonFile = Annotated[Path | None, typer.Option("--json", callback=check_output, help="Write the figures here.")]
PngFile = Annotated[Path | None, typer.Option("--png", callback=check_output, help="Write the picture here.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", callback=check_output, help="Write an HTML report here.")]


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print a `ServeAppError` of this context in one line and exit with status 1."""
    try:
        yield
    except ServeAppError as error:
        Console().print(f"[red]{error}")
        raise typer.Exit(1) from error


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write the figures to `path`, if one is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
