"""Pictures of one open-loop run."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from serve_app.workloads.client import RequestResult, Run
from serve_app.workloads.figures import Objective
from serve_app.workloads.plots import BLUE, GREEN, GREY, ORANGE, RED, new_figure

_BINS = 40


def draw_over_time(run: Run) -> Figure:
    """Draw requests due and answered per second, requests in flight, and output tokens per
    second."""
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
    """Draw each request's TTFT at its due time, and failures as crosses at the top."""
    figure, (axes,) = new_figure()
    answered = [result for result in run.results if result.ttft_s is not None]
    axes.set_yscale("log")
    axes.set_ylim(*_range([result.ttft_s or 0.0 for result in answered], objective.ttft_s))
    for colour, label, wanted in ((BLUE, "met the objective", True), (ORANGE, "missed it", False)):
        chosen = [result for result in answered if objective.met_by(result) is wanted]
        times = [1000 * (result.ttft_s or 0.0) for result in chosen]
        # As vector shapes, thousands of dots would make the page heavy.
        axes.plot([r.due_s for r in chosen], times, ".", color=colour, markersize=4, label=label, rasterized=True)
    axes.axhline(1000 * objective.ttft_s, color=RED, linewidth=1, label="objective")
    failed = [result.due_s for result in run.results if result.error is not None]
    if failed:
        axes.plot(failed, [0.97] * len(failed), "x", color=RED, transform=axes.get_xaxis_transform(), label="failed")
    axes.set_xlabel("due, seconds since the start")
    axes.set_ylabel("time to first token, ms")
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_distributions(run: Run, objective: Objective) -> Figure:
    """Draw cumulative distributions of TTFT, of the time per token, and of the gaps
    between tokens."""
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
        axes.set_ylabel("cumulative share")
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def _range(seconds: Sequence[float], objective_s: float) -> tuple[float, float]:
    """Return the limits in milliseconds of a logarithmic axis for the values and the objective.

    Gaps near 0 are left of it.
    """
    shown = [1000 * value for value in (*seconds, objective_s)]
    return max(0.1, min(shown) / 1.5), max(0.2, 1.5 * max(shown))


def _draw_shares(axes: Axes, seconds: Sequence[float], colour: str, label: str) -> None:
    """Draw the empirical distribution function."""
    values = sorted(seconds)
    shares = [(index + 1) / len(values) for index in range(len(values))]
    # Rasterized: a run may have a hundred thousand gaps.
    axes.step(
        [1000 * v for v in values], shares, where="post", color=colour, label=label, rasterized=len(values) > 2000
    )


def _binned(events: Iterable[tuple[float, float]], width: float) -> list[float]:
    """Return the sum per second of (time, amount) in each bin."""
    sums = [0.0] * _BINS
    for at, amount in events:
        sums[min(_BINS - 1, max(0, int(at / width)))] += amount / width
    return sums


def _token_times(result: RequestResult) -> list[tuple[float, float]]:
    """Return the times of the answer's events, each with its share of the tokens."""
    if result.ttft_s is None:
        return []
    at = result.due_s + result.ttft_s
    times = [at, *(at := at + gap for gap in result.gaps_s)]
    return [(moment, result.output_tokens / len(times)) for moment in times]


def _in_flight(results: Sequence[RequestResult]) -> tuple[list[float], list[int]]:
    """Return times, and the number of requests in flight (due and not ended) from each time on."""
    changes = sorted(change for r in results for change in ((r.due_s, 1), (r.due_s + r.e2e_s, -1)))
    times, counts, now = [0.0], [0], 0
    for at, change in changes:
        now += change
        times.append(at)
        counts.append(now)
    return times, counts
