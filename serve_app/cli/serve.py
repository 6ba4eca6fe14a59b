"""`serve-app serve`: start the server. The work is the launcher's."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    config: Annotated[Path, typer.Argument(help="A Serve config file.", exists=True, dir_okay=False)] = Path(
        "deploy/config.yaml"
    ),
) -> None:
    """Run a server in the foreground: Ray's fast path, everything on loopback, one line when it is
    ready."""
    from serve_app.launch.launcher import launch

    raise typer.Exit(launch(config))
