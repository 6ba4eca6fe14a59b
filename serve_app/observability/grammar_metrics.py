"""Metrics of constrained output: per step in the engine, per request at the ingress."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from serve_app.core.step_record import StepRecord

_BUILD_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class StepGrammarMetrics:
    """Metrics of grammars in engine steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rows = Counter("serve_app_constrained_rows", "Rows that sampled under a grammar", registry=registry)
        self._forced = Counter(
            "serve_app_forced_tokens",
            "Tokens forced by a grammar and accepted as drafts",
            registry=registry,
        )
        self._mask_s = Counter(
            "serve_app_grammar_mask_seconds", "Processor time of grammar masks, outside the model", registry=registry
        )

    def on_step(self, record: StepRecord) -> None:
        """Count one finished step."""
        rows = sum(row.constrained and row.samples for row in record.rows)
        for counter, amount in (
            (self._rows, rows),
            (self._forced, record.num_forced_tokens),
            (self._mask_s, record.mask_s),
        ):
            if amount:
                counter.inc(amount)


class RequestGrammarMetrics:
    """Metrics of building the grammars of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._build = Histogram(
            "serve_app_grammar_build_seconds",
            "Time in which the ingress built and checked a request's grammar",
            registry=registry,
            buckets=_BUILD_BUCKETS,
        )
        self._refusals = Counter(
            "serve_app_grammar_refusals", "Requests whose constraint cannot be enforced", ["reason"], registry=registry
        )

    def expect(self, reasons: Sequence[str]) -> None:
        """Create the series at zero; see `IngressMetrics.expect`."""
        for reason in reasons:
            self._refusals.labels(reason)

    def built(self, seconds: float) -> None:
        """Record how long building a request's grammar took."""
        self._build.observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a request whose constraint cannot be enforced."""
        self._refusals.labels(reason).inc()
