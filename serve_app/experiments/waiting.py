"""Sweeps the waiting-served ratio with fused prefill (in the packed step) and separate prefill (in
its own steps).

With a ratio, new requests wait until there are enough of them relative to the running ones.
Separate prefill pauses running streams, so fewer and larger groups pause them less often. Fused
prefill has no pauses to avoid.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from serve_app.experiments.replay import Replay, Way, capacity, replay
from serve_app.experiments.requests import poisson_arrivals
from serve_app.experiments.step_costs import StepCost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATIOS = (0.0, 0.25, 0.5, 1.0, 2.0)
PREFILLS = ("fused", "separate")
LOAD = 0.8
"""Arrival rate, as a share of the throughput of fused prefill without a gate and with requests
always waiting.
"""
_CAP, _PROMPTS = 384, (16, 256)
_STEP_TOKENS = 256
_SHOWN_STEPS = 120
# Only the ratio decides: no request is admitted for having waited long.
_GATE = {"max_wait_s": 1e9, "max_waiting_steps": 10**9, "max_num_batched_tokens": _STEP_TOKENS}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Replays of the same arrivals, by prefill and ratio. rate: requests per second."""

    cost: StepCost
    slots: int
    rate: float
    replays: dict[str, dict[float, Replay]]


def run(cost: StepCost, requests: int, slots: int, ratios: Sequence[float] = RATIOS) -> Sweep:
    """Replay all ratios with both kinds of prefill."""
    full = capacity(poisson_arrivals(requests, 1.0, _CAP, _PROMPTS), cost, slots, max_num_batched_tokens=_STEP_TOKENS)
    arrivals = poisson_arrivals(requests, LOAD * full, _CAP, _PROMPTS)
    replays = {
        prefill: {
            ratio: replay(
                Way.PACKED_CONTINUOUS, arrivals, cost, slots, prefill=prefill, waiting_served_ratio=ratio, **_GATE
            )
            for ratio in ratios
        }
        for prefill in PREFILLS
    }
    return Sweep(cost, slots, LOAD * full, replays)


def figures_of(result: Replay) -> dict[str, float]:
    """Return time to first token and gaps in seconds, throughput while computing, and the size of
    admitted groups.
    """
    gaps = list(chain.from_iterable(request.gaps_s for request in result.requests))
    groups = [step.admitted for step in result.steps if step.admitted]
    return {
        "first_token_p50_s": median(request.first_token_s for request in result.requests),
        "gap_p50_s": median(gaps),
        "gap_p99_s": quantiles(gaps, n=100)[98],
        "tokens_per_busy_s": result.output_tokens / result.busy_s,
        "newcomers_per_admission": fmean(groups),
        "steps": len(result.steps),
        "pauses_per_stream": _pauses(result) / len(result.requests),
    }


def _pauses(result: Replay) -> int:
    """Return how often a stream waited for its next token during one or several consecutive steps
    with only prompts.
    """
    ends = [step.end_s for step in result.steps if step.only_prompts]
    return sum(
        bisect_right(ends, after) - bisect_right(ends, before) > 0
        for request in result.requests
        for before, after in pairwise(request.token_s)
    )


def report(sweep: Sweep) -> dict[str, Any]:
    """Return the figures as plain data."""
    return {
        "step_cost": sweep.cost.report(),
        "requests_per_s": round(sweep.rate, 4),
        **{
            prefill: {
                f"{ratio:g}": {name: round(value, 5) for name, value in figures_of(result).items()}
                for ratio, result in by_ratio.items()
            }
            for prefill, by_ratio in sweep.replays.items()
        },
    }


def show(console: Console, sweep: Sweep) -> None:
    """Print the figures as a table."""
    table = Table("prefill", "ratio", "first token p50", "gap p99", "tokens per busy s", "newcomers at once")
    for column in table.columns[1:]:
        column.justify = "right"
    for prefill, by_ratio in sweep.replays.items():
        for ratio, result in by_ratio.items():
            figures = figures_of(result)
            table.add_row(
                prefill,
                f"{ratio:g}",
                f"{figures['first_token_p50_s'] * 1e3:.0f} ms",
                f"{figures['gap_p99_s'] * 1e3:.0f} ms",
                f"{figures['tokens_per_busy_s']:.0f}",
                f"{figures['newcomers_per_admission']:.1f}",
            )
    console.print(table)
    console.print(f"{sweep.rate:.2f} requests per second, {LOAD:.0%} of capacity; times are costs of the steps.")


