"""`serve-app timeline`: the recent steps of a running server, in the terminal or as files.

This module draws in the terminal. The engines record the steps, and the server draws the files.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import typer
from rich.console import Console

from serve_app.cli.outputs import JsonFile, check_output
from serve_app.core.step_record import StepRecord
from serve_app.environment import client_api_key
from serve_app.errors import ServeAppError
from serve_app.observability.step_ring import Recording, ended_at
from serve_app.observability.timeline import PALETTE, Timeline, draw_terminal, timeline_of
from serve_app.system.http_client import HttpStatusError, fetch

_TIMEOUT_S = 30.0

HtmlFile = Annotated[Path | None, typer.Option("--html", callback=check_output, help="Write a page with the picture.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", callback=check_output, help="Write a trace for https://ui.perfetto.dev.")
]


def timeline(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    seconds: Annotated[float, typer.Option(min=0.001, max=86_400, help="How far to look back.")] = 60.0,
    replica: Annotated[str | None, typer.Option(help="Only this replica.")] = None,
    html: HtmlFile = None,
    trace: TraceFile = None,
    json_file: JsonFile = None,
) -> None:
    """Show the slots of a running server over steps: prefill and decode of each request.

    If the server has keys, set SERVE_APP_API_KEY to an admin key.
    """
    console = Console()
    query = {"seconds": f"{seconds:g}"} | ({} if replica is None else {"replica": replica})
    try:
        data = _get(url, query | {"format": "json"})
        for path, kind in ((html, "html"), (trace, "trace")):
            if path is not None:
                path.write_bytes(_get(url, query | {"format": kind}))
    except ServeAppError as error:
        console.print(f"[red]{error}", soft_wrap=True)
        raise typer.Exit(1) from error
    recordings = [Recording.from_json(recording) for recording in json.loads(data)["replicas"]]
    for recording in recordings:
        show(console, recording)
    if json_file is not None:
        json_file.write_bytes(data)


def show(console: Console, recording: Recording) -> None:
    """Print one replica: a summary in numbers, then a line per slot."""
    records = recording.records
    console.print(f"\n[bold]replica {recording.replica}[/bold]: {_summary(records)}")
    if not records:
        return
    picture = _timeline(recording)
    scale = picture.num_steps / max(20, min(console.width, 140) - 10)
    console.print(
        f"[dim]{scale:.1f} steps per character   ▒ prefill   ▇ decode   ▃ decode in less than half of these steps   "
        "· idle   [underline]underlined[/underline]: has a grammar[/dim]"
    )
    console.print(draw_terminal(picture, _groups(records), scale), end="")


def _summary(records: Sequence[StepRecord]) -> str:
    if not records:
        return "idle"
    busy = sum(ended_at(record) - record.started_at for record in records)
    elapsed = ended_at(records[-1]) - records[0].started_at
    prefill, decode = (sum(getattr(r, f"num_{kind}_tokens") for r in records) for kind in ("prefill", "decode"))
    admitted, preempted = (sum(len(getattr(r, kind)) for r in records) for kind in ("admitted", "preempted"))
    return (
        f"{len(records)} steps in {elapsed:.1f} s, busy {busy / elapsed:.0%}; {prefill} prefill and {decode} decode "
        f"tokens; {admitted} admitted, {preempted} preempted; gate closed in "
        f"{sum(not record.gate_open for record in records)} steps"
    )


def _timeline(recording: Recording) -> Timeline:
    return timeline_of(f"replica {recording.replica}", recording.records, recording.num_slots)


def _groups(records: Sequence[StepRecord]) -> dict[str, int]:
    """Return the colour number of each request, in order of first appearance."""
    names = dict.fromkeys(row.request_id for record in records for row in record.rows)
    return {name: index % len(PALETTE) for index, name in enumerate(names)}


def _get(url: str, query: dict[str, str]) -> bytes:
    """Return the answer of `/debug/timeline`.

    Raises `ServeAppError` with the server's or the system's message.
    """
    address = f"{url.rstrip('/')}/debug/timeline?{urlencode(query)}"
    try:
        return fetch(address, timeout_s=_TIMEOUT_S, api_key=client_api_key())
    except HttpStatusError as error:
        raise ServeAppError(_refusal(error)) from None
    except (OSError, ValueError) as error:
        raise ServeAppError(f"no answer from {url}: {getattr(error, 'reason', error)}") from None


def _refusal(error: HttpStatusError) -> str:
    try:
        body: Any = json.loads(error.body)
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)
