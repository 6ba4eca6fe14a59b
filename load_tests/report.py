"""Self-contained HTML reports: one file with figures, pictures and what they were measured on, nothing loaded from
elsewhere. Decides the pages' order and wording; the figures come from `client`, the pictures from `plots`."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from load_tests.client import Objective, Run
from load_tests.machine import machine
from load_tests.plots import draw_distributions, draw_first_tokens, draw_over_time, draw_rates, image
from load_tests.server_view import Comparison

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1060px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #8886; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
img { width: 100%; background: white; border-radius: 4px; }
.met { color: #00795a; } .missed { color: #c34a00; } .verdict { font-size: 1.2rem; font-weight: 600; }
div.wide { overflow-x: auto; }
"""
_LATENCIES = {
    "ttft_ms": "time to first token, ms",
    "itl_ms": "between tokens (ITL), ms",
    "tpot_ms": "per token after the first (TPOT), ms",
    "e2e_ms": "whole answer, ms",
    "late_ms": "sent too late by this client, ms",
}
_COUNTS = {
    "requests": "requests",
    "failures": "failed",
    "refused": "of them refused (429, 503)",
    "cancelled": "hung up on purpose",
    "seconds": "seconds",
    "requests_per_s": "answered per second",
    "output_tok_s": "output tokens per second",
    "prompt_tok_s": "prompt tokens per second",
    "goodput": "goodput (share of requests within the objective)",
    "goodput_per_s": "requests within the objective per second",
}


def page(title: str, body: str) -> str:
    """A whole HTML page around `body`."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table; cells are escaped, floats rounded."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    lines = ("".join(f"<td>{escape(_show(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _show(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return "–" if cell is None else str(cell)


def circumstances(**more: Any) -> dict[str, Any]:
    """What a report must say beside its figures: machine, versions, command, and what else the caller knows."""
    return {"command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), **machine(), **more}


def run_page(
    title: str,
    facts: Mapping[str, Any],
    run: Run,
    summary: Mapping[str, Any],
    objective: Objective,
    views: Sequence[Comparison] = (),
) -> str:
    """The page about one run: whether the objective was met, figures, pictures, both views, circumstances."""
    parts = [f"<h1>{escape(title)}</h1>", _verdict(summary, objective)]
    parts.append(table(["", ""], [(text, summary[key]) for key, text in _COUNTS.items()]))
    # Where users themselves say when they begin, nothing is late.
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
        f"{1000 * objective.tpot_s:g} ms each on average; wanted were {objective.goodput:.0%}.</p>"
    )


def _views(views: Sequence[Comparison]) -> str:
    """A server's histogram knows no more than a bucket, so its bounds stand beside the estimate."""
    rows = [
        (one.name, one.client, one.server, f"{one.low:g} to {one.high:g}", "yes" if one.agrees else "NO")
        for one in views
    ]
    return table(["seconds, tokens", "this client", "the server", "its bucket", "agree"], rows)


def bench_page(title: str, facts: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page about several workloads: medians, every run, circumstances."""
    header = [
        "workload",
        "output tok/s",
        "single runs",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "ITL p50 ms",
        "ITL p99 ms",
        "failed",
    ]
    rows = []
    for name, report in results.items():
        median = report["median"]
        rates = " ".join(f"{run['output_tok_s']:.0f}" for run in report["runs"])
        latencies = [median[kind][percent] for kind in ("ttft_ms", "itl_ms") for percent in ("p50", "p99")]
        rows.append((name, median["output_tok_s"], rates, *latencies, median["failures"]))
    parts = [f"<h1>{escape(title)}</h1>", table(header, rows)]
    parts.append(image(draw_rates(results), "Output tokens per second by workload, bars are medians, dots runs"))
    parts += ["<h2>Circumstances</h2>", table(["", ""], list(facts.items()))]
    return page(title, "\n".join(parts))
