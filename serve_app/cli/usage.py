"""`serve-app usage`: sums over a ledger's folder, by key, model and day."""

import json
from collections import defaultdict
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from serve_app.errors import ConfigError
from serve_app.tenants.ledger import read_ledger
from serve_app.tenants.totals import Totals

_FORMATS = ["%Y-%m-%d"]
_DIMENSIONS = ("day", "key", "model", "revision", "endpoint", "outcome")


def usage(
    folder: Annotated[Path, typer.Argument(help="The server's `ingress.ledger_folder`.", exists=True, file_okay=False)],
    since: Annotated[datetime | None, typer.Option(formats=_FORMATS, help="First day (UTC); default: today.")] = None,
    until: Annotated[datetime | None, typer.Option(formats=_FORMATS, help="Last day (UTC); default: today.")] = None,
    by: Annotated[str, typer.Option(help=f"Dimensions of the sums: {', '.join(_DIMENSIONS)}.")] = "key",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Sum up the usage ledger. Requests without a key have an empty name; the launcher's own name
    is `(internal)`."""
    names = by.split(",")
    for name in names:
        if name not in _DIMENSIONS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(_DIMENSIONS)}", param_hint="--by")
    today = datetime.now(UTC)
    rows: dict[tuple[str, ...], Totals] = defaultdict(Totals)
    try:
        for day, entry in read_ledger(folder, (since or today).date(), (until or today).date()):
            rows[tuple(str(day if name == "day" else entry.get(name, "")) for name in names)].add(entry)
    except ConfigError as error:
        typer.echo(f"serve-app: {error}", err=True)
        raise typer.Exit(1) from None
    found = [dict(zip(names, group, strict=True)) | asdict(rows[group]) for group in sorted(rows)]
    if as_json:
        for row in found:
            typer.echo(json.dumps(row))
        return
    Console().print(_table([*names, *asdict(Totals())], found))


def _table(titles: list[str], rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for title in titles:
        table.add_column(title, justify="right" if title in asdict(Totals()) else "left")
    for row in rows:
        table.add_row(*(f"{row[title]:,}" if isinstance(row[title], int) else row[title] for title in titles))
    return table
