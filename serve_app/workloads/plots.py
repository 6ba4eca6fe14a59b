"""Plots of measurements as inline SVG images. Decides their look only."""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from serve_app.workloads.ratios import Ratio

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", RED, "#F0E442", "#000000")


def new_figure(height: float = 3.0, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an empty figure as wide as the page, with its axes from left to right."""
    figure = Figure(figsize=(10, height), layout="constrained", facecolor="white")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes


def image(figure: Figure, description: str) -> str:
    """Return an HTML image element that contains the image.

    `description`: the text alternative for readers who cannot see it.
    """
    buffer = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return f'<img alt="{escape(description)}" src="data:image/svg+xml;base64,{b64encode(buffer.getvalue()).decode()}">'


def draw_rates(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot output tokens per second of each workload: a bar for the median, a dot for each run."""
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
    """Plot B over A: a dot for the medians, a bar for the range of quotients.

    Colours show the verdict: green if B is better, red if A is better.
    """
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