def draw(path: Path, sweep: Sweep) -> None:
    """Write a PNG: first token, pauses, gaps and throughput over the ratio; below them, streams and
    their pauses.
    """
    from serve_app.experiments.pictures import mosaic, save

    figure, panels = mosaic("ABCD\nEEEE\nFFFF\nGGGG", height=7.6)
    for name, key, label, scale in (
        ("A", "first_token_p50_s", "first token, median (ms)", 1e3),
        ("B", "pauses_per_stream", "pauses of a stream", 1.0),
        ("C", "gap_p99_s", "token to token, p99 (ms)", 1e3),
        ("D", "tokens_per_busy_s", "tokens / s of computing", 1.0),
    ):
        _draw_curve(panels[name], sweep, key, scale)
        panels[name].set_title(label, loc="left", fontsize=9)
        panels[name].set_xlabel("waiting-served ratio", fontsize=9)
    handles, labels = panels["A"].get_legend_handles_labels()
    ratios = list(sweep.replays["fused"])
    shown = [("E", "fused", ratios[0]), ("F", "separate", ratios[0]), ("G", "separate", ratios[-1])]
    first = sweep.replays["fused"][ratios[0]]
    begin_s = first.requests[len(first.requests) // 2].arrival.at_s
    window = begin_s, begin_s + _SHOWN_STEPS * first.busy_s / len(first.steps)
    for name, prefill, ratio in shown:
        _draw_streams(panels[name], sweep.replays[prefill][ratio], window)
        panels[name].set_title(f"{prefill} prefill, ratio {ratio:g}", loc="left", fontsize=10)
        panels[name].set_ylim(-0.7, sweep.slots - 0.3)
    panels["G"].set_xlabel("seconds (costs of the steps)")
    for name, _, _ in shown[1:]:
        more = panels[name].get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    save(figure, path)


def _draw_curve(panel: "Axes", sweep: Sweep, key: str, scale: float) -> None:
    from serve_app.experiments.pictures import BLUE, ORANGE

    greatest = 0.0
    for (prefill, by_ratio), colour, marker, line in zip(
        sweep.replays.items(), (BLUE, ORANGE), "os", ("-", "--"), strict=True
    ):
        values = [figures_of(result)[key] * scale for result in by_ratio.values()]
        panel.plot(list(by_ratio), values, color=colour, marker=marker, linestyle=line, label=f"{prefill} prefill")
        greatest = max(greatest, *values)
    panel.set_ylim(0, greatest * 1.15)


def _draw_streams(panel: "Axes", result: Replay, window: tuple[float, float]) -> None:
    """Draw a dot per token, in the row of its slot, and a band per step that has only prompts."""
    from serve_app.experiments.pictures import BLUE, RED, SKY

    begin_s, end_s = window
    tokens = [(moment, one.slot) for one in result.requests for moment in one.token_s if begin_s <= moment <= end_s]
    firsts = [(one.token_s[0], one.slot) for one in result.requests if begin_s <= one.token_s[0] <= end_s]
    for points, marker, size, colour, label in (
        (tokens, ".", 3, BLUE, "token of a stream"),
        (firsts, "D", 4, RED, "its first token"),
    ):
        if points:
            panel.plot(*zip(*points, strict=True), marker, color=colour, markersize=size, label=label)
    pauses = [step for step in result.steps if step.only_prompts and step.end_s > begin_s and step.begin_s < end_s]
    spans = [(step.begin_s, step.end_s - step.begin_s) for step in pauses]
    if spans:
        panel.broken_barh(spans, (-1, 1000), color=SKY, alpha=0.5, linewidth=0, label="step that reads prompts only")
    panel.set_xlim(begin_s, end_s)
    panel.set_ylabel("slot")
