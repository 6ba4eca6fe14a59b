"""The report of a comparison with the peers: table, ratios over every peer and over the best,
picture.

Defines which figure of a workload counts and which contestants are compared; measures nothing.

A ratio is ours divided by the named peer's: above 1 is better for rates, below 1 for times. Our
servers are compared with servers, our engine with engines. Contestants with unquantized weights are
compared with such peers, and also with all. A peer counts in a row if it answered every request,
each with the right number of tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from load_tests.bench.contestants import Contestant
from serve_app.workloads.figures import median_of

_BLUE, _ORANGE = "#0072B2", "#E69F00"
# Engines without a server.
_LIGHT_BLUE, _LIGHT_ORANGE = "#7FB8D8", "#F2CF80"
_ENGINE = "engine"
_FIRST_TOKEN = "first_token"
_UNITS = {"prefill": "input tokens/s", _FIRST_TOKEN: "median ms to the first token"}
"""Units of the picture's bars that are not output tokens per second."""

Figures = Mapping[str, Any]


@dataclass
class Entry:
    """The results of one contestant. `reason`: why some or all are missing."""

    contestant: Contestant
    ready_s: list[float] = field(default_factory=list)
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    reason: str | None = None

    def add(self, workload: str, run: Figures) -> None:
        """Add one run."""
        self.runs.setdefault(workload, []).append(run)

    def median(self, workload: str) -> Figures | None:
        """Return the median of each figure; None if the workload did not run."""
        runs = self.runs.get(workload)
        return median_of([dict(run) for run in runs]) if runs else None

    def errors(self, workload: str) -> int:
        """Return the number of requests of all runs that failed or had a wrong length of prompt or
        answer."""
        kinds = ("failures", "wrong_length", "prompt_mismatch")
        return sum(run[kind] for run in self.runs.get(workload, ()) for kind in kinds)

    @property
    def is_clean(self) -> bool:
        """Whether everything ran and every answer was right."""
        return self.reason is None and not any(map(self.errors, self.runs))

    @property
    def pss_mib(self) -> float | None:
        """The maximum memory of its processes after a run, shared pages counted once."""
        return max((run["server_pss_mib"] for runs in self.runs.values() for run in runs), default=None)

    @property
    def median_ready_s(self) -> float | None:
        """The median of the seconds from start until ready."""
        return sorted(self.ready_s)[len(self.ready_s) // 2] if self.ready_s else None


@dataclass(frozen=True, slots=True)
class Standing:
    """One of our figures against the best peer's."""

    workload: str
    contestant: str
    figure: str
    value: float
    peer: str
    best: float
    ratio: float


def rate(workload: str, figures: Figures) -> float:
    """Return the workload's tokens per second: prompt tokens if nearly all tokens are, else output
    tokens."""
    return float(figures["prompt_tok_s" if workload == "prefill" else "output_tok_s"])


def _figure(name: str, workload: str, figures: Figures) -> float | None:
    if name == "tok/s":
        return rate(workload, figures)
    kind, percentile, _ = name.lower().split()
    value = figures[f"{kind}_ms"][percentile]
    return None if value is None else float(value)


_CLOSE = 1.25
"""Drift: two figures of one machine may differ by this factor."""
_BEST = {"tok/s": max, "TTFT p50 ms": min, "ITL p99 ms": min}


def standings(entries: Mapping[str, Entry], workloads: Sequence[str]) -> Iterator[Standing]:
    """Yield every figure of ours that has a peer's, compared with the best peer's."""
    for workload in workloads:
        for name, entry in entries.items():
            ours = entry.median(workload)
            if not entry.contestant.ours or ours is None:
                continue
            peers = _rivals(entries, workload, entry.contestant)
            for figure in _BEST:
                value = _figure(figure, workload, ours)
                if value is not None and (found := _best(peers, figure, workload)) is not None:
                    peer, best = found
                    yield Standing(workload, name, figure, value, peer, best, round(value / best, 3))


def _rivals(entries: Mapping[str, Entry], workload: str, one: Contestant) -> dict[str, Figures]:
    """Return the medians of the peers with which a contestant is compared in this workload."""
    return {
        name: median
        for name, entry in entries.items()
        if _is_rival(one, entry.contestant)
        and not entry.errors(workload)
        and (median := entry.median(workload)) is not None
    }


def _is_rival(one: Contestant, other: Contestant) -> bool:
    return not other.ours and other.engine == one.engine and (other.exact or not one.exact)


def _best(peers: Mapping[str, Figures], figure: str, workload: str) -> tuple[str, float] | None:
    """Return the peer with the best value of this figure, and the value; None without one."""
    values = ((name, _figure(figure, workload, figures)) for name, figures in peers.items())
    known = [(name, value) for name, value in values if value]
    return _BEST[figure](known, key=itemgetter(1)) if known else None


def ratios(entries: Mapping[str, Entry], workload: str) -> dict[str, dict[str, float]]:
    """Return tokens per second of each of ours over each of its peers': by contestant, then by
    peer."""
    return {
        name: {
            other: round(rate(workload, median) / rate(workload, figures), 3)
            for other, figures in _rivals(entries, workload, entry.contestant).items()
        }
        for name, entry in entries.items()
        if entry.contestant.ours and (median := entry.median(workload)) is not None
    }


def far_behind(entries: Mapping[str, Entry], workloads: Sequence[str]) -> set[str]:
    """Return the peers that do not affect the result.

    Compared with peers of their kind, they reach 80 % of the highest tokens per second in no row,
    and are best in no other figure.
    """
    contenders: set[str] = set()
    peers = {name: entry for name, entry in entries.items() if not entry.contestant.ours and entry.runs}
    for workload in workloads:
        for entry in peers.values():
            rivals = _rivals(entries, workload, entry.contestant)
            bests = {figure: best for figure in _BEST if (best := _best(rivals, figure, workload)) is not None}
            contenders.update(name for name, _ in bests.values())
            _, most = bests.get("tok/s", ("", 0.0))
            contenders.update(name for name, figures in rivals.items() if _CLOSE * rate(workload, figures) >= most)
    return set(peers) - contenders


def path_costs(entries: Mapping[str, Entry]) -> dict[str, dict[str, float]]:
    """Return the cost of HTTP and Ray for each of our servers whose engine also ran alone.

    decode_share: the lost share of the engine's tokens per second. first_token_ms: the additional
    TTFT of a single user.
    """
    costs: dict[str, dict[str, float]] = {}
    if _ENGINE not in entries:
        return costs
    engine = entries[_ENGINE]
    for name, entry in entries.items():
        if entry.contestant.engine or not entry.contestant.ours or entry.contestant.exact:
            continue
        costs[name] = {}
        if (alone := engine.median("decode")) and (served := entry.median("decode")):
            costs[name]["decode_share"] = round(1 - rate("decode", served) / rate("decode", alone), 3)
        if (alone := engine.median(_FIRST_TOKEN)) and (served := entry.median(_FIRST_TOKEN)):
            first, first_alone = (_figure("TTFT p50 ms", _FIRST_TOKEN, one) for one in (served, alone))
            if first is not None and first_alone is not None:
                costs[name]["first_token_ms"] = round(first - first_alone, 1)
    return costs


def figures(entries: Mapping[str, Entry], workloads: Sequence[str]) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "contestants": {
            name: {
                "what": entry.contestant.what,
                "ours": entry.contestant.ours,
                "exact": entry.contestant.exact,
                "reason": entry.reason,
                "ready_s": entry.ready_s,
                "pss_mib": entry.pss_mib,
            }
            for name, entry in entries.items()
        },
        "tok_s_over_peers": {workload: ratios(entries, workload) for workload in workloads},
        "against_best_peer": [asdict(standing) for standing in standings(entries, workloads)],
        "path_costs": path_costs(entries),
        "results": {
            name: {workload: {"median": entry.median(workload), "runs": runs} for workload, runs in entry.runs.items()}
            for name, entry in entries.items()
        },
    }


