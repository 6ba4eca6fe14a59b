"""The options `--json`, `--png` and `--html` of commands that measure, checked before the measuring starts."""

import os
from pathlib import Path
from typing import Annotated

import typer


def check_output(path: Path | None) -> Path | None:
    """The path, if a file can be written there; raises `typer.BadParameter` before any work is done."""
    if path is not None:
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written")
    return path


JsonFile = Annotated[Path | None, typer.Option("--json", callback=check_output, help="Write the figures here.")]
PngFile = Annotated[Path | None, typer.Option("--png", callback=check_output, help="Write the picture here.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", callback=check_output, help="Write an HTML report here.")]
