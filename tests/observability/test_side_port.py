"""The metrics port: Prometheus' page as ever, and other pages beside it."""

from collections.abc import Mapping

import httpx
from prometheus_client import CollectorRegistry, Counter

from serve_app.observability.metrics import serve_registry


def test_pages_beside_the_metrics() -> None:
    registry = CollectorRegistry()
    Counter("things", "Things", registry=registry).inc(3)
    asked: list[dict[str, str]] = []

    def steps(query: Mapping[str, str]) -> bytes:
        asked.append(dict(query))
        return b'{"a": 1}'

    port = serve_registry(registry, "127.0.0.1", {"/steps": steps})
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        answer = http.get("/steps", params={"seconds": "2.5"})
        assert (answer.json(), answer.headers["content-type"]) == ({"a": 1}, "application/json")
        assert asked == [{"seconds": "2.5"}]
        for path in ("/metrics", "/"):
            assert "things_total 3.0" in http.get(path).text
