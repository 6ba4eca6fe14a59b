"""Pictures of measurements as SVG images inside a page. Decides how a run looks, not what counts."""

import io
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from load_tests.bench_compare import Ratio
from load_tests.client import Objective, RequestResult, Run

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", RED, "#F0E442", "#000000")
_BINS = 40


def new_figure(height: float = 3.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure as wide as the page, with its axes from left to right."""
    figure = Figure(figsize=(10, height), layout="constrained", facecolor="white")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes


def image(figure: Figure, description: str) -> str:
    """An HTML image element that holds the picture itself; `description` is read out where it cannot be seen."""
    buffer = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return f'<img alt="{escape(description)}" src="data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}">'


def draw_over_time(run: Run) -> Figure:
    """Requests due and answered per second, requests in flight, and output tokens per second, over the run."""
    figure, (rates, flight, tokens) = new_figure(columns=3)
    width = max(run.seconds / _BINS, 1e-3)
    edges = [index * width for index in range(_BINS)]
    good = [result for result in run.results if result.error is None]
    due, done = (result.due_s for result in run.results), (result.due_s + result.e2e_s for result in good)
    rates.step(edges, _binned(((at, 1.0) for at in due), width), where="post", color=GREY, label="due")
    rates.step(edges, _binned(((at, 1.0) for at in done), width), where="post", color=GREEN, label="answered")
    rates.set_ylabel("requests per second")
    rates.legend(frameon=False, fontsize=8)
    flight.step(*_in_flight(run.results), where="post", color=BLUE, linewidth=1)
    flight.set_ylabel("requests in flight")
    arrived = (token for result in good for token in _token_times(result))
    tokens.step(edges, _binned(arrived, width), where="post", color=BLUE)
    tokens.set_ylabel("output tokens per second")
    for axes in (rates, flight, tokens):
        axes.set_ylim(bottom=0)
        axes.set_xlabel("seconds since the start")
    return figure


def draw_first_tokens(run: Run, objective: Objective) -> Figure:
    """Each request's time to first token at the time it was due; failures as crosses at the top."""
    figure, (axes,) = new_figure()
    answered = [result for result in run.results if result.ttft_s is not None]
    axes.set_yscale("log")
    axes.set_ylim(*_range([result.ttft_s or 0.0 for result in answered], objective.ttft_s))
    for colour, label, wanted in ((BLUE, "met the objective", True), (ORANGE, "missed it", False)):
        chosen = [result for result in answered if objective.met_by(result) is wanted]
        times = [1000 * (result.ttft_s or 0.0) for result in chosen]
        # Thousands of dots would make the page heavy as shapes.
        axes.plot([r.due_s for r in chosen], times, ".", color=colour, markersize=4, label=label, rasterized=True)
    axes.axhline(1000 * objective.ttft_s, color=RED, linewidth=1, label="objective")
    failed = [result.due_s for result in run.results if result.error is not None]
    if failed:
        axes.plot(failed, [0.97] * len(failed), "x", color=RED, transform=axes.get_xaxis_transform(), label="failed")
    axes.set_xlabel("seconds since the start, when due")
    axes.set_ylabel("time to first token, ms")
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_distributions(run: Run, objective: Objective) -> Figure:
    """What share of requests had at most so long to the first token, and per token; of gaps, between tokens."""
    figure, (first, between) = new_figure(columns=2)
    good = [result for result in run.results if result.error is None]
    ttft = [r.ttft_s for r in good if r.ttft_s is not None]
    gaps = [gap for r in good for gap in r.gaps_s]
    means = [r.tpot_s for r in good if r.tpot_s is not None]
    for axes, limit_s, curves in (
        (first, objective.ttft_s, ((ttft, BLUE, "time to first token"),)),
        (between, objective.tpot_s, ((gaps, BLUE, "between tokens (ITL)"), (means, GREEN, "a request's mean (TPOT)"))),
    ):
        axes.set_xscale("log")
        axes.set_xlim(*_range([value for values, _, _ in curves for value in values], limit_s))
        for values, colour, label in curves:
            _draw_shares(axes, values, colour, label)
        axes.axvline(1000 * limit_s, color=RED, linewidth=1, label="objective")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("ms")
        axes.set_ylabel("share at most so long")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def _range(seconds: Sequence[float], objective_s: float) -> tuple[float, float]:
    """Limits in milliseconds of a logarithmic axis for these and the objective; what came together is left of it."""
    shown = [1000 * value for value in (*seconds, objective_s)]
    return max(0.1, min(shown) / 1.5), max(0.2, 1.5 * max(shown))


def draw_rates(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Output tokens per second of each workload: a bar for the median, a dot for each run."""
    figure, (axes,) = new_figure()
    medians = [report["median"]["output_tok_s"] for report in results.values()]
    axes.bar_label(axes.bar(range(len(results)), medians, 0.6, color=BLUE), fmt="%.0f", fontsize=9, padding=4)
    for place, report in enumerate(results.values()):
        rates = [run["output_tok_s"] for run in report["runs"]]
        axes.plot([place] * len(rates), rates, "o", color="black", markersize=3)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_ylabel("output tokens per second")
    return figure


def draw_ratios(ratios: Sequence[Ratio]) -> Figure:
    """B over A: a dot for the medians, a bar from the lowest to the highest quotient; green and red are verdicts."""
    figure, (axes,) = new_figure(height=1 + 0.28 * len(ratios))
    colours = {"B better": GREEN, "A better": RED}
    for place, one in enumerate(reversed(ratios)):
        colour = colours.get(one.verdict, GREY)
        axes.plot([one.low, one.high], [place, place], color=colour, linewidth=2)
        axes.plot([one.ratio], [place], "o", color=colour)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(ratios)), [f"{one.workload}: {one.figure}" for one in reversed(ratios)], fontsize=8)
    axes.set_xlabel("B / A")
    return figure


def _draw_shares(axes: Axes, seconds: Sequence[float], colour: str, label: str) -> None:
    """The empirical distribution function."""
    values = sorted(seconds)
    shares = [(index + 1) / len(values) for index in range(len(values))]
    # Drawn as pixels: a run may have a hundred thousand gaps.
    axes.step(
        [1000 * v for v in values], shares, where="post", color=colour, label=label, rasterized=len(values) > 2000
    )


def _binned(events: Iterable[tuple[float, float]], width: float) -> list[float]:
    """Sum per second of (time, amount) in each bin."""
    sums = [0.0] * _BINS
    for at, amount in events:
        sums[min(_BINS - 1, max(0, int(at / width)))] += amount / width
    return sums


def _token_times(result: RequestResult) -> list[tuple[float, float]]:
    """When the answer's events came, each with its share of the tokens."""
    if result.ttft_s is None:
        return []
    at = result.due_s + result.ttft_s
    times = [at, *(at := at + gap for gap in result.gaps_s)]
    return [(moment, result.output_tokens / len(times)) for moment in times]


def _in_flight(results: Sequence[RequestResult]) -> tuple[list[float], list[int]]:
    """Times and how many requests were due and not ended from then on."""
    changes = sorted(change for r in results for change in ((r.due_s, 1), (r.due_s + r.e2e_s, -1)))
    times, counts, now = [0.0], [0], 0
    for at, change in changes:
        now += change
        times.append(at)
        counts.append(now)
    return times, counts
