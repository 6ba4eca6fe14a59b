"""Pictures and tables of a sweep: throughput against latency, one line per value of a knob."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from serve_app.workloads.figures import percentile
from serve_app.workloads.plots import COLOURS, image
from serve_app.workloads.report import page, table

KNOBS = {
    "waiting_served_ratio": "waiting_served_ratio (default 0)",
    "max_wait_s": "max_wait_s with waiting_served_ratio 2 (default: ratio 0, which never waits)",
    "max_num_batched_tokens": "max_num_batched_tokens (default: auto)",
    "max_num_seqs": "max_num_seqs (default: auto)",
}
"""The knobs and the titles of their pictures."""
_AXES = (("ttft_ms", "p50", "TTFT p50, ms"), ("ttft_ms", "p90", "TTFT p90, ms"), ("itl_ms", "p99", "ITL p99, ms"))
_LINES = {"fused": ("-", "o"), "separate": ("--", "s")}
Point = Mapping[str, Any]


def draw_sweep(points: Sequence[Point]) -> Figure:
    """Draw a row for each knob and a column for each latency; x is the throughput.

    Solid: fused; dashed: separate.
    """
    knobs = [knob for knob in KNOBS if any(point["knob"] == knob for point in points)]
    figure = Figure(figsize=(11, 3.2 * max(1, len(knobs))), layout="constrained", facecolor="white")
    rows = figure.subplots(max(1, len(knobs)), len(_AXES), squeeze=False)
    for row, knob in zip(rows, knobs, strict=False):
        for axes, (kind, percent, label) in zip(row, _AXES, strict=True):
            _draw_knob(axes, points, knob, kind, percent)
            axes.set_xlabel("output tokens per second")
            axes.set_ylabel(label)
        row[0].legend(frameon=False, fontsize=7)
        row[0].set_title(KNOBS[knob], loc="left", fontsize=10)
    return figure


def _draw_knob(axes: Axes, points: Sequence[Point], knob: str, kind: str, percent: str) -> None:
    axes.set_yscale("log")
    values = sorted({point["value"] for point in points if point["knob"] == knob})
    curves = [("", 0.0, "default"), *((knob, value, f"{value:g}") for value in values)]
    for colour, (name, value, label) in zip(COLOURS, curves, strict=False):
        for prefill, (line, marker) in _LINES.items():
            curve = medians(points, prefill, name, value)
            latencies = [(summary["output_tok_s"], summary[kind][percent]) for _, summary in curve]
            axes.plot(
                *zip(*latencies, strict=True) if latencies else ((), ()),
                linestyle=line,
                marker=marker,
                markersize=4,
                color=colour,
                label=f"{label}, {prefill}",
            )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def medians(points: Sequence[Point], prefill: str, knob: str, value: float) -> list[tuple[float, dict[str, Any]]]:
    """Return (rate, figures) of one setting by rate, with medians of repeated measurements."""
    chosen = [p for p in points if (p["prefill"], p["knob"], p["value"]) == (prefill, knob, value)]
    curve = []
    for rate in sorted({point["rate"] for point in chosen}):
        runs = [point["summary"] for point in chosen if point["rate"] == rate]
        figures: dict[str, Any] = {
            kind: {p: percentile([run[kind][p] or 0.0 for run in runs], 50) for p in ("p50", "p90", "p99")}
            for kind in ("ttft_ms", "itl_ms")
        }
        figures |= {key: percentile([run[key] for run in runs], 50) for key in ("output_tok_s", "goodput", "failures")}
        curve.append((rate, figures))
    return curve


def sweep_page(facts: Mapping[str, Any], points: Sequence[Point]) -> str:
    """Return the report: pictures, every setting at every rate with the defaults, and the machine's
    drift."""
    parts = ["<h1>Scheduler settings under open-loop load</h1>"]
    parts.append("<p>Same arrivals for every setting. Solid lines: fused prefill; dashed: separate.</p>")
    parts.append(image(draw_sweep(points), "Latency against throughput for each value of each knob"))
    header = ["setting", "rate", "output tok/s", "TTFT p50 ms", "p90", "ITL p50 ms", "p99", "goodput", "failed"]
    rows = []
    for prefill, knob, value in sorted({(p["prefill"], p["knob"], p["value"]) for p in points}):
        for rate, run in medians(points, prefill, knob, value):
            name = f"{prefill}, {knob}={value:g}" if knob else f"{prefill}, defaults"
            latencies = (run["ttft_ms"]["p50"], run["ttft_ms"]["p90"], run["itl_ms"]["p50"], run["itl_ms"]["p99"])
            rows.append((name, rate, run["output_tok_s"], *latencies, f"{run['goodput']:.0%}", run["failures"]))
    parts += ["<h2>Figures</h2>", table(header, rows), "<h2>Drift</h2>", _drift(points)]
    parts += ["<h2>Circumstances</h2>", table(["", ""], list(facts.items()))]
    return page("Scheduler settings under open-loop load", "\n".join(parts))


def _drift(points: Sequence[Point]) -> str:
    """Return the table of the defaults, measured first and last. Smaller differences are noise."""
    rows = []
    for prefill in _LINES:
        for rate in sorted({point["rate"] for point in points}):
            runs = [p["summary"] for p in points if (p["prefill"], p["knob"], p["rate"]) == (prefill, "", rate)]
            if len(runs) > 1:
                first, last = runs[0], runs[-1]
                ratios = [last[kind]["p50"] / first[kind]["p50"] for kind in ("ttft_ms", "itl_ms")]
                rows.append((f"{prefill}, defaults", rate, *ratios))
    return table(["setting", "rate", "TTFT p50, last over first", "ITL p50, last over first"], rows)
