"""The table and the JSON of a chaos run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from load_tests.chaos.experiment import Row

_COLUMNS = (
    "fault", "path", "moment", "requests", "complete", "typed errors", "cut", "lost", "doubled", "stall s",
    "recovery s", "whole s", "",
)  # fmt: skip
_SHOWN_PROBLEMS = 4


def cells(row: Row) -> list[str]:
    """Return one line of the table."""
    times = ["-" if seconds is None else f"{seconds:.1f}" for seconds in (row.stall_s, row.recovery_s, row.whole_s)]
    counts = map(str, (row.requests, row.complete, row.errors, row.cut, row.lost_tokens, row.doubled_tokens))
    return [row.fault, row.path, row.moment, *counts, *times, "FAILED" if row.problems else "ok"]


def show(rows: Sequence[Row]) -> None:
    """Print the table and the problems."""
    console = Console(width=170, highlight=False)
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for row in rows:
        show_problems(row, console)


def show_problems(row: Row, console: Console | None = None) -> None:
    """Print the first few problems of an experiment, and its notes."""
    console = console or Console(width=170, highlight=False)
    name = f"{row.fault}, {row.path} path, {row.moment} point"
    for problem in row.problems[:_SHOWN_PROBLEMS]:
        console.print(f"{name}: {problem}", markup=False)
    if len(row.problems) > _SHOWN_PROBLEMS:
        console.print(f"{name}: and {len(row.problems) - _SHOWN_PROBLEMS} more", markup=False)


def write_json(rows: Sequence[Row], path: Path, seed: int) -> None:
    """Write all rows with their problems and notes."""
    data = {"seed": seed, "failed": sum(bool(row.problems) for row in rows), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=2) + "\n")
