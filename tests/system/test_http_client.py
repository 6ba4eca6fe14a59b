"""Requests to our own servers: never through a proxy, and every failure is an `OSError`."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from serve_app.system.http_client import HttpStatusError, fetch


class Handler(BaseHTTPRequestHandler):
    """Echoes the body of a POST; a GET says what its path asks for."""

    def do_GET(self) -> None:
        if self.path == "/cut":
            self._answer(200, b"half", length=8)
        elif self.path == "/garbage":
            self.wfile.write(b"no HTTP\r\n\r\n")
        else:
            self._answer(int(self.path[1:]), b"body of the answer")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, self.headers["Content-Type"].encode() + b" " + body)

    def _answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_get_and_post(url: str) -> None:
    assert fetch(f"{url}/200", timeout_s=10) == b"body of the answer"
    assert fetch(url, timeout_s=10, json_body=b"[1]") == b"application/json [1]"


def test_a_proxy_of_the_environment_is_not_used(url: str) -> None:
    """In a process of its own, because urllib reads the environment when the opener is built."""
    code = f"from serve_app.system.http_client import fetch; print(fetch('{url}/200', timeout_s=10).decode())"
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "body of the answer"


def test_a_refusal_carries_status_and_body(url: str) -> None:
    with pytest.raises(HttpStatusError, match="answered 503") as caught:
        fetch(f"{url}/503", timeout_s=10)
    assert (caught.value.status, caught.value.body) == (503, b"body of the answer")


@pytest.mark.parametrize("path", ["/cut", "/garbage"])
def test_an_incomplete_answer_is_a_connection_error(url: str, path: str) -> None:
    with pytest.raises(ConnectionError):
        fetch(url + path, timeout_s=10)


def test_nobody_listens() -> None:
    with pytest.raises(OSError, match="refused"):
        fetch("http://127.0.0.1:9/", timeout_s=10)


@pytest.mark.parametrize("url", ["no-url", "http://127.0.0.1:x/", "http://127.0.0.1/a b"])
def test_what_is_no_url_is_a_value_error(url: str) -> None:
    with pytest.raises(ValueError, match="URL|url"):
        fetch(url, timeout_s=10)
