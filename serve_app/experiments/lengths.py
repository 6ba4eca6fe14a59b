"""Measures the contribution of each idea of continuous batching when output lengths vary.

The same requests go through six lanes on the real model. Each lane differs from a neighbour by one
idea. All have the KV memory for `slots` requests of the maximum length. With a higher cap the
lengths vary more, and a static batch waits longer for its longest request.

    padded static      transformers' generate, batch by batch
    packed static      without padding                        (another order of the same ideas)
    padded continuous  iteration-level: batches are merged and filtered
    packed continuous  without padding
    paged              more slots in the same memory: a request holds only the blocks that it fills
    kernels            as paged, with the C kernels instead of torch if they run the model

An idea's contribution is the throughput of its lane divided by that of the previous lane. The
product of all contributions is the last lane over the first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from serve_app.experiments.compare import agreement
from serve_app.experiments.compare_runs import CompareJob, Measurement, Mode, OnTokens, measure_jobs
from serve_app.experiments.requests import make_job

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from serve_app.text.tokenizer import Tokenizer

PAGED_SLOTS = 4
"""Slots with paging, as a multiple of the slots that fit at the maximum length."""
REPEATS = 2
"""Runs with the largest cap; the picture shows their spread. Other caps run once."""


class Lane(StrEnum):
    """The ways to serve the requests. The values are keys of the JSON report."""

    PADDED_STATIC = "padded_static"
    PACKED_STATIC = "packed_static"
    PADDED_CONTINUOUS = "padded_continuous"
    PACKED_CONTINUOUS = "packed_continuous"
    PAGED = "paged"
    KERNELS = "kernels"


@dataclass(frozen=True, slots=True)
class _Setup:
    label: str
    mode: Mode
    attention_backend: str = "cpu"
    slots: int = 1


_SETUPS = {
    Lane.PADDED_STATIC: _Setup("padded static", Mode.PADDED),
    Lane.PACKED_STATIC: _Setup("packed static", Mode.STATIC),
    Lane.PADDED_CONTINUOUS: _Setup("padded continuous", Mode.PADDED_CONTINUOUS),
    Lane.PACKED_CONTINUOUS: _Setup("packed continuous", Mode.CONTINUOUS),
    Lane.PAGED: _Setup("with paging's slots", Mode.CONTINUOUS, slots=PAGED_SLOTS),
    Lane.KERNELS: _Setup("with kernels in C", Mode.CONTINUOUS, attention_backend="auto", slots=PAGED_SLOTS),
}
_CHAIN = (Lane.PADDED_STATIC, Lane.PADDED_CONTINUOUS, Lane.PACKED_CONTINUOUS, Lane.PAGED, Lane.KERNELS)
_IDEAS = {
    Lane.PADDED_CONTINUOUS: "iteration-level scheduling",
    Lane.PACKED_CONTINUOUS: "packing",
    Lane.PAGED: "paging's slots",
    Lane.KERNELS: "kernels in C",
}

Results = dict[Lane, dict[int, list[Measurement]]]
"""Runs by lane and cap."""
Runner = Callable[[Mode, Sequence[CompareJob], OnTokens], list[Measurement]]


def run(
    tokenizer: "Tokenizer",
    requests: int,
    caps: Sequence[int],
    slots: int,
    begin: Callable[[str, int], OnTokens] = lambda *_: lambda _: None,
    runner: Runner = measure_jobs,
    **fields: Any,
) -> Results:
    """Run all lanes with all caps, lane by lane. `fields`: fields of `CompareJob`.

    `begin` is called with each lane's name and number of output tokens; the function it returns is
    called after each step with the number of new tokens. Raises `ServeAppError` if the model cannot
    be loaded.
    """
    # Largest cap first: a process loads the model for its first job.
    order = sorted([*caps, *[max(caps)] * (REPEATS - 1)], reverse=True)
    jobs = [make_job(tokenizer, requests, cap, slots, **fields) for cap in order]
    results: Results = {}
    for lane, setup in _SETUPS.items():
        mine = [
            replace(job, slots=slots * setup.slots, attention_backend=setup.attention_backend, context=jobs[0].context)
            for job in jobs
        ]
        on_tokens = begin(setup.label, sum(job.output_tokens for job in mine))
        by_cap: dict[int, list[Measurement]] = {cap: [] for cap in sorted(caps)}
        for cap, measurement in zip(order, runner(setup.mode, mine, on_tokens), strict=True):
            by_cap[cap].append(measurement)
        results[lane] = by_cap
    return results


def _factors(results: Results, cap: int) -> Iterator[tuple[Lane, float, float, float]]:
    """Yield for each idea, in order: its lane, its contribution (of the means), and the minimum and
    maximum of single runs.
    """
    for before, after in pairwise(_CHAIN):
        low, high = ([run.tokens_per_s for run in results[lane][cap]] for lane in (before, after))
        yield after, mean(high) / mean(low), min(high) / max(low), max(high) / min(low)


def report(results: Results) -> dict[str, Any]:
    """Return the figures as plain data.

    agreement: the share of the last lane's output tokens before the first difference from this
    lane's output of the same request. packing_first: the contributions if packing comes before
    iteration-level scheduling.
    """
    last = max(results[Lane.KERNELS])
    reference = results[Lane.KERNELS][last][0].outputs
    rate = {lane: mean(run.tokens_per_s for run in by_cap[last]) for lane, by_cap in results.items()}
    return {
        "lanes": {
            lane.value: {
                "caps": {
                    str(cap): {
                        "tokens_per_s": [round(run.tokens_per_s, 2) for run in runs],
                        "output_tokens": sum(map(len, runs[0].outputs)),
                        "steps": runs[0].steps,
                        "computed_positions": runs[0].positions,
                    }
                    for cap, runs in by_cap.items()
                },
                "agreement": round(agreement(reference, by_cap[last][0].outputs), 4),
            }
            for lane, by_cap in results.items()
        },
        "contributions": {
            str(cap): {
                lane.value: {"factor": round(factor, 3), "least": round(least, 3), "greatest": round(greatest, 3)}
                for lane, factor, least, greatest in _factors(results, cap)
            }
            for cap in results[Lane.KERNELS]
        },
        "packing_first": {
            "packing": round(rate[Lane.PACKED_STATIC] / rate[Lane.PADDED_STATIC], 3),
            "iteration_level": round(rate[Lane.PACKED_CONTINUOUS] / rate[Lane.PACKED_STATIC], 3),
        },
        "all": round(rate[Lane.KERNELS] / rate[Lane.PADDED_STATIC], 3),
    }


def show(console: Console, results: Results) -> None:
    """Print throughput by lane and cap, and the contribution of each idea with the largest cap."""
    figures = report(results)
    caps = list(results[Lane.KERNELS])
    table = Table("tokens/s", *(f"cap {cap}" for cap in caps), "steps", "positions", "same tokens")
    for column in table.columns[1:]:
        column.justify = "right"
    for lane, by_cap in results.items():
        runs = by_cap[caps[-1]]
        rates = (f"{mean(run.tokens_per_s for run in by_cap[cap]):.1f}" for cap in caps)
        agrees = f"{figures['lanes'][lane]['agreement']:.1%}"
        table.add_row(_SETUPS[lane].label, *rates, str(runs[0].steps), str(runs[0].positions), agrees)
    console.print(table)
    factors = " x ".join(f"{factor:.2f} ({_IDEAS[lane]})" for lane, factor, _, _ in _factors(results, caps[-1]))
    console.print(f"Cap {caps[-1]}: {factors} = {figures['all']:.2f}")
    first = figures["packing_first"]
    console.print(
        f"In the other order: {first['packing']:.2f} (packing) x {first['iteration_level']:.2f} (iteration-level)."
    )


def draw(path: Path, results: Results) -> None:
    """Write a PNG: throughput over the cap, one line per lane, and the contributions with the
    largest cap.
    """
    from serve_app.experiments.pictures import save, side_by_side

    figure, (lines, bars) = side_by_side(2, height=4.2)
    _draw_lines(lines, results)
    _draw_bars(bars, results)
    save(figure, path)


def _draw_lines(panel: "Axes", results: Results) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    from serve_app.experiments.pictures import MARKERS
    from serve_app.observability.timeline import PALETTE

    figures = report(results)
    caps = list(results[Lane.KERNELS])
    for index, (lane, by_cap) in enumerate(results.items()):
        rates = [mean(run.tokens_per_s for run in by_cap[cap]) for cap in caps]
        differs = 1 - figures["lanes"][lane]["agreement"]
        label = _SETUPS[lane].label + (f" ({differs:.1%} of tokens differ)" if differs else "")
        panel.plot(caps, rates, color=PALETTE[index], marker=MARKERS[index], label=label)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(caps, [str(cap) for cap in caps])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.minorticks_off()
    panel.set_xlabel("cap of the output lengths, tokens")
    panel.set_ylabel("wanted output tokens per second")
    panel.set_title("The more lengths vary, the more a batch waits", loc="left", fontsize=10)
    panel.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.16), ncols=2)


def _draw_bars(panel: "Axes", results: Results) -> None:
    from serve_app.experiments.pictures import BLUE, ORANGE

    cap = max(results[Lane.KERNELS])
    factors = list(_factors(results, cap))
    total = report(results)["all"]
    for row, (lane, factor, least, greatest) in enumerate(factors):
        panel.barh(row, factor, color=ORANGE if lane is Lane.KERNELS else BLUE)
        panel.errorbar(factor, row, xerr=[[max(0.0, factor - least)], [max(0.0, greatest - factor)]], color="black")
        panel.text(greatest, row, f"  {factor:.2f}x", va="center", fontsize=9)
    panel.set_yticks(range(len(factors)), [_IDEAS[lane] for lane, *_ in factors])
    panel.invert_yaxis()
    panel.axvline(1.0, color="black", linewidth=1)
    panel.set_xlim(0, max(greatest for *_, greatest in factors) * 1.2)
    panel.set_xlabel(f"throughput over the idea before it, cap {cap}")
    panel.set_title(f"Their product: {total:.1f}x padded static batches", loc="left", fontsize=10)
