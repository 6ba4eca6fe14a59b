"""The locustfile against a small real server: a headless run ends well, and badly when the server does."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

LOCUSTFILE = Path(__file__).parents[2] / "load_tests" / "locustfile.py"


class Handler(BaseHTTPRequestHandler):
    """Streams three tokens; `breaks_off` leaves out the end."""

    breaks_off = False

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"]
        assert body["model"] == "tiny"
        events = [{"choices": [{"delta": {"content": "word "}}]} for _ in range(3)]
        lines = [json.dumps(event) for event in [*events, {"choices": [], "usage": {"completion_tokens": 3}}]]
        ends = [] if self.breaks_off else ["[DONE]"]
        self._answer("text/event-stream", "".join(f"data: {line}\n\n" for line in [*lines, *ends]))

    def _answer(self, content_type: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(params=[False, True], ids=["whole", "broken off"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, bool]]:
    handler = type("OneHandler", (Handler,), {"breaks_off": request.param})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", request.param
        running.shutdown()
        thread.join()


def test_a_headless_run(server: tuple[str, bool], tmp_path: Path) -> None:
    url, breaks_off = server
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--host", url]
    command += ["-u", "2", "-r", "2", "-t", "3s", "--only-summary", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    statistics = {entry["name"]: entry for entry in json.loads(result.stdout)}
    answers = statistics["/v1/chat/completions"]
    assert answers["num_requests"] > 0
    if breaks_off:
        assert result.returncode != 0
        assert answers["num_failures"] == answers["num_requests"]
        assert "TTFT" not in statistics
    else:
        assert result.returncode == 0, result.stderr
        assert answers["num_failures"] == 0
        assert statistics["TTFT"]["num_requests"] == statistics["ITL"]["num_requests"] == answers["num_requests"]
