"""The metrics port: Prometheus' page as ever, other pages beside it, and all of it behind a key if need be."""

from collections.abc import Mapping

import httpx
from prometheus_client import CollectorRegistry, Counter

from serve_app.observability.metrics_port import serve_registry


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


def test_nothing_is_shown_without_an_admitted_key() -> None:
    registry = CollectorRegistry()
    Counter("things", "Things", registry=registry).inc(3)
    port = serve_registry(registry, "127.0.0.1", {"/steps": lambda _: b"{}"}, lambda key: key == "right")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for path in ("/metrics", "/", "/steps", "/none"):
            for wrong in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
                answer = http.get(path, headers=wrong)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert "things" not in answer.text
            assert http.get(path, headers={"authorization": "Bearer right"}).status_code == 200