def print_tables(console: Console, entries: Mapping[str, Entry], workloads: Sequence[str]) -> None:
    """Print all tables."""
    console.print(_measured(entries, workloads))
    console.print(_over_each(entries, workloads))
    console.print(_compared(entries, workloads))
    console.print(_who(entries))
    for name, costs in path_costs(entries).items():
        if "decode_share" in costs:
            console.print(f"{name}: HTTP and Ray cost {costs['decode_share']:.1%} of the engine's decode throughput")
        if "first_token_ms" in costs:
            console.print(f"{name}: and {costs['first_token_ms']:+.1f} ms on a single user's first token")


def _measured(entries: Mapping[str, Entry], workloads: Sequence[str]) -> Table:
    table = Table(
        "workload", "contestant", "tok/s", "runs", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "errors", "foreign"
    )
    for workload in workloads:
        for name, entry in entries.items():
            median = entry.median(workload)
            if median is None:
                table.add_row(workload, name, "-")
                continue
            table.add_row(
                workload,
                name,
                f"{rate(workload, median):.1f}",
                " ".join(f"{rate(workload, run):.0f}" for run in entry.runs[workload]),
                _number(median["ttft_ms"]["p50"]),
                _number(median["itl_ms"]["p50"]),
                _number(median["itl_ms"]["p99"]),
                str(entry.errors(workload)),
                f"{median['foreign_cores']:.2f}",
            )
        table.add_section()
    return table


