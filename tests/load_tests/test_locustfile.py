"""The locustfile against a small real server: users chat, hang up and are counted; the objective
decides the status."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Handler(BaseHTTPRequestHandler):
    """Streams as many tokens as were asked for; `breaks_off` leaves out the end. Remembers what it
    was asked."""

    breaks_off = False
    bodies: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer("application/json", json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        events = [{"choices": [{"delta": {"content": "word "}}]} for _ in range(body["max_tokens"])]
        usage = {"prompt_tokens": 10, "completion_tokens": body["max_tokens"]}
        lines = [json.dumps(event) for event in [*events, {"choices": [], "usage": usage}]]
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


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("OneHandler", (Handler,), {"bodies": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", handler
        running.shutdown()
        thread.join()


def locust(
    url: str, folder: Path, *options: str, seconds: str = "1s"
) -> tuple[int, dict[str, Any], dict[str, Any], str]:
    """A headless run: exit status, locust's own statistics, our summary, what it logged."""
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "load_tests" / "locustfile.py"), "--headless"]
    command += ["--host", url, "-u", "4", "-r", "4", "-t", seconds, "--pace", "0.05", "--only-summary", "--json"]
    command += ["--report", str(folder / "report.html"), "--report-json", str(folder / "report.json"), *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    statistics = {entry["name"]: entry for entry in lists(result.stdout)}
    summary = json.loads((folder / "report.json").read_text())["results"]["locust"]["median"]
    return result.returncode, statistics, summary, result.stderr


def lists(text: str) -> Iterator[Any]:
    """The items of all JSON lists in a text: with several processes each prints its own."""
    while text := text.strip():
        items, end = json.JSONDecoder().raw_decode(text)
        yield from items
        text = text[end:]


LOOSE = ("--slo-ttft", "60", "--slo-tpot", "60")


def test_users_chat_and_everything_is_counted(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    url, handler = server
    status, statistics, summary, log = locust(url, tmp_path, *LOOSE, seconds="3s")
    assert status == 0, log
    answers = statistics["/v1/chat/completions"]
    assert answers["num_failures"] == summary["failures"] == 0
    assert answers["num_requests"] == summary["requests"] == len(handler.bodies) > 20
    assert statistics["met"]["num_requests"] == statistics["TTFT"]["num_requests"] > 0
    assert "missed" not in statistics
    assert {"ITL", "output tok/s"} <= statistics.keys()
    html = (tmp_path / "report.html").read_text()
    assert "Met: " in html
    assert "Users who chat" in html
    conversations = [body["messages"] for body in handler.bodies]
    turns = [[message["role"] for message in messages] for messages in conversations]
    assert all(roles == (["system"] + ["user", "assistant"] * len(roles))[: len(roles)] for roles in turns)
    assert max(map(len, turns)) > 4, "conversations go on"
    assert all(body["stream"] and body["model"] == "tiny" for body in handler.bodies)
    # Few instructions, shared by many; short and long questions and answers.
    assert 1 < len({messages[0]["content"] for messages in conversations}) <= 4
    assert len({body["max_tokens"] for body in handler.bodies}) > 10
    lengths = [len(messages[-1]["content"]) for messages in conversations]
    assert max(lengths) > 5 * min(lengths)


def test_a_missed_objective_fails_the_run(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    status, statistics, summary, log = locust(server[0], tmp_path, "--slo-ttft", "0.0000001")
    assert status == 1
    assert summary["goodput"] == 0.0
    assert statistics["missed"]["num_requests"] > 0
    assert "objective missed" in log
    assert "Missed: 0.0%" in (tmp_path / "report.html").read_text()


def test_answers_that_break_off_fail_the_run(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    server[1].breaks_off = True
    status, statistics, summary, _ = locust(server[0], tmp_path, *LOOSE)
    assert status != 0
    answers = statistics["/v1/chat/completions"]
    assert answers["num_failures"] == summary["failures"] == summary["requests"] - summary["cancelled"] > 0


def test_several_processes_make_one_report(server: tuple[str, type[Handler]], tmp_path: Path) -> None:
    status, _, summary, log = locust(server[0], tmp_path, *LOOSE, "--processes", "2")
    assert status == 0, log
    # What was under way when the run ended may come too late to be reported.
    assert summary["requests"] == pytest.approx(len(server[1].bodies), abs=8)
    assert summary["failures"] == 0


def test_shapes() -> None:
    """In a process of its own: locust patches the whole interpreter."""
    code = """
from load_tests.locustfile import SHAPES, users_wanted
for shape in SHAPES:
    print(*(users_wanted(shape, 20, passed) for passed in (0.0, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.splitlines() == ["20 20 20 20 20 20 20", "1 5 10 13 18 20 20", "5 5 20 20 5 5 5"]
