"""Self-contained HTML reports: figures, plots and conditions in one file.

Decides the pages' order and wording. The figures are from `figures`, the plots from `plots`.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from serve_app.workloads.machine import machine
from serve_app.workloads.plots import draw_rates, image

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


def page(title: str, body: str) -> str:
    """Return a whole HTML page around `body`."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return an HTML table. Cells are escaped, floats rounded."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    lines = ("".join(f"<td>{escape(_show(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _show(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return "–" if cell is None else str(cell)


def circumstances(**more: Any) -> dict[str, Any]:
    """Return the conditions that a report must state: machine, versions, command, and `more`."""
    return {"command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), **machine(), **more}


def bench_page(title: str, facts: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page about several workloads: medians, every run, conditions."""
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
