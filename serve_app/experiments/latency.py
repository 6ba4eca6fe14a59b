"""Latency under load: time to first token and to the last token at Poisson arrivals, for each way
to batch.

Rates are relative to the throughput of packed continuous batching with requests always waiting, and
equal for all ways. If a way completes fewer requests than arrive, its queue grows until the end of
the run, and its curve shows only that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from serve_app.experiments.replay import Served, Way, capacity, replay
from serve_app.experiments.requests import poisson_arrivals
from serve_app.experiments.step_costs import StepCost

LOADS = (0.4, 0.6, 0.8, 1.1)
_CAP, _PROMPTS = 384, (8, 64)
TITLES = {
    Way.PADDED_STATIC: "padded static",
    Way.PACKED_STATIC: "packed static",
    Way.PADDED_CONTINUOUS: "padded continuous",
    Way.PACKED_CONTINUOUS: "packed continuous",
}
_MEASURES: dict[str, Callable[[Served], float]] = {
    "first_token_s": lambda request: request.first_token_s,
    "latency_s": lambda request: request.latency_s,
}


@dataclass(frozen=True, slots=True)
class Latencies:
    """Results of each request, by way and load. capacity: requests per second of packed continuous
    batching.
    """

    cost: StepCost
    capacity: float
    requests: dict[Way, dict[float, list[Served]]]


def run(cost: StepCost, requests: int, slots: int, loads: Sequence[float] = LOADS) -> Latencies:
    """Replay all ways at all loads."""
    full = capacity(poisson_arrivals(requests, 1.0, _CAP, _PROMPTS), cost, slots)
    arrivals = {load: poisson_arrivals(requests, load * full, _CAP, _PROMPTS) for load in loads}
    served = {way: {load: replay(way, arrivals[load], cost, slots).requests for load in loads} for way in Way}
    return Latencies(cost, full, served)


def report(result: Latencies) -> dict[str, Any]:
    """Return the figures as plain data; percentiles in seconds."""
    return {
        "step_cost": result.cost.report(),
        "capacity_requests_per_s": round(result.capacity, 4),
        **{
            way.value: {
                f"{load:g}": {name: _percentiles(map(value, served)) for name, value in _MEASURES.items()}
                for load, served in by_load.items()
            }
            for way, by_load in result.requests.items()
        },
    }


def _percentiles(values: Any) -> dict[str, float]:
    cuts = quantiles(values, n=100, method="inclusive")
    return {f"p{percent}": round(cuts[percent - 1], 5) for percent in (50, 90, 99)}


def show(console: Console, result: Latencies) -> None:
    """Print a table of medians and 99th percentiles."""
    figures = report(result)
    table = Table("load", "", "first token p50", "p99", "latency p50", "p99")
    for column in table.columns[2:]:
        column.justify = "right"
    for load in result.requests[Way.PADDED_STATIC]:
        for way in Way:
            row = figures[way][f"{load:g}"]
            cells = (f"{row[name][cut]:.2f} s" for name in _MEASURES for cut in ("p50", "p99"))
            table.add_row(f"{load:.0%}", TITLES[way], *cells)
        table.add_section()
    console.print(table)
    console.print(f"Load 100% is {result.capacity:.2f} requests per second; times are costs of the steps.")


def draw(path: Path, result: Latencies) -> None:
    """Write a PNG of cumulative distributions: one column per load, first tokens above whole
    answers.
    """
    from serve_app.experiments.pictures import grid, save
    from serve_app.observability.timeline import PALETTE

    loads = list(result.requests[Way.PADDED_STATIC])
    figure, rows = grid(2, len(loads), height=5.4)
    lines = ("-", "--", "-.", ":")
    for row, (name, label) in zip(rows, (("first_token_s", "first token"), ("latency_s", "whole answer")), strict=True):
        for panel, load in zip(row, loads, strict=True):
            for index, way in enumerate(reversed(Way)):
                values = sorted(map(_MEASURES[name], result.requests[way][load]))
                shares = [(position + 1) / len(values) for position in range(len(values))]
                panel.plot(values, shares, color=PALETTE[index], linestyle=lines[index], label=TITLES[way])
            panel.set_xscale("log")
            panel.set_xlabel(f"{label}, seconds", fontsize=9)
        row[0].set_ylabel("share of requests")
    for panel, load in zip(rows[0], loads, strict=True):
        panel.set_title(f"load {load:.0%}", loc="left", fontsize=10)
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save(figure, path)
