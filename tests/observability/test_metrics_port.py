"""The metrics port: Prometheus' page as ever, other pages beside it, and all of it behind a key if
need be."""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
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


def connect(port: int, opening: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(opening)
    return connection


@pytest.mark.parametrize("opening", [b"", b"GET /metrics HTTP/1.1\r\nHo", b"GET / HTTP/1.1\r\nA: " + b"a" * 10_000])
def test_silent_connections_cost_no_thread_and_few_descriptors(opening: bytes) -> None:
    """However many there are; and a request that arrives is answered beside them."""
    port = serve_registry(CollectorRegistry(), "127.0.0.1", {"/page": lambda _: b"{}"})
    process, crowd = psutil.Process(), []
    httpx.get(f"http://127.0.0.1:{port}/page")
    threads, descriptors = threading.active_count(), process.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            with contextlib.suppress(ConnectionError):
                crowd.append(stack.enter_context(connect(port, opening)))
        assert httpx.get(f"http://127.0.0.1:{port}/page", timeout=30).json() == {}
        assert threading.active_count() <= threads + 2
        assert process.num_fds() - descriptors - len(crowd) <= 70
        for connection in crowd:  # the others' time is over after 5 s
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""


def test_a_request_in_pieces_is_answered() -> None:
    port = serve_registry(CollectorRegistry(), "127.0.0.1", {"/page": lambda query: query["a"].encode()})
    with connect(port, b"GET /page?a=b%20c HT") as connection:
        for piece in (b"TP/1.1\r", b"\nHost: x\r\n", b"\r\n"):
            time.sleep(0)
            connection.sendall(piece)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nb c")


def test_a_page_that_fails_does_not_take_the_port_with_it() -> None:
    def fails(_: Mapping[str, str]) -> bytes:
        raise KeyError("seconds")

    port = serve_registry(CollectorRegistry(), "127.0.0.1", {"/fails": fails, "/page": lambda _: b"{}"})
    for _ in range(5):
        assert httpx.get(f"http://127.0.0.1:{port}/fails").status_code == 500
    assert httpx.get(f"http://127.0.0.1:{port}/page").status_code == 200


@pytest.fixture(scope="module")
def port() -> int:
    return serve_registry(CollectorRegistry(), "127.0.0.1", {"/page": lambda _: b"{}"}, lambda key: key == "right")


@given(st.binary(max_size=300))
def test_whatever_comes_is_answered_or_closed(port: int, junk: bytes) -> None:
    with connect(port, junk + b"\r\n\r\n") as connection, contextlib.suppress(ConnectionError):
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 401")
