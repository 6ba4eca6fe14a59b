"""Spans as a collector receives them: OTLP over HTTP, on a real port."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serve_app.observability.tracing import RequestSpans

SUMMARY: dict[str, Any] = {
    "request_id": "mine-1",
    "endpoint": "chat",
    "outcome": "completed",
    "error": None,
    "prompt_tokens": 7,
    "output_tokens": 4,
    "queue_s": 0.5,
    "first_token_s": 0.75,
    "seconds": 2.0,
    "started_at": 1_700_000_000.0,
    "replicas": ("alpha", "beta"),
    "engine_ids": ("e1",),
    "traceparent": None,
}
START = 1_700_000_000 * 10**9


@dataclass
class Collector:
    url: str
    spans: dict[str, Any] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                found.services.update(
                    a.value.string_value for a in resource.resource.attributes if "service.n" in a.key
                )
                for scope in resource.scope_spans:
                    found.spans.update({span.name: span for span in scope.spans})

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_port}/")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield found
        server.shutdown()
        thread.join()


def sent(collector: Collector, **changes: Any) -> dict[str, Any]:
    spans = RequestSpans(collector.url, "tiny")
    spans({**SUMMARY, **changes})
    spans._provider.shutdown()  # sends what is left, as the end of the process does
    return collector.spans


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return values


def test_a_request_is_a_span_with_its_wait_as_a_child(collector: Collector) -> None:
    spans = sent(collector)
    span, queue = spans["chat tiny"], spans["queue"]
    assert collector.services == {"serve_app"}
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (START, START + 2 * 10**9)
    assert (queue.start_time_unix_nano, queue.end_time_unix_nano) == (START, START + 5 * 10**8)
    assert queue.parent_span_id == span.span_id
    assert [(event.name, event.time_unix_nano) for event in span.events] == [("first token", START + 75 * 10**7)]
    assert attributes(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 4,
        "serve_app.request_id": "mine-1",
        "serve_app.outcome": "completed",
        "serve_app.replicas": ["alpha", "beta"],
    }
    assert span.status.code == 0


def test_the_clients_trace_goes_on(collector: Collector) -> None:
    span = sent(collector, traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")["chat tiny"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == ("ab" * 16, "cd" * 8)


@pytest.mark.parametrize("given", ["", "nonsense", "00-" + "0" * 32 + "-" + "c" * 16 + "-01", "00-ab-cd-01\n"])
def test_any_other_traceparent_is_ignored(collector: Collector, given: str) -> None:
    span = sent(collector, traceparent=given)["chat tiny"]
    assert span.parent_span_id == b""


def test_a_failure_is_an_error(collector: Collector) -> None:
    span = sent(collector, error="engine_died", outcome="failed", queue_s=None, first_token_s=None)["chat tiny"]
    assert (span.status.code, span.status.message) == (2, "engine_died")
    assert attributes(span)["error.type"] == "engine_died"
    assert not span.events