def _over_each(entries: Mapping[str, Entry], workloads: Sequence[str]) -> Table:
    """Return the table of our tokens per second over each peer's."""
    ours = [name for name, entry in entries.items() if entry.contestant.ours]
    table = Table("workload", "peer", *(f"{name} over it" for name in ours))
    for workload in workloads:
        over = ratios(entries, workload)
        for peer in entries:
            cells = [over.get(name, {}).get(peer) for name in ours]
            if any(cells):
                table.add_row(workload, peer, *(f"{ratio:.2f}" if ratio else "" for ratio in cells))
        table.add_section()
    return table


def _compared(entries: Mapping[str, Entry], workloads: Sequence[str]) -> Table:
    table = Table("workload", "ours", *(f"{figure}: over the best peer" for figure in _BEST))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for one in standings(entries, workloads):
        cells.setdefault((one.workload, one.contestant), {})[one.figure] = (
            f"{one.ratio:.2f}x {one.peer} ({one.value:.0f} / {one.best:.0f})"
        )
    for key, row in cells.items():
        table.add_row(*key, *(row.get(figure, "") for figure in _BEST))
    return table


def _who(entries: Mapping[str, Entry]) -> Table:
    table = Table("contestant", "what", "ready after s", "memory MiB", "not in the run, or not whole, because")
    for name, entry in entries.items():
        table.add_row(
            name, entry.contestant.what, _number(entry.median_ready_s), _number(entry.pss_mib), entry.reason or ""
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def draw(path: Path, entries: Mapping[str, Entry], workloads: Sequence[str]) -> None:
    """Draw a panel for each workload and write it to `path`.

    It has a bar for each contestant's median, a dot for each run, and above them our ratio over the
    best peer, with its name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(workloads))
    rows = -(-len(workloads) // columns)
    versus = {workload: _versus(entries, workload) for workload in workloads}
    title_lines = 1 + max(map(len, versus.values()))
    size = (2.2 + 3.4 * columns, 0.7 + rows * (0.5 + 0.2 * title_lines + 0.3 * len(entries)))
    figure = Figure(figsize=size, dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    names = list(entries)[::-1]
    for axes in panels.flat[len(workloads) :]:
        axes.set_visible(False)
    for axes, workload in zip(panels.flat, workloads, strict=False):
        medians = [entries[name].median(workload) for name in names]
        rates = [_bar(workload, median) if median is not None else 0.0 for median in medians]
        axes.barh(names, rates, 0.7, color=[_colour(entries[name]) for name in names])
        for place, (name, value) in enumerate(zip(names, rates, strict=True)):
            values = [_bar(workload, run) for run in entries[name].runs.get(workload, ())]
            axes.plot(values, [place] * len(values), "o", color="black", markersize=2.5)
            label = f"{value:.{0 if value >= 100 else 1}f}" if value else "-"
            beside = (max(values, default=0.0), place)  # the last of the dots
            axes.annotate(label, beside, (6, 0), textcoords="offset points", va="center", fontsize=8)
        axes.margins(x=0.15)
        axes.set_title("\n".join([workload, *versus[workload]]), loc="left", fontsize=9)
        axes.set_xlabel(_UNITS.get(workload, "output tokens/s"), fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "Same requests, same machine (bars: medians, dots: runs; light: engines without a server)", fontsize=10
    )
    figure.savefig(path, format="svg" if path.suffix == ".svg" else "png")


def _versus(entries: Mapping[str, Entry], workload: str) -> list[str]:
    """Return a line for each of ours: its ratio over the best peer, and the peer's name."""
    figure = "TTFT p50 ms" if workload == _FIRST_TOKEN else "tok/s"
    return [
        f"{one.contestant}: {one.ratio:.2f}x {one.peer}"
        for one in standings(entries, [workload])
        if one.figure == figure
    ]


def _bar(workload: str, figures: Figures) -> float:
    if workload == _FIRST_TOKEN:
        return _figure("TTFT p50 ms", workload, figures) or 0.0
    return rate(workload, figures)


def _colour(entry: Entry) -> str:
    if entry.contestant.ours:
        return _LIGHT_BLUE if entry.contestant.engine else _BLUE
    return _LIGHT_ORANGE if entry.contestant.engine else _ORANGE
