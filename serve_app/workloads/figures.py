"""Figures of a run: latencies, rates, and the share of requests that met an objective.

Sends nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.workloads.client import REFUSALS, RequestResult, Run


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds for TTFT and TPOT, and the share of requests that must meet both.

    The share is called "goodput".
    """

    ttft_s: float = 1.0
    tpot_s: float = 0.1
    goodput: float = 0.9

    def met_by(self, result: RequestResult) -> bool:
        """Whether the request succeeded within both limits."""
        return (
            result.error is None
            and result.ttft_s is not None
            and result.ttft_s < self.ttft_s
            and (result.tpot_s is None or result.tpot_s < self.tpot_s)
        )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile with linear interpolation; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100.0
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(run: Run, extra_prompt_tokens: int = 0, objective: Objective = Objective()) -> dict[str, Any]:
    """Return figures of one run as plain data: rates per second, latencies in milliseconds.

    `extra_prompt_tokens`: how many special tokens a server may count in addition to a prompt's own.
    `goodput`: the share of all requests, including refused and failed ones, that met the objective.
    """
    good = [result for result in run.results if result.error is None]
    whole = [result for result in good if not result.cancelled]
    output_tokens = sum(result.output_tokens for result in good)
    prompt_tokens = sum(result.item.prompt_tokens for result in good)
    met = sum(map(objective.met_by, run.results))
    allowed_extra = (0, extra_prompt_tokens)
    return {
        "workload": run.workload.name,
        "requests": len(run.results),
        "failures": len(run.results) - len(good),
        "refused": sum(result.status in REFUSALS for result in run.results),
        "cancelled": len(good) - len(whole),
        "errors": sorted({result.error for result in run.results if result.error})[:5],
        "wrong_length": sum(result.output_tokens != result.item.output_tokens for result in whole),
        "prompt_mismatch": sum(
            r.prompt_tokens is not None and r.prompt_tokens - r.item.prompt_tokens not in allowed_extra for r in good
        ),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seconds": round(run.seconds, 3),
        "output_tok_s": round(output_tokens / run.seconds, 2),
        "prompt_tok_s": round(prompt_tokens / run.seconds, 2),
        "requests_per_s": round(len(good) / run.seconds, 3),
        "ttft_ms": _milliseconds([r.ttft_s for r in good if r.ttft_s is not None]),
        "itl_ms": _milliseconds([gap for r in good for gap in r.gaps_s]),
        "tpot_ms": _milliseconds([r.tpot_s for r in good if r.tpot_s is not None]),
        "e2e_ms": _milliseconds([r.e2e_s for r in whole]),
        "late_ms": _milliseconds([r.late_s for r in run.results]),
        "goodput": round(met / max(1, len(run.results)), 4),
        "goodput_per_s": round(met / run.seconds, 3),
        "client_cpu_s": round(run.client_cpu_s, 2),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    values = {f"p{p}": percentile(seconds, p) for p in (50, 90, 99)}
    return {name: None if value is None else round(1000 * value, 2) for name, value in values.items()}


def median_of(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over several summaries of one workload.

    Other values are from the first summary.
    """

    def median(values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, dict):
            return {key: median([value[key] for value in values]) for key in first}
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        return round(percentile(numbers, 50) or 0.0, 4) if numbers else first

    return {key: median([summary[key] for summary in summaries]) for key in summaries[0]}
