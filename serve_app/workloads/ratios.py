"""Compares two reports: B over A for each figure, with the spread of the single runs.

A difference counts only if every run of B is on the same side of every run of A. With three runs
each, this happens by chance for a given figure one time in ten (2 / C(6, 3)), so look at more runs
before concluding.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FIGURES: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    # name, path in a summary, whether more is better
    ("output tok/s", ("output_tok_s",), True),
    ("requests/s", ("requests_per_s",), True),
    ("goodput", ("goodput",), True),
    ("TTFT p50 ms", ("ttft_ms", "p50"), False),
    ("TTFT p99 ms", ("ttft_ms", "p99"), False),
    ("ITL p50 ms", ("itl_ms", "p50"), False),
    ("ITL p99 ms", ("itl_ms", "p99"), False),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure of one workload: both medians, B over A, and the range of run quotients."""

    workload: str
    figure: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    runs: tuple[int, int]
    more_is_better: bool

    @property
    def verdict(self) -> str:
        """`B better`, `A better`, `within the spread`, or `one run has no spread`."""
        if min(self.runs) < 2:
            return "one run has no spread"
        if self.low <= 1.0 <= self.high:
            return "within the spread"
        return "B better" if (self.low > 1.0) is self.more_is_better else "A better"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the workloads of a JSON report.

    Written by `serve-app bench run` or the open-loop driver with `--json`, or by locust with
    `--report-json`. Raises `ValueError` if the file is not such a report.
    """
    try:
        results: dict[str, dict[str, Any]] = json.loads(path.read_text())["results"]
        if not all(report["runs"] and report["median"] for report in results.values()):
            raise ValueError("a workload without runs")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a report: {error}") from error
    return results


def compare_results(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Ratio]:
    """Return the figures of the workloads that both have, in A's order.

    Skips figures that are missing or 0 in either.
    """
    rows = []
    for workload in a:
        for figure, path, more_is_better in _FIGURES if workload in b else ():
            before, after = (_values(report[workload]["runs"], path) for report in (a, b))
            if before and after:
                old, new = (_dig(report[workload]["median"], path) or 0.0 for report in (a, b))
                quotients = [one / other for one in after for other in before]
                rows.append(
                    Ratio(
                        workload,
                        figure,
                        old,
                        new,
                        new / old,
                        min(quotients),
                        max(quotients),
                        (len(before), len(after)),
                        more_is_better,
                    )
                )
    return rows


def _values(runs: Sequence[Mapping[str, Any]], path: tuple[str, ...]) -> list[float]:
    """Return the figure of every run; empty if one is missing or 0, because quotients need all."""
    values = [_dig(run, path) for run in runs]
    return [value for value in values if value] if all(values) else []


def _dig(summary: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = summary
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)
