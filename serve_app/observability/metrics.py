"""Prometheus metrics of one process: names, buckets and export.

Each process serves its registry on its `metrics_port`; `merge_expositions` joins several into one
page. Serving decides which processes are scraped. Metrics never access the engine: they receive
`StepRecord`s and request events.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serve_app.core.config import SchedulerKnobs
from serve_app.core.step_cost import DeviceLimits
from serve_app.core.step_record import SchedulerStats, StepRecord
from serve_app.observability.gpu_state import GpuState
from serve_app.observability.grammar_metrics import RequestGrammarMetrics, StepGrammarMetrics
from serve_app.observability.key_metrics import KeyMetrics

# Otherwise every counter and histogram has a second series with its creation time.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LATENCY_BUCKETS = (
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75)
    + (1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
)  # fmt: skip
_TOKEN_BUCKETS = tuple(float(2**i) for i in range(15))
_BUSY_WINDOW_S = 10.0


class EngineMetrics:
    """Metrics of one engine replica. Gauges are computed at scrape time.

    `on_step` runs in the engine's thread, all other methods on the event loop.
    """

    def __init__(self, gpu_ids: Sequence[int | str] = ()) -> None:
        """`gpu_ids`: NVML indices or UUIDs of this replica's GPUs. Empty: no GPU series."""
        self.registry = registry = CollectorRegistry()
        self._state = _EngineState()
        registry.register(self._state)
        if gpu_ids:
            registry.register(GpuState(gpu_ids))
        self._steps = Histogram("serve_app_step_seconds", "Duration of engine steps", **_histogram(registry))
        self._batch = Histogram(
            "serve_app_batch_tokens", "Tokens packed into one step", registry=registry, buckets=_TOKEN_BUCKETS
        )
        computed = Counter("serve_app_computed_tokens", "Tokens computed by steps", ["phase"], registry=registry)
        self._prefill, self._decode = computed.labels("prefill"), computed.labels("decode")
        self._sampled = Counter("serve_app_sampled_tokens", "Tokens sampled by the engine", registry=registry)
        self._drafted = Counter("serve_app_draft_tokens", "Draft tokens computed", registry=registry)
        self._accepted = Counter("serve_app_accepted_tokens", "Draft tokens accepted", registry=registry)
        self._preemptions = Counter("serve_app_preemptions", "Requests preempted by recompute", registry=registry)
        self._prefix_hits = Counter(
            "serve_app_prefix_cache_hit_tokens", "Tokens of admitted requests found in the cache", registry=registry
        )
        self._prefix_queries = Counter(
            "serve_app_prefix_cache_query_tokens", "Tokens of admitted requests looked up", registry=registry
        )
        self._grammars = StepGrammarMetrics(registry)
        self._busy = Counter("serve_app_engine_busy_seconds", "Seconds the engine spent in steps", registry=registry)
        self._bytes = Counter(
            "serve_app_step_bytes", "Bytes of weights, keys and values that steps had to read", registry=registry
        )
        self._flops = Counter(
            "serve_app_step_flops", "Multiplications and additions that steps had to do", registry=registry
        )
        self._limits = [
            Gauge(f"serve_app_device_{name}_per_second", text, registry=registry)
            for name, text in (
                ("bytes", "Bytes that a large copy reads and writes, measured at start"),
                ("flops", "Multiplications and additions of a large product, measured at start"),
            )
        ]
        self._slots = Gauge("serve_app_max_num_seqs", "Sequences that may run at once", registry=registry)
        self._step_tokens = Gauge(
            "serve_app_max_num_batched_tokens", "Maximum number of tokens in one step", registry=registry
        )
        ttft = _time_to_first_token(registry)
        self._first_token = ttft.labels("engine")

    def read_stats_from(self, stats: Callable[[], SchedulerStats]) -> None:
        """Set the source of the engine's gauges. Before this call there are none."""
        self._state.stats = stats

    def set_knobs(self, knobs: SchedulerKnobs) -> None:
        """Set the gauges of the step limits."""
        self._slots.set(knobs.max_num_seqs)
        self._step_tokens.set(knobs.max_num_batched_tokens)

    def set_limits(self, limits: DeviceLimits) -> None:
        """Set the gauges of the device's measured limits."""
        for gauge, rate in zip(self._limits, (limits.bytes_per_s, limits.flops_per_s), strict=True):
            gauge.set(rate)

    def on_step(self, record: StepRecord) -> None:
        """Count one finished step."""
        seconds = record.schedule_s + record.model_s + record.update_s
        self._state.busy.add(record.started_at + seconds, seconds)
        self._busy.inc(seconds)
        self._bytes.inc(record.num_bytes)
        self._flops.inc(record.num_flops)
        self._steps.observe(seconds)
        self._batch.observe(record.num_prefill_tokens + record.num_decode_tokens)
        self._grammars.on_step(record)
        for counter, amount in (
            (self._prefill, record.num_prefill_tokens),
            (self._decode, record.num_decode_tokens),
            (self._sampled, record.num_output_tokens),
            (self._drafted, record.num_draft_tokens),
            (self._accepted, record.num_accepted_tokens),
            (self._preemptions, len(record.preempted)),
            (self._prefix_hits, record.prefix_hit_tokens),
            (self._prefix_queries, record.prefix_queried_tokens),
        ):
            if amount:
                counter.inc(amount)

    def first_token(self, seconds: float) -> None:
        """Record the time from a request's arrival at the replica to its first token."""
        self._first_token.observe(seconds)


