"""The effect of scheduler settings under open-loop load, with fused and with separate prefill.

    python -m load_tests.bench.sweep --json sweep.json --html sweep.html --png sweep.png
    python -m load_tests.bench.sweep --quick --json sweep.json

`--quick` is a smoke test with few settings and one rate. Every setting gets a fresh server and the
same arrivals: the defaults, and the defaults with one knob changed. `sweep_report` draws the
results. The machine drifts, so the settings are shuffled, fused next to separate, and the defaults
are measured again at the end.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from load_tests.bench.sweep_report import KNOBS, draw_sweep, sweep_page
from load_tests.servers import ServerCommand, running
from serve_app.cli.outputs import HtmlFile, JsonFile, PngFile
from serve_app.workloads.arrivals import mixed_lengths, random_arrivals
from serve_app.workloads.client import Server, run_workload
from serve_app.workloads.figures import summarize
from serve_app.workloads.mixes import WorkItem, Workload, open_workload
from serve_app.workloads.prompts import PromptWriter, open_writer
from serve_app.workloads.report import circumstances
from serve_app.workloads.runs import reach, show_progress

PREFILLS = ("fused", "separate")
VALUES: dict[str, tuple[float, ...]] = {
    "waiting_served_ratio": (0.5, 2.0),
    "max_wait_s": (0.2, 5.0),
    "max_num_batched_tokens": (128, 1024),
    "max_num_seqs": (4, 16),
}
"""The values to try besides the defaults (0, 1 s, auto, auto)."""
_BESIDE: dict[str, Mapping[str, float]] = {"max_wait_s": {"waiting_served_ratio": 2.0, "max_waiting_steps": 100_000}}
"""Other settings that a knob needs to have an effect: the wait applies only with a ratio."""
_PORT = 8102
_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS = 256, 64
"""Shorter than `mixed`, so that a CPU sees enough requests in a minute."""
_CAPACITY_REQUESTS, _CAPACITY_CONCURRENCY = 48, 24
console = Console(stderr=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One server to measure: the defaults, with `knob` (if not empty) set to `value`."""

    prefill: str
    knob: str = ""
    value: float = 0.0

    @property
    def engine(self) -> dict[str, Any]:
        """The settings below `engine`."""
        turned = {self.knob: self.value} if self.knob else {}
        return {"prefill": self.prefill, **_BESIDE.get(self.knob, {}), **turned}

    def __str__(self) -> str:
        return f"{self.prefill}, {self.knob}={self.value:g}" if self.knob else f"{self.prefill}, defaults"


def settings_to_try(knobs: Sequence[str], quick: bool) -> list[Setting]:
    """Return the defaults, every value of every knob in shuffled order, and the defaults again.

    Each with both kinds of prefill.
    """
    turned = [(knob, value) for knob in knobs for value in VALUES[knob][-1 if quick else 0 :]]
    Random(0).shuffle(turned)
    order = [("", 0.0), *turned] + ([] if quick else [("", 0.0)])
    return [Setting(prefill, knob, value) for knob, value in order for prefill in PREFILLS]


def server_of(setting: Setting, config: Path, folder: Path, port: int) -> ServerCommand:
    """Return the command that serves `config` with this setting on `port`.

    Its config is written to `folder`.
    """
    document = yaml.safe_load(config.read_text())
    document["http_options"]["port"] = port
    arguments = document["applications"][0]["args"]
    arguments["engine"] = {**arguments.get("engine", {}), **setting.engine}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document))
    command = (str(Path(sys.executable).with_name("serve-app")), "serve", str(path))
    return ServerCommand(str(setting), command, f"http://127.0.0.1:{port}", "/health/ready")


def arrivals_at(rate: float, seconds: float, writer: PromptWriter, seed: int) -> Workload:
    """Return the arrivals at this rate: the same for every setting, with the same lengths at every
    rate."""
    arrivals = random_arrivals(Random(f"sweep-{seed}"), rate, seconds)
    clipped = (arrival.clipped(_MAX_PROMPT_TOKENS, _MAX_OUTPUT_TOKENS) for arrival in arrivals)
    return open_workload(f"{rate:.2f}/s", writer, clipped, Random(f"sweep-text-{rate}-{seed}"))


