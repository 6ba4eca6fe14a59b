"""OpenTelemetry spans of generation requests, sent to a collector if an endpoint is configured.

Defines a span's attributes. A span is created when the request has ended, from the same summary as
its log line, so that it does not delay any token. Attribute names follow OpenTelemetry's semantic
conventions for generative AI where these define one.
"""

import re
from collections.abc import Mapping
from typing import Any

from serve_app.errors import ConfigError
from serve_app.system.version import __version__

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
"""W3C Trace Context, version 00: trace id, parent's span id, flags."""
_OPERATIONS = {"completions": "text_completion", "responses": "chat", "messages": "chat"}
"""OpenTelemetry's names for endpoints that it names differently."""


class RequestSpans:
    """Sends a span for every request, from its own thread."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: a collector's address for OTLP over HTTP, such as `http://127.0.0.1:4318`.

        Raises `ConfigError` if the exporter is not installed.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise ConfigError("ingress.otlp_endpoint: needs the exporter: pip install 'serve_app[trace]'") from None
        resource = Resource.create({"service.name": "serve_app", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=True)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("serve_app", __version__)
        self._model = model

    def __call__(self, summary: Mapping[str, Any]) -> None:
        """Send a span from the request's arrival to its end, with its queue time as a child."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        started_at: int = round(summary["started_at"] * 1e9)

        def at(seconds: float) -> int:
            return started_at + round(seconds * 1e9)

        operation = _OPERATIONS.get(summary["endpoint"], summary["endpoint"])
        parent = _parent(summary["traceparent"])
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            parent,
            start_time=at(0),
            attributes=_attributes(summary, operation, self._model),
        )
        if summary["queue_s"] is not None:
            queue = self._tracer.start_span("queue", set_span_in_context(span), start_time=at(0))
            queue.end(at(summary["queue_s"]))
        if summary["first_token_s"] is not None:
            span.add_event("first token", timestamp=at(summary["first_token_s"]))
        if summary["error"] is not None:
            span.set_status(Status(StatusCode.ERROR, summary["error"]))
        span.end(at(summary["seconds"]))


def _attributes(summary: Mapping[str, Any], operation: str, model: str) -> dict[str, Any]:
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": summary["prompt_tokens"],
        "gen_ai.usage.output_tokens": summary["output_tokens"],
        "serve_app.request_id": summary["request_id"],
        "serve_app.outcome": str(summary["outcome"]),
        "serve_app.replicas": summary["replicas"],
    }
    return attributes if summary["error"] is None else {**attributes, "error.type": summary["error"]}


def _parent(traceparent: str | None) -> Any:
    """Return the client's span as a context; None if missing or malformed."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    found = _TRACEPARENT.fullmatch(traceparent or "")
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(context)) if context.is_valid else None
