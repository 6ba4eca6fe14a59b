"""A run in the server's own metrics, beside the client's measurements.

Reads `/metrics` before and after a run. A histogram gives a percentile only to the width of a
bucket: the two agree if they differ by no more than that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serve_app.system.http_client import fetch
from serve_app.workloads.client import RequestResult
from serve_app.workloads.figures import percentile

_TTFT, _ITL = "serve_app_time_to_first_token_seconds", "serve_app_inter_token_latency_seconds"
_OUTPUT_TOKENS = "serve_app_output_tokens_total"
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts up to each upper bound in seconds; the last bound is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    def since(self, before: "Histogram | None") -> "Histogram":
        """Return the observations between two states."""
        if before is None:
            return self
        return Histogram(self.bounds, tuple(new - old for new, old in zip(self.counts, before.counts, strict=True)))

    def percentile(self, percent: float) -> tuple[float, float, float] | None:
        """Return (estimate, lower bound, upper bound) in seconds, like Prometheus's
        `histogram_quantile`.

        None without observations. Above the highest finite bound the estimate is that bound.
        """
        rank = self.counts[-1] * percent / 100.0
        below = low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                if bound == float("inf"):
                    return low, low, bound
                return low + (bound - low) * (rank - below) / (count - below), low, bound
            below, low = count, bound
        return None


@dataclass(frozen=True, slots=True)
class ServerView:
    """One state of the server's metrics."""

    ttft: Histogram
    itl: Histogram
    output_tokens: float

    @staticmethod
    def read(base_url: str) -> "ServerView | None":
        """Return the server's metrics; None for another kind of server."""
        try:
            return ServerView.parse(fetch(f"{base_url.rstrip('/')}/metrics", timeout_s=30).decode())
        except (OSError, ValueError):
            return None

    @staticmethod
    def parse(text: str) -> "ServerView":
        """Return the metrics in Prometheus's text format.

        Raises `ValueError` if a series is missing.
        """
        buckets: dict[str, dict[float, float]] = {_TTFT: {}, _ITL: {}}
        tokens = None
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_bucket")
                if sample.name == _OUTPUT_TOKENS:
                    tokens = (tokens or 0.0) + sample.value
                elif name in buckets and "le" in sample.labels and sample.labels.get("where", "ingress") == "ingress":
                    bound = float(sample.labels["le"])
                    buckets[name][bound] = buckets[name].get(bound, 0.0) + sample.value
        if tokens is None or not all(buckets.values()):
            raise ValueError("the page lacks metrics of serve_app")
        ttft, itl = (Histogram(*zip(*sorted(found.items()), strict=True)) for found in buckets.values())
        return ServerView(ttft, itl, tokens)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure as both sides measured it; `low` and `high` bound the server's."""

    name: str
    client: float
    server: float
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        """Return the data for JSON, which has no infinity: the bound above the last bucket
        is null."""
        high = None if self.high == float("inf") else self.high
        return {
            "figure": self.name,
            "client": self.client,
            "server": self.server,
            "bucket": [self.low, high],
            "agree": self.agrees,
        }

    @property
    def agrees(self) -> bool:
        """Whether the two differ by at most the bucket's width."""
        return self.low <= self.client <= self.high or abs(self.client - self.server) <= self.high - self.low


def compare_views(
    before: ServerView | None, after: ServerView | None, results: Sequence[RequestResult]
) -> list[Comparison]:
    """Return percentiles in seconds and the number of output tokens of both sides.

    Empty for a server without our metrics. Valid if there were no other clients. Tokens are
    compared only if every answer is complete, because the server also counts tokens that a client
    did not wait for.
    """
    if before is None or after is None:
        return []
    # The server's clock starts when a request reaches it, so this process's own delay is taken out.
    ttft = [r.ttft_s - r.late_s for r in results if r.ttft_s is not None and r.attempts == 1]
    itl = [gap for r in results for gap in r.gaps_s]
    rows = []
    for name, ours, theirs in (
        ("TTFT", ttft, after.ttft.since(before.ttft)),
        ("ITL", itl, after.itl.since(before.itl)),
    ):
        for percent in PERCENTS:
            mine, seen = percentile(ours, percent), theirs.percentile(percent)
            if mine is not None and seen is not None:
                rows.append(Comparison(f"{name} p{percent}", mine, *seen))
    if all(r.error is None and not r.cancelled for r in results):
        tokens = after.output_tokens - before.output_tokens
        rows.append(Comparison("output tokens", float(sum(r.output_tokens for r in results)), tokens, tokens, tokens))
    return rows
