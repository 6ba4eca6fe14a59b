"""The page about one open-loop run: verdict, figures, pictures, and the server's own metrics."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from load_tests.bench.run_plots import draw_distributions, draw_first_tokens, draw_over_time
from load_tests.bench.server_view import Comparison
from serve_app.workloads.client import Run
from serve_app.workloads.figures import Objective
from serve_app.workloads.plots import image
from serve_app.workloads.report import page, table

_LATENCIES = {
    "ttft_ms": "time to first token, ms",
    "itl_ms": "between tokens (ITL), ms",
    "tpot_ms": "per token after the first (TPOT), ms",
    "e2e_ms": "whole answer, ms",
    "late_ms": "sent late by this client, ms",
}
_COUNTS = {
    "requests": "requests",
    "failures": "failed",
    "refused": "of which refused (429, 503)",
    "cancelled": "disconnected on purpose",
    "seconds": "seconds",
    "requests_per_s": "answered per second",
    "output_tok_s": "output tokens per second",
    "prompt_tok_s": "prompt tokens per second",
    "goodput": "goodput (share of requests within the objective)",
    "goodput_per_s": "requests within the objective per second",
}


def run_page(
    title: str,
    facts: Mapping[str, Any],
    run: Run,
    summary: Mapping[str, Any],
    objective: Objective,
    views: Sequence[Comparison] = (),
) -> str:
    """Return the page about one run: verdict, figures, pictures, both views, and circumstances."""
    parts = [f"<h1>{escape(title)}</h1>", _verdict(summary, objective)]
    parts.append(table(["", ""], [(text, summary[key]) for key, text in _COUNTS.items()]))
    # Closed-loop users start their requests themselves, so none is late.
    shown = {key: text for key, text in _LATENCIES.items() if key != "late_ms" or summary[key]["p99"]}
    percentiles = [(text, *summary[key].values()) for key, text in shown.items()]
    parts.append(table(["", "p50", "p90", "p99"], percentiles))
    if summary["errors"]:
        parts.append(
            "<h2>Errors</h2><ul>" + "".join(f"<li>{escape(text)}</li>" for text in summary["errors"]) + "</ul>"
        )
    parts += ["<h2>Over time</h2>", image(draw_over_time(run), "Requests and output tokens per second over time")]
    parts.append(image(draw_first_tokens(run, objective), "Time to first token of each request"))
    parts += ["<h2>Distributions</h2>", image(draw_distributions(run, objective), "Shares of requests by latency")]
    if views:
        parts += ["<h2>As the server saw it</h2>", _views(views)]
    parts += ["<h2>Circumstances</h2>", table(["", ""], list(facts.items()))]
    return page(title, "\n".join(parts))


def _verdict(summary: Mapping[str, Any], objective: Objective) -> str:
    met = summary["goodput"] >= objective.goodput
    return (
        f'<p class="verdict {"met" if met else "missed"}">{"Met" if met else "Missed"}: {summary["goodput"]:.1%} of '
        f"the requests had their first token within {objective.ttft_s:g} s and the next ones within "
        f"{1000 * objective.tpot_s:g} ms each on average; the objective is {objective.goodput:.0%}.</p>"
    )


def _views(views: Sequence[Comparison]) -> str:
    """Return the table of client and server figures, with the bounds of the histogram buckets."""
    rows = [
        (one.name, one.client, one.server, f"{one.low:g} to {one.high:g}", "yes" if one.agrees else "NO")
        for one in views
    ]
    return table(["seconds, tokens", "this client", "the server", "its bucket", "agree"], rows)