def measure_capacity(server: Server, writer: PromptWriter) -> float:
    """Return the requests per second that the server completes with 24 in flight.

    Rates are shares of it.
    """
    rng = Random("capacity")
    items = []
    for _ in range(_CAPACITY_REQUESTS):
        prompt_tokens, output_tokens = mixed_lengths(rng)
        prompt_tokens = min(prompt_tokens, _MAX_PROMPT_TOKENS)
        items.append(WorkItem(writer.write(rng, prompt_tokens), prompt_tokens, min(output_tokens, _MAX_OUTPUT_TOKENS)))
    workload = Workload("capacity", tuple(items), _CAPACITY_CONCURRENCY)
    with show_progress(workload, "capacity") as on_done:
        run = asyncio.run(run_workload(server, workload, writer, on_done))
    return float(summarize(run)["requests_per_s"])


def measure(
    settings: Sequence[Setting],
    config: Path,
    folder: Path,
    writer: PromptWriter,
    *,
    rates: Sequence[float],
    shares: Sequence[float],
    seconds: float,
    on_points: Callable[[list[dict[str, Any]]], None],
    port: int = _PORT,
) -> list[dict[str, Any]]:
    """Return one point per setting and rate. `on_points` gets all of them after every setting.

    Without `rates`, the rates are `shares` of the first server's capacity. Logs go to `folder`.
    """
    points: list[dict[str, Any]] = []
    for number, setting in enumerate(settings):
        console.print(f"[bold]{number + 1}/{len(settings)} {setting}")
        command = server_of(setting, config, folder, port)
        try:
            with running(command, folder / f"server-{number + 1}.log"):
                server = reach(command.client(), writer)
                if not rates:
                    capacity = measure_capacity(server, writer)
                    rates = [round(share * capacity, 2) for share in shares]
                    console.print(f"capacity about {capacity:.2f} requests per second; rates {rates}")
                for rate in rates:
                    workload = arrivals_at(rate, seconds, writer, seed=0)
                    with show_progress(workload, f"{setting.prefill} {workload.name}") as on_done:
                        run = asyncio.run(run_workload(server, workload, writer, on_done))
                    points.append({**asdict(setting), "rate": rate, "summary": summarize(run, writer.num_special)})
        except RuntimeError as error:
            # A server that does not start costs only its own points.
            console.print(f"[red]{setting} is left out: {error}")
        on_points(points)
    return points


def main(
    config: Annotated[Path, typer.Option(help="The Serve config whose engine settings are varied.")] = Path(
        "deploy/config.yaml"
    ),
    knobs: Annotated[str, typer.Option(help="Names, separated by commas.")] = ",".join(KNOBS),
    rates: Annotated[str, typer.Option(help="Requests per second, separated by commas; default: see --shares.")] = "",
    shares: Annotated[str, typer.Option(help="Rates as shares of the measured capacity.")] = "0.5,0.8,1.1",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of arrivals at each rate.")] = 30.0,
    tokenizer: Annotated[str, typer.Option(help="The config's model or its tokenizer.")] = "default",
    quick: Annotated[bool, typer.Option(help="The highest value of each knob, 0.8 of capacity, 8 s.")] = False,
    folder: Annotated[Path, typer.Option(help="Folder for the servers' logs.")] = Path("build/sweep"),
    json_file: JsonFile = None,
    html: HtmlFile = None,
    png: PngFile = None,
) -> None:
    """Measure scheduler settings under open-loop load."""
    names = knobs.split(",")
    for name in names:
        if name not in VALUES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(VALUES)}", param_hint="--knobs")
    if quick:
        shares, seconds = "0.8", 8.0
    folder.mkdir(parents=True, exist_ok=True)
    facts = circumstances(config=str(config), seconds_per_rate=seconds)

    def save(points: list[dict[str, Any]]) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps({"circumstances": facts, "points": points}, indent=1) + "\n")
        if html is not None:
            html.write_text(sweep_page(facts, points), encoding="utf-8")

    points = measure(
        settings_to_try(names, quick),
        config,
        folder,
        open_writer(tokenizer),
        rates=[float(rate) for rate in rates.split(",") if rate],
        shares=[float(share) for share in shares.split(",")],
        seconds=seconds,
        on_points=save,
    )
    if png is not None:
        draw_sweep(points).savefig(png, format="png", dpi=110)


if __name__ == "__main__":
    typer.run(main)
