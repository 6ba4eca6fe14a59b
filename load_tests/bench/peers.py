"""Our server and its peers on the same requests in one run, each alone on the machine.

    python -m load_tests.bench.peers --repeats 3 --json FILE --png FILE
    python -m load_tests.bench.peers --contestants serve_app,llama_q4_0 --workloads decode,mixed:8

In every round each contestant is started, sent every workload, and stopped, so that drift of the
machine affects all equally. Figures are medians over the rounds. A peer that is far behind in the
first round is not measured again. A contestant that cannot run stays in the table, with the reason.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil  # type: ignore[import-untyped]
import typer
from rich.console import Console

from load_tests.bench.contestants import CONTESTANTS, OfflineCommand
from load_tests.bench.peer_setup import PeerFolder, set_up
from load_tests.bench.peers_report import Entry, draw, far_behind, figures, print_tables
from load_tests.servers import ServerCommand, running
from serve_app.cli.outputs import JsonFile, PngFile
from serve_app.workloads.machine import machine
from serve_app.workloads.mixes import build_workload, read_names
from serve_app.workloads.prompts import PromptWriter, open_writer
from serve_app.workloads.runs import measure, reach, through_http

# vLLM compiles its model for minutes when it starts for the first time.
_START_LIMIT_S = 600.0
# `generate` is not a server; it is for `make bench`.
RIVALS = ",".join(name for name in CONTESTANTS if name != "generate")
WORKLOADS = "decode,mixed,single,first_token,repetitive,prefill:16,shared_prefix,long,crowd,lognormal,agents,sampled"

console = Console(stderr=True)
Wanted = Mapping[str, int | None]


class _Round:
    """One round over all contestants."""

    def __init__(self, folder: PeerFolder, writer: PromptWriter, wanted: Wanted, repeat: int, wait_quiet: float):
        self._folder = folder
        self._writer = writer
        self._wanted = wanted
        self._repeat = repeat
        self._wait_quiet = wait_quiet

    def take(self, name: str, command: ServerCommand | OfflineCommand, entry: Entry) -> None:
        """Measure one contestant. If it fails, the entry keeps its results and the reason."""
        console.print(f"[bold]{name}[/bold], round {self._repeat + 1}")
        try:
            if isinstance(command, ServerCommand):
                self._server(command, self._folder.path / f"{name}.log", entry)
            else:
                self._offline(command, self._folder.path / f"{name}.log", entry)
        except (OSError, RuntimeError, ValueError, psutil.Error) as error:
            entry.reason = " ".join(str(error).split())[:300]
            console.print(f"[red]{name}: {entry.reason}")

    def _server(self, command: ServerCommand, log: Path, entry: Entry) -> None:
        with running(command, log, _START_LIMIT_S) as server:
            entry.ready_s.append(round(server.ready_s, 1))
            run = through_http(reach(command.client(), self._writer), self._writer)
            for name, count in self._wanted.items():
                workload = build_workload(name, self._writer, repeat=self._repeat, num_requests=count)
                special = self._writer.num_special
                entry.add(name, measure(run, workload, name, special, server.pid, self._wait_quiet))

    def _offline(self, command: OfflineCommand, log: Path, entry: Entry) -> None:
        workloads = ",".join(name if count is None else f"{name}:{count}" for name, count in self._wanted.items())
        with tempfile.NamedTemporaryFile(suffix=".json") as file, log.open("wb") as output:
            options = ["--workloads", workloads, "--repeat", str(self._repeat), "--json", file.name]
            options += ["--wait-quiet", str(self._wait_quiet)]
            environment = {**os.environ, **command.environment}
            done = subprocess.run(
                [*command.command, *options], env=environment, stdout=output, stderr=output, check=False
            )
            if done.returncode:
                raise RuntimeError(f"ended with status {done.returncode}; see {log}")
            for name, run in json.load(file).items():
                entry.add(name, run)


def main(
    folder: Annotated[Path, typer.Option("--peers", help="Folder of the peers; made by the first run.")] = Path(
        "build/peers"
    ),
    contestants: Annotated[str, typer.Option(help=f"Names, separated by commas: {', '.join(CONTESTANTS)}.")] = RIVALS,
    workloads: Annotated[str, typer.Option(help="Names, separated by commas; name:count for fewer.")] = WORKLOADS,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 3,
    config: Annotated[Path, typer.Option(help="The Serve config that ours start with.", exists=True)] = Path(
        "deploy/config.yaml"
    ),
    wait_quiet: Annotated[float, typer.Option(help="Before each run, wait so many seconds for a quiet machine.")] = 30,
    json_file: JsonFile = None,
    png: PngFile = None,
) -> None:
    """Measure our server and its peers.

    The exit status is 1 if one of ours or its requests failed.
    """
    names, wanted = contestants.split(","), _read(workloads)
    if unknown := set(names) - set(CONTESTANTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(CONTESTANTS)}")
    # So that a server which is running is stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    peers = PeerFolder(folder.absolute())
    peers.path.mkdir(parents=True, exist_ok=True)
    needed = dict.fromkeys(need for name in names for need in CONTESTANTS[name].needs)
    missing = set_up(peers, list(needed))
    writer = open_writer("default")
    entries = {name: Entry(CONTESTANTS[name]) for name in names}
    for name, entry in entries.items():
        entry.reason = next((missing[need] for need in CONTESTANTS[name].needs if need in missing), None)
    report: dict[str, Any] = {"machine": machine()}
    left_out: set[str] = set()
    for repeat in range(repeats):
        turn = _Round(peers, writer, wanted, repeat, wait_quiet)
        if repeat == 1:
            left_out = far_behind(entries, list(wanted))
            console.print(f"far behind in the first round, not measured again: {', '.join(sorted(left_out)) or 'none'}")
        for name, entry in entries.items():
            if entry.reason is None and name not in left_out:
                turn.take(name, CONTESTANTS[name].make(peers, config), entry)
            # after each, because an hour of measuring should survive an interruption
            if json_file is not None:
                json_file.write_text(json.dumps(report | figures(entries, list(wanted)), indent=1) + "\n")
    print_tables(Console(), entries, list(wanted))
    if png is not None:
        draw(png, entries, list(wanted))
    sys.exit(any(entry.contestant.ours and not entry.is_clean for entry in entries.values()))


def _read(workloads: str) -> dict[str, int | None]:
    try:
        return read_names(workloads)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--workloads") from None


if __name__ == "__main__":
    typer.run(main)
