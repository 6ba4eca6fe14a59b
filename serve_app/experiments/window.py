"""Static batches that start when full, or when their first request has waited long enough.

Requests arrive with gaps of 0.2 to 0.9 s. A large batch takes long to fill; with a short wait it
starts nearly empty. Continuous batching has neither setting, because a request enters the next
step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from serve_app.experiments.replay import Replay, Way, replay
from serve_app.experiments.requests import exponential_lengths
from serve_app.experiments.step_costs import StepCost
from serve_app.workloads.arrivals import Arrival

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZES = (2, 4, 8)
WAITS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
GAPS_S = (0.2, 0.9)
_CAP, _PROMPT = 128, 16


@dataclass(frozen=True, slots=True)
class Windows:
    """Replays of the same arrivals: static batches by size and wait, and continuous batching."""

    cost: StepCost
    static: dict[int, dict[float, Replay]]
    continuous: Replay


def arrivals_of(count: int, seed: int = 0) -> list[Arrival]:
    """Return requests with gaps uniform in `GAPS_S`."""
    rng = Random(f"gaps-{seed}")
    at_s = 0.0
    arrivals = []
    for length in exponential_lengths(count, _CAP, seed):
        at_s += rng.uniform(*GAPS_S)
        arrivals.append(Arrival(at_s, _PROMPT, length))
    return arrivals


def run(cost: StepCost, requests: int, sizes: Sequence[int] = SIZES, waits_s: Sequence[float] = WAITS_S) -> Windows:
    """Replay all sizes and waits with padded static batches, and continuous batching with as many
    slots as the largest.
    """
    arrivals = arrivals_of(requests)
    static = {
        size: {wait_s: replay(Way.PADDED_STATIC, arrivals, cost, size, max_wait_s=wait_s) for wait_s in waits_s}
        for size in sizes
    }
    return Windows(cost, static, replay(Way.PACKED_CONTINUOUS, arrivals, cost, max(sizes)))


def fill(result: Replay, size: int) -> float:
    """Return the mean share of a batch's slots that are filled when it starts."""
    return fmean(step.admitted for step in result.steps if step.admitted) / size


def waited_s(result: Replay) -> float:
    """Return the mean time from a request's arrival to its first step."""
    return fmean(request.waited_s for request in result.requests)


def _latency_s(result: Replay) -> float:
    return fmean(request.latency_s for request in result.requests)


def report(result: Windows) -> dict[str, Any]:
    """Return the figures as plain data."""
    return {
        "step_cost": result.cost.report(),
        "static": {
            str(size): {
                f"{wait_s:g}": {
                    "fill": round(fill(one, size), 4),
                    "mean_waited_s": round(waited_s(one), 4),
                    "mean_latency_s": round(_latency_s(one), 4),
                }
                for wait_s, one in by_wait.items()
            }
            for size, by_wait in result.static.items()
        },
        "continuous": {
            "mean_waited_s": round(waited_s(result.continuous), 4),
            "mean_latency_s": round(_latency_s(result.continuous), 4),
        },
    }


def show(console: Console, result: Windows) -> None:
    """Print the figures as a table."""
    table = Table("max_batch_size", "max_wait_time", "fill of batches", "mean wait", "mean latency")
    for column in table.columns:
        column.justify = "right"
    for size, by_wait in result.static.items():
        for wait_s, one in by_wait.items():
            times = f"{waited_s(one):.3f} s", f"{_latency_s(one):.3f} s"
            table.add_row(str(size), f"{wait_s:g} s", f"{fill(one, size):.0%}", *times)
        table.add_section()
    one = result.continuous
    table.add_row("continuous", "", "", f"{waited_s(one):.3f} s", f"{_latency_s(one):.3f} s")
    console.print(table)
    console.print("Gaps between arrivals of 0.2 to 0.9 s; times of computing are costs of the steps.")


def draw(path: Path, result: Windows) -> None:
    """Write a PNG: fill of batches and waiting time over `max_wait_time`, one line per
    `max_batch_size`.
    """
    from serve_app.experiments.pictures import save, side_by_side

    figure, (fills, waits) = side_by_side(2)
    for index, (size, by_wait) in enumerate(result.static.items()):
        _draw_line(fills, index, size, {wait_s: fill(one, size) * 100 for wait_s, one in by_wait.items()})
        _draw_line(waits, index, size, {wait_s: waited_s(one) for wait_s, one in by_wait.items()})
    waits.axhline(waited_s(result.continuous), color="black", linestyle="--", label="continuous batching")
    fills.set_ylabel("slots filled when a batch starts, %")
    fills.set_ylim(0, 105)
    fills.set_title("A batch fills only if requests wait", loc="left", fontsize=10)
    waits.set_ylabel("mean wait before the first step, seconds")
    waits.set_title("and waiting costs latency", loc="left", fontsize=10)
    for panel in (fills, waits):
        panel.set_xlabel("max_wait_time, seconds")
    handles, labels = waits.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    save(figure, path)


def _draw_line(panel: "Axes", index: int, size: int, values: dict[float, float]) -> None:
    from serve_app.experiments.pictures import MARKERS
    from serve_app.observability.timeline import PALETTE

    label = f"max_batch_size {size}"
    panel.plot(list(values), list(values.values()), color=PALETTE[index], marker=MARKERS[index], label=label)