class IngressMetrics:
    """Metrics of the ingress: requests as clients see them.

    Updated by the HTTP layer on the event loop.
    """

    def __init__(
        self,
        queued: Callable[[], int],
        ongoing: Callable[[], int],
        engines: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """Arguments return current numbers of sequences.

        queued: waiting at the ingress. ongoing: sent to engines. engines: (waiting, running) in all
        engines.
        """
        self.registry = registry = CollectorRegistry()
        self.body_bytes = 0
        _register_state(registry, queued, ongoing, engines)
        self._queue_wait = Histogram(
            "serve_app_queue_wait_seconds", "Time in the ingress's queue", **_histogram(registry)
        )
        self._refusals = Counter(
            "serve_app_refusals", "Requests refused because of limits or deadlines", ["reason"], registry=registry
        )
        self._active = Gauge(
            "serve_app_requests_active", "Requests received and not ended", ["endpoint"], registry=registry
        )
        self._requests = Counter(
            "serve_app_requests", "Requests by how they ended", ["endpoint", "outcome"], registry=registry
        )
        self._prompt_tokens = Counter("serve_app_prompt_tokens", "Prompt tokens of ended requests", registry=registry)
        self._output_tokens = Counter("serve_app_output_tokens", "Tokens received from engines", registry=registry)
        self._first_token = _time_to_first_token(registry).labels("ingress")
        self._inter_token = Histogram(
            "serve_app_inter_token_latency_seconds",
            "Time between tokens of one choice at the ingress; tokens of one event share its interval",
            **_histogram(registry),
        )
        self._failovers = Counter(
            "serve_app_failovers",
            "Attempts lost with a replica, whose requests continued elsewhere",
            ["reason"],
            registry=registry,
        )
        self._replayed = Counter(
            "serve_app_replayed_tokens",
            "Known tokens of these requests, computed again by the next replica",
            registry=registry,
        )
        self._false_alarms = Counter(
            "serve_app_false_alarms", "Replicas that were considered stalled and answered later", registry=registry
        )
        self._keys = KeyMetrics(registry)
        self._grammars = RequestGrammarMetrics(registry)
        self._duration = Histogram(
            "serve_app_request_seconds", "Duration of completed requests", ["endpoint"], **_histogram(registry)
        )

    def expect(
        self,
        endpoints: Sequence[str],
        outcomes: Sequence[str],
        losses: Sequence[str],
        refusals: Sequence[str],
        grammar_refusals: Sequence[str],
    ) -> None:
        """Create the series of these labels at zero, before any event.

        Otherwise Prometheus misses the first event: it cannot know how much a counter grew before
        its first scrape.
        """
        for endpoint in endpoints:
            self._active.labels(endpoint)
            self._duration.labels(endpoint)
            for outcome in outcomes:
                self._requests.labels(endpoint, outcome)
        for reason in losses:
            self._failovers.labels(reason)
        for reason in refusals:
            self._refusals.labels(reason)
        self._grammars.expect(grammar_refusals)

    def started(self, endpoint: str) -> None:
        """Count a request that arrived."""
        self._active.labels(endpoint).inc()

    def queued(self, seconds: float) -> None:
        """Record that a prompt left the queue after `seconds`."""
        self._queue_wait.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request that was refused because of limits or deadlines."""
        self._refusals.labels(reason).inc()

    def buffered(self, num_bytes: int) -> None:
        """Set the number of bytes in buffered request bodies."""
        self.body_bytes = num_bytes

    def first_token(self, seconds: float) -> None:
        """Record that a request's first token is being sent, `seconds` after its arrival."""
        self._first_token.observe(seconds)

    def tokens(self, count: int, gap: float | None) -> None:
        """Record `count` tokens of one choice, `gap` seconds after its previous ones.

        `gap` None: they are its first tokens.
        """
        self._output_tokens.inc(count)
        # The first token of a choice has no gap.
        for _ in range(count if gap is not None else count - 1):
            self._inter_token.observe((gap or 0.0) / count)

    def failed_over(self, reason: str, num_tokens: int) -> None:
        """Count a lost attempt, whose request had `num_tokens` known tokens."""
        self._failovers.labels(reason).inc()
        self._replayed.inc(num_tokens)

    def false_alarm(self) -> None:
        """Count a replica that was considered stalled and then answered."""
        self._false_alarms.inc()

    def grammar_built(self, seconds: float) -> None:
        """Record how long building a request's grammar took."""
        self._grammars.built(seconds)

    def grammar_refused(self, reason: str) -> None:
        """Count a request whose constraint cannot be enforced."""
        self._grammars.refused(reason)

    def charged(self, key: str, outcome: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Record an ended request of the API key with this name; see `KeyMetrics`."""
        self._keys.charged(key, outcome, prompt_tokens, cached_tokens, output_tokens)

    def finished(self, endpoint: str, outcome: str, prompt_tokens: int, output_tokens: int, seconds: float) -> None:
        """Record an ended request and its duration."""
        self._active.labels(endpoint).dec()
        self._requests.labels(endpoint, outcome).inc()
        self._prompt_tokens.inc(prompt_tokens)
        if outcome == "completed":
            self._duration.labels(endpoint).observe(seconds)


def _register_state(
    registry: CollectorRegistry,
    queued: Callable[[], int],
    ongoing: Callable[[], int],
    engines: Callable[[], tuple[int, int]],
) -> None:
    """Register gauges that are computed at scrape time."""
    Gauge("serve_app_ingress_queue_depth", "Sequences waiting at the ingress", registry=registry).set_function(queued)
    Gauge(
        "serve_app_ingress_requests_ongoing", "Sequences sent to engines and not ended", registry=registry
    ).set_function(ongoing)

    def fleet_ratio() -> float:
        waiting, running = engines()
        return (queued() + waiting) / max(running, 1)

    # The replicas' series of the same name have no `scope`.
    Gauge(
        "serve_app_waiting_served_ratio",
        "Waiting sequences per running one, of all replicas and the ingress",
        ["scope"],
        registry=registry,
    ).labels("fleet").set_function(fleet_ratio)


def merge_expositions(own: CollectorRegistry, others: Mapping[str, str | None]) -> bytes:
    """Merge `own` and the pages of `others` into one Prometheus text page.

    `others` maps replica names to pages, None for replicas that did not answer. Their samples get
    the label `replica`. `serve_app_scrape_up` shows which replicas answered.
    """
    registry = CollectorRegistry()
    registry.register(_MergedPages(own, others))
    return generate_latest(registry)


@dataclass(slots=True, eq=False)
class _MergedPages:
    own: CollectorRegistry
    pages: Mapping[str, str | None]

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not need to collect the pages."""
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {metric.name: metric for metric in self.own.collect()}
        up = GaugeMetricFamily("serve_app_scrape_up", "Whether the replica's metrics port answered", labels=["replica"])
        for replica, page in self.pages.items():
            up.add_metric([replica], float(page is not None))
            for metric in text_string_to_metric_families(page or ""):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
        yield from families.values()
        yield up


def _histogram(registry: CollectorRegistry) -> dict[str, Any]:
    return {"registry": registry, "buckets": _LATENCY_BUCKETS}


def _time_to_first_token(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "serve_app_time_to_first_token_seconds",
        "Time to the first token, measured at the engine and at the ingress",
        ["where"],
        **_histogram(registry),
    )


class _BusyWindow:
    """Fraction of the last ten seconds spent in steps.

    Written by the engine's thread, read by scrapes.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()
        self._since = time.monotonic()

    def add(self, ended_at: float, seconds: float) -> None:
        self._steps.append((ended_at, seconds))
        while self._steps[0][0] < ended_at - _BUSY_WINDOW_S:
            self._steps.popleft()

    def ratio(self, now: float) -> float:
        span = min(_BUSY_WINDOW_S, now - self._since)
        busy = sum(seconds for ended_at, seconds in list(self._steps) if ended_at >= now - span)
        return min(busy / span, 1.0) if span > 0 else 0.0


class _EngineState:
    """Gauges computed at scrape time."""

    def __init__(self) -> None:
        self.stats: Callable[[], SchedulerStats] | None = None
        self.busy = _BusyWindow()

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(
            "serve_app_engine_busy_ratio",
            "Fraction of the last ten seconds that the engine spent in steps",
            self.busy.ratio(time.monotonic()),
        )
        if self.stats is None:
            return
        stats = self.stats()
        for name, value, text in (
            ("requests_waiting", stats.waiting, "Requests waiting in the engine"),
            ("requests_running", stats.running, "Sequences that are running"),
            ("waiting_served_ratio", stats.waiting_served_ratio, "Waiting requests per running one"),
            ("kv_blocks_used", stats.blocks_used, "KV blocks held by requests"),
            ("kv_blocks_cached", stats.blocks_cached, "Free KV blocks that still contain a prefix"),
            ("kv_blocks_total", stats.blocks_total, "Usable KV blocks"),
        ):
            yield GaugeMetricFamily(f"serve_app_{name}", text, float(value))
